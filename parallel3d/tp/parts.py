"""Hooks and attributes through which code outside a tensor-parallel model would read a part of a tensor.

Between a column-parallel and a row-parallel layer each rank has only a part of the features. So a hook on a
module there sees a part, and a value that a forward leaves in an attribute (``self.penalty``, which the
training loop adds to the loss) is a part. Hooks of split modules raise StateError when the module is called.
Other hooks and attributes are checked in the first training forward: autograd's graph shows whether a tensor
was computed from a part without a collective that makes it whole. An attribute with a part is replaced by a
tensor that raises when code outside the model's forward computes with it. Blocks under ``torch.compile`` and
torch's own styles are not checked.
"""

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._torch.autograd import is_compiled
from parallel3d._torch.simulated import ranks_are_simulated
from parallel3d._torch.v2_11 import IS_2_11
from parallel3d._trace.copies import left_by_forward
from parallel3d._util.forwards import packages_of
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.errors import StateError

# ---- hooks ----

_KNOWN = {"torch", "parallel3d", "transformers", "peft", "accelerate", "lightning"}
_KNOWN |= sys.stdlib_module_names - {"__main__"}
"""Packages whose hooks compute nothing with what they see."""
_BEFORE = ("_forward_pre_hooks",)
_AFTER = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_REMEDY = (
    "put it on the module around, whose input and output are whole, or leave the module whole in the plan "
    "('replicate')"
)


def hooks_on_parts(module: nn.Module, takes: bool, gives: bool) -> str:
    """Returns the name of a hook of ``module`` that would get this rank's part of a tensor, or ``""``.
    ``takes``, ``gives``: whether the module's input, and its output, is such a part."""
    kinds = _BEFORE * takes + _AFTER * (takes or gives)
    for hook in (hook for kind in kinds for hook in module.__dict__[kind].values()):
        if not _KNOWN.issuperset(packages_of(hook)):
            return getattr(hook, "__qualname__", type(hook).__qualname__)
    return ""


def refused_hook(hook: str, name: str) -> str:
    """Returns the error message for the hook named ``hook`` on the module ``name``."""
    return f"the hook {hook} of {name!r} would see this rank's part of what is split over tp; {_REMEDY}"


def refuse_hooks(module: nn.Module, style: Any) -> None:
    """Raises StateError if a hook of ``module``, which has ``style``, would get this rank's part of a tensor;
    called in each forward."""
    hook = hooks_on_parts(module, *style.parts)
    if hook:
        raise StateError(refused_hook(hook, f"{type(module).__name__} as {style}"))


# ---- attributes ----


class PartOfRank(Tensor):
    """A tensor that replaces the value of a module's attribute if that is only this rank's part of a tensor.
    Its shape, dtype and device can be read; computing with it raises StateError.

    Attributes:
        attribute: the attribute's path, for the message.
        part: the value that it replaces.
    """

    attribute: str
    part: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs)
        found = next(t for t in tensors_in((args, kwargs)) if isinstance(t, cls))
        raise StateError(
            f"{found.attribute} is made of this rank's part of what is split over tp, and so would be what "
            'is computed with it. Leave the layers whole in the plan ("replicate"), as tp_plan="auto" does '
            "where it sees this, or make it of the module's whole output"
        )


_HARMLESS = {"__get__", "__repr__", "__hash__", "__len__", "as_subclass", "register_hook"}
_HARMLESS |= {"size", "dim", "numel", "element_size", "stride"}
_HARMLESS |= {"is_floating_point", "is_contiguous"}


def _replace(module: nn.Module, name: str, fn: Any) -> None:
    value = vars(module).get(name)
    made: Any = map_tensors(fn, value)
    if made is value:
        return
    if isinstance(value, list):  # others may hold the same list
        value[:] = made
    elif isinstance(value, dict):
        value.update(made)
    else:
        vars(module)[name] = made


# ---- what is a part ----

# Of ``_Collective`` the operation of the backward, of forwards that leave the whole; other nodes by name.
_MAKE_WHOLE = {"copy", "split", "split_packed", "_FullBackward", "_LossBackward", "_MakeBackward"}
_MAKE_PARTS = {"reduce", "gather", "gather_packed", "reduce_scatter", "gather_copies"}
_MAKE_PARTS |= {"_SharedBackward", "GatherLinearBackward"}
if IS_2_11:  # there a collective in place, of a matmul's output that is a view, has this name
    _MAKE_WHOLE |= {"torch::autograd::CopySlices"}


class _Graph:
    """Finds out whether a rank has only its part of a tensor: the last collective before it in autograd's
    graph shows it."""

    def __init__(self) -> None:
        self.known: dict[Any, bool] = {}  # node -> whether its output is a part

    def has_part(self, tree: Any) -> bool:
        """Whether ``tree`` has a tensor of which each rank has only a part, or a summand."""
        return any(t.grad_fn is not None and self._is_part(t.grad_fn) for t in tensors_in(tree))

    def _is_part(self, last: Any) -> bool:
        path = [last]
        while path:
            node = path[-1]
            if node not in self.known:
                kind = node.name()
                kind = node.operation if kind == "_CollectiveBackward" else kind
                if kind in _MAKE_WHOLE or kind in _MAKE_PARTS:
                    self.known[node] = kind in _MAKE_PARTS
            if node in self.known:
                path.pop()
                continue
            inputs = [n for n, _ in node.next_functions if n is not None]
            if any(self.known.get(n) for n in inputs):
                self.known[node] = True
            elif unknown := [n for n in inputs if n not in self.known]:
                path.append(unknown[0])
            else:
                self.known[node] = False
        return self.known[last]


def _trains(model: nn.Module) -> bool:
    return torch.is_grad_enabled() and model.training and not torch.compiler.is_compiling()


@dataclass
class _PartWatch:
    """The hooks that look for parts in hooks' arguments and in attributes during a model's first training
    forward; they are removed after it unless an attribute has a part.

    Attributes:
        sources: modules whose output is a part.
        handles: handles of the hooks that are registered for one forward.
        own: handles of the hooks on the model.
        found: (path, module, attribute) of attributes with parts; None before that forward.
    """

    sources: list[nn.Module]
    handles: list[Any] = field(default_factory=list)
    own: list[Any] = field(default_factory=list)
    found: list[tuple[str, nn.Module, str]] | None = None
    graph: _Graph = field(default_factory=_Graph)

    def __deepcopy__(self, memo: Any) -> "_PartWatch":
        return type(self)([], found=[])  # of a copy nothing is watched

    def begin(self, model: nn.Module, args: Any) -> None:
        for _, module, name in self.found or ():
            _replace(module, name, lambda t: getattr(t, "part", t))
        if self.found is not None or not _trains(model):
            return
        self._forget()
        outer = (module for module in model.modules() if is_compiled(module))
        compiled = {id(module) for each in outer for module in each.modules()}
        for module in self.sources:
            if id(module) not in compiled:
                hook = module.register_forward_hook(self._note, prepend=True)
                self.handles.append(hook)
        for path, module in model.named_modules():
            if hooks_on_parts(module, True, True) and id(module) not in compiled:
                check = functools.partial(self._check_hooked, path)
                hook = module.register_forward_hook(check, prepend=True, with_kwargs=True)
                self.handles.append(hook)

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                self.graph.known[tensor.grad_fn] = True

    def _check_hooked(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        takes, gives = self.graph.has_part((args, kwargs)), self.graph.has_part(output)
        if hook := hooks_on_parts(module, takes, gives):
            raise StateError(refused_hook(hook, path))

    def _forget(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.graph.known.clear()

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.found is None:
            if not _trains(model):
                return
            self.found = [
                (path, module, name)
                for path, module, name in left_by_forward(model)
                if self.graph.has_part(vars(module)[name])
            ]
            self._forget()
            if not self.found:
                for handle in self.own:
                    handle.remove()
        if torch.is_grad_enabled() and not ranks_are_simulated():
            for path, module, name in self.found:
                where = f"{path}.{name}".lstrip(".")
                _replace(module, name, functools.partial(_guarded, where))


def _guarded(where: str, tensor: Tensor) -> Tensor:
    if tensor.grad_fn is None or isinstance(tensor, PartOfRank):
        return tensor
    guarded = tensor.as_subclass(PartOfRank)
    guarded.attribute, guarded.part = where, tensor
    return guarded


def watch_parts(model: nn.Module, styles: Mapping[str, Any]) -> None:
    """Adds the hooks to ``model`` that raise StateError for hooks and attributes which would show a part of a
    tensor (see the top of the file). ``styles``: path -> style of an applied plan."""
    watch = _PartWatch([model.get_submodule(n) for n, style in styles.items() if style.parts[1]])
    watch.own = [
        model.register_forward_pre_hook(watch.begin),
        model.register_forward_hook(watch.end),
    ]
