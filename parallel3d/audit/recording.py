"""Records what the units of a parallel model get, return and receive as gradients in one step, on this
rank."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._torch.autograd import in_backward_pass, untraced
from parallel3d._util.trees import map_tensors, members


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (path, tensor) of all tensors nested in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        items = enumerate(value) if isinstance(value, (tuple, list)) else members(value).items()
        for key, item in items:
            yield from leaves(item, f"{path}.{key}")


def replaced(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns ``value`` with the tensors at the paths in ``tensors`` replaced by these."""
    paths = iter([path for path, _ in leaves(value)])
    return map_tensors(lambda tensor: tensors.get(next(paths), tensor), value)


def kept(tensor: Tensor) -> Tensor:
    """Returns a copy in the CPU's memory, which later changes of ``tensor`` don't reach."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def left_on(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (``@path.attribute``, tensor) for each tensor with a graph that a forward has stored as an
    attribute of a module inside ``module``."""
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield f"@{path}.{name}" if path else f"@{name}", value


def put_on(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Sets ``tensors`` as attributes of modules; their keys are paths that ``left_on`` yields."""
    for path, tensor in tensors.items():
        owner, _, name = path[1:].rpartition(".")
        setattr(module.get_submodule(owner), name, tensor)


@dataclasses.dataclass(eq=False)
class ModuleCall:
    """One call of a module: copies of its tensors, and the gradients that have arrived, by path."""

    inputs: dict[str, Tensor]  # in ``(args, kwargs)``
    outputs: dict[str, Tensor] | None = None  # None while the call runs
    input_grads: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    output_grads: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    odd: set[str] = dataclasses.field(default_factory=set)  # outputs of a class that is not torch's
    is_plain: bool = False  # it built no graph, as the first run in a reentrant checkpoint


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


class Recording:
    """Records, by hooks until ``stop``, the calls of ``modules``: ``calls`` has them by the module's name.
    The forward of the model itself has begun, with ``inputs``."""

    def __init__(self, modules: Mapping[str, nn.Module], inputs: Any) -> None:
        self.calls: dict[str, list[ModuleCall]] = defaultdict(list)
        self._running: dict[str, list[ModuleCall]] = defaultdict(list)
        self._handles: list[Any] = []
        self._is_over = False
        self.root = self._begin("", inputs)
        for name, module in modules.items():
            if name:
                self._handles += [
                    module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
                    module.register_forward_hook(partial(self._after, name)),
                ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def is_reached(self) -> bool:
        """Whether a gradient has arrived for one of the recorded calls."""
        return any(call.output_grads for calls in self.calls.values() for call in calls)

    def end_forward(self, output: Any, module: nn.Module) -> Any:
        """Ends the model's forward and returns its output as ``_end`` does; later calls are recomputation."""
        self._is_over = True
        return self._end(self.root, output, module)

    @untraced
    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not in_backward_pass():
            if self._is_over:
                return None
            call = self._begin(name, (args, kwargs))
        else:
            plain = [call for call in self.calls[name] if call.is_plain]
            if not plain or not torch.is_grad_enabled():
                return None
            call = plain[-1]
            call.is_plain = False
        self._running[name].append(call)
        if call.is_plain:
            return None
        # Aliases, whose gradients are this call's share of those that reach the inputs.
        tensors = [(path, t) for path, t in leaves((args, kwargs)) if _is_plain(t)]
        return replaced((args, kwargs), _aliases(tensors, call.input_grads))

    @untraced
    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        running = self._running[name]
        return self._end(running.pop(), output, module) if running else output

    def _begin(self, name: str, inputs: Any) -> ModuleCall:
        tensors = dict(leaves(inputs))
        call = ModuleCall({path: kept(t) for path, t in tensors.items() if _is_plain(t)})
        call.is_plain = not torch.is_grad_enabled()
        self.calls[name].append(call)
        return call

    def _end(self, call: ModuleCall, output: Any, module: nn.Module) -> Any:
        """Records the output of a call of ``module``, and returns it with aliases of its tensors.

        The gradients of the aliases come only from code outside of the module. A loss that the module returns
        beside its logits also gives the logits a gradient, which must not be counted.
        """
        left = dict(left_on(module))
        tensors = dict(leaves(output)) | left
        call.odd = {path for path, t in tensors.items() if not _is_plain(t)}
        plain = {path: t for path, t in tensors.items() if path not in call.odd}
        call.outputs = {path: kept(t) for path, t in plain.items()}
        aliases = _aliases(plain.items(), call.output_grads)
        put_on(module, {path: alias for path, alias in aliases.items() if path in left})
        return replaced(output, aliases)


def _aliases(tensors: Iterable[tuple[str, Tensor]], grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns path -> view of each tensor that needs a gradient; their gradients are summed in ``grads``."""

    @untraced
    def note(path: str, grad: Tensor) -> None:
        grads[path] = kept(grad) + grads[path] if path in grads else kept(grad)

    aliases = {path: tensor.view_as(tensor) for path, tensor in tensors if tensor.requires_grad}
    for path, alias in aliases.items():
        if alias.requires_grad:  # not where gradients are off
            alias.register_hook(partial(note, path))
    return aliases


def set_dropout(model: nn.Module, value: Callable[[nn.Module, str, float], float]) -> None:
    """Sets each dropout rate (``p`` of ``nn.Dropout`` and the like) to ``value(module, name, rate)``."""
    for module in model.modules():
        is_one = "drop" in type(module).__name__.lower()
        for name, found in list(vars(module).items()):
            if isinstance(found, float) and (
                (is_one and name in ("p", "drop_prob")) or "drop" in name.lower()
            ):
                object.__setattr__(module, name, value(module, name, found))
