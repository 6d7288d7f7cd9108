"""Flow: which tensors of a model's forward differ between tp ranks, found by running it once on meta.

A plan says what happens at modules. Between them the model's own code runs, on each rank with its part of
the features or heads. This finds what that code does wrong, without values and without ranks: the model's
copy runs on the meta device under a ``TorchFunctionMode`` that keeps for each tensor whether it is *local*
(each rank has another: what a column-parallel module puts out and all that is computed from it) or whole.

- A parameter that no rule mentions and that meets a local tensor gets only a part of its gradient.
- So does a whole activation that meets one without a column-parallel module between.
- A parameter whose gradient is summed over tp and that meets whole activations gets it tp times.
- A row-parallel module wants a local input, a column-parallel one a whole one.
- Code that the plan wasn't written for has to do with whole tensors only, and nobody with a split module's
  parameters but the module.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallel3d._torch.simulated import simulation_off
from parallel3d._util.trees import tensors_in
from parallel3d.tp.local_attributes import NOT_COMPUTING, reads_of
from parallel3d.tp.styles import (
    Colwise,
    Experts,
    LocalParams,
    LocalSizes,
    PrepareInput,
    Replicated,
    RopeOutput,
    Rowwise,
    Style,
)

# Whose code a module runs: its family's, which the plan was written for, or somebody else's.
#
# A plan says of a family's modules what is split, and is right only with the family's code between
# them. A subclass with a forward of its own, a patched forward, a hook, or an attention function
# that was registered may mix heads or features that ranks have shared out, and no rule shows it.


def plan_packages(model: nn.Module) -> frozenset[str]:
    """The packages that the plans of ``model`` and of the models inside it come from."""
    found = set()
    for module in model.modules():
        for owner, name in (
            (module, "_tp_plan"),
            (getattr(module, "config", None), "base_model_tp_plan"),
        ):
            for cls in type(owner).__mro__:
                plan = vars(cls).get(name)
                if isinstance(plan, Mapping) and plan:
                    found.add(_package(cls.__module__))
    return frozenset(found)


class OwnCode:
    """Tells code that a plan was not written for.

    Args:
        packages: that plans come from, as :func:`plan_packages` finds them.
    """

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages | {"torch", "parallel3d", *sys.stdlib_module_names} - {"__main__"}
        self._classes: dict[type, bool] = {}

    def runs_in(self, module: nn.Module) -> bool:
        """Whether what ``module`` computes is, or may be, code of other packages."""
        patched = vars(module).get("forward")
        if patched is not None and self._is(patched):
            return True
        cls = type(module)
        if cls not in self._classes:
            self._classes[cls] = any(map(self._is, _methods(cls)))
        return self._classes[cls] or self._attends_by(module)

    def hooks_of(self, module: nn.Module) -> bool:
        """Whether a hook of other packages may change what ``module`` is given or gives."""
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        return any(map(self._is, hooks))

    def _attends_by(self, module: nn.Module) -> bool:
        """Whether the attention function that the module's config names is such code."""
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if "config._attn_implementation" not in (reads_of(module) or ()):
            return False
        known = getattr(
            sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {}
        )
        return name in known and self._is(known[name])

    def _is(self, function: Any) -> bool:
        return any(_package(f) not in self._packages for f in _modules_of(function))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _methods(cls: type) -> Iterator[Callable[..., Any]]:
    for base in cls.__mro__:
        if base not in (nn.Module, object):
            for name, member in vars(base).items():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if (
                    name not in NOT_COMPUTING
                    and callable(function)
                    and not isinstance(function, type)
                ):
                    yield function


def _modules_of(function: Any) -> Iterator[str]:
    """Where a function and all that it wraps were written; ``functools.wraps`` copies ``__module__``."""
    while function is not None:
        function = getattr(function, "__func__", function)
        scope = getattr(function, "__globals__", None)
        yield str((scope or {}).get("__name__") or type(function).__module__)
        function = getattr(function, "__wrapped__", getattr(function, "func", None))


@dataclass(frozen=True)
class Meeting:
    """A whole parameter used together with a local tensor.

    Attributes:
        shape: of the parameter, or of what was computed from it alone.
        local_shape: of the local tensor, as in the plain model.
        apart: whether the local tensor's heads are in a dim of their own, so that its last one isn't split.
        sources: the modules that made it local.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    apart: bool
    sources: frozenset[str]


@dataclass(frozen=True)
class Clash:
    """Something no rule for a parameter repairs: what it is, in words, and the modules it is about."""

    text: str
    modules: frozenset[str]


@dataclass
class Flow:
    """What one forward showed.

    Attributes:
        met: path of a parameter -> where it met local tensors.
        whole: paths of the parameters that met whole activations.
        clashes: what is wrong whatever rules parameters get.
    """

    met: dict[str, list[Meeting]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    clashes: dict[Clash, None] = field(default_factory=dict)

    def joined(self, other: "Flow") -> "Flow":
        """What both showed."""
        met = {k: self.met.get(k, []) + other.met.get(k, []) for k in {**self.met, **other.met}}
        return Flow(met, self.whole | other.whole, {**self.clashes, **other.clashes})


@dataclass(frozen=True)
class _Value:
    """What is known of a tensor.

    Attributes:
        sources: modules (or split parameters) it is local by; empty: whole.
        apart: whether the last dim, which those split, was made two: heads and the features of each.
        params: the parameters it is computed from alone; ``None``: it is an activation.
        copied: its gradient is summed where it was made, so it may meet local tensors.
        maker: the module that computed it.
    """

    sources: frozenset[str] = frozenset()
    apart: bool = False
    params: frozenset[str] | None = None
    copied: bool = False
    maker: str = ""


_CONSTANT = _Value(params=frozenset())


def trace_flow(
    model: nn.Module,
    styles: dict[str, Style],
    call: Callable[[nn.Module], Any],
    code: OwnCode,
) -> Flow:
    """Runs a meta copy of ``model``, as the ``styles`` of its modules would have it, and says what meets.

    Args:
        styles: path -> style, for modules and for parameters.
        call: runs the copy.
        code: tells code that the plan wasn't written for.

    Raises:
        Exception: whatever ``call`` raises, such as for code that needs values.
    """
    with simulation_off():
        twin = _meta_copy(model)
        watch = _Watch(twin, styles, code)
        with torch.enable_grad(), watch:
            result = call(twin)
        watch.check_result(result)
    return watch.flow


def _meta_copy(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo).eval()


class _Watch(TorchFunctionMode):
    """Follows local tensors through the calls of torch's functions and of modules."""

    def __init__(self, model: nn.Module, styles: dict[str, Style], code: OwnCode) -> None:
        super().__init__()
        self.flow = Flow()
        self._styles = styles
        self._values: dict[int, tuple[Tensor, _Value]] = {}  # the tensor too, so that its id stays
        self._stack: list[
            tuple[str, bool]
        ] = []  # whose code runs: a module's path, whether its own
        self._split: dict[int, str] = {}  # id of a parameter -> the module whose style splits it
        self._code = code
        self._inside = 0  # modules whose style says what they put out
        for path, param in model.named_parameters():
            style = styles.get(path)
            split = style is not None and not isinstance(style, Replicated)
            sources = frozenset([path]) if split else frozenset[str]()
            self._set(param, _Value(sources, False, frozenset([path])))
        self._holders: dict[int, list[str]] = {}  # id of a parameter -> the modules that have it
        for path, module in model.named_modules():
            for own in module._parameters.values():
                self._holders.setdefault(id(own), []).append(path)
            self._hook(path, module, styles.get(path))

    # ---- modules ----

    def _hook(self, path: str, module: nn.Module, style: Style | None) -> None:
        transparent = style is None or _is_transparent(style)
        own, hooked = self._code.runs_in(module), self._code.hooks_of(module)
        if own:
            module.training = True  # what it does only then counts too
        if not transparent and not isinstance(style, LocalSizes):
            self._split |= {id(p): path for p in module._parameters.values() if p is not None}

        def hooks_begin(*_: Any) -> None:
            self._stack.append((path, hooked))

        def hooks_end(*_: Any) -> None:
            self._stack.pop()

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append((path, own))
            if not transparent:
                if not self._inside:
                    self._check_input(path, style, args, kwargs)
                self._inside += 1

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._stack.pop()
            if not transparent:
                self._inside -= 1
                if not self._inside:
                    self._set_output(path, style, output)

        # The module's own hooks run outside of it, between these.
        module.register_forward_pre_hook(hooks_begin, prepend=True)
        module.register_forward_pre_hook(hooks_end)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(hooks_begin, prepend=True)
        module.register_forward_hook(after, with_kwargs=True, prepend=True)
        module.register_forward_hook(hooks_end)
        if isinstance(style, Experts):  # its code chooses by values
            module.forward = lambda *args, **kwargs: next(tensors_in((args, kwargs))) * 1

    def _check_input(self, path: str, style: Any, args: Any, kwargs: Any) -> None:
        given = [self._get(x) for x in tensors_in((args, kwargs)) if x.is_floating_point()]
        if not given:
            return
        wants = _wants(style)
        if wants == "local" and not given[0].sources:
            text = f"{path!r} as {style} wants each rank's part, but its input is whole"
            self.flow.clashes[Clash(text, frozenset([path]))] = None
        for value in given if wants == "whole" else []:
            if value.sources:
                text = f"{path!r} as {style} wants a whole input, but gets parts, of {quoted(value.sources)}"
                self.flow.clashes[Clash(text, value.sources | {path})] = None

    def _set_output(self, path: str, style: Any, output: Any) -> None:
        for x in tensors_in(output):
            local = isinstance(style, Colwise) and style.output == "shard"
            sources = frozenset([path]) if local else frozenset[str]()
            copied = isinstance(style, RopeOutput)
            self._set(x, _Value(sources, False, None, copied, path))

    def check_result(self, result: Any) -> None:
        """A model must not put out a part."""
        for x in tensors_in(result):
            if sources := self._get(x).sources:
                text = f"the model's output is each rank's part, of {quoted(sources)}"
                self.flow.clashes[Clash(text, sources)] = None

    # ---- functions ----

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__bool__":
            return True  # has no value here; models ask whether a mask is of the usual kind
        result = func(*args, **(kwargs or {}))
        if self._inside:
            return result
        changed = args[:1] if getattr(func, "__name__", "") == "__setitem__" else ()
        made = [*tensors_in(result), *tensors_in(changed)]
        self._check_reduction(func, args, kwargs or {})
        if made:
            given = list(tensors_in((args, kwargs)))
            value = self._combine(given)
            self._check_code(func, given, value)
            for x in made:
                self._set(x, _reshaped(func, given, x, value) if value.sources else value)
        return result

    def _check_code(self, func: Any, given: list[Tensor], value: _Value) -> None:
        """Who may compute with parts, and with the parameters that are split."""
        where, own = self._stack[-1] if self._stack else ("", False)
        if own and value.sources:
            text = (
                f"{where!r} runs code that the plan was not written for, on each rank's part, of "
                f"{quoted(value.sources)}"
            )
            self.flow.clashes[Clash(text, value.sources | {where})] = None
        for x in given:
            holders = self._holders.get(id(x), [])
            owner = self._split.get(id(x))
            # One that is tied gets a style in the end.
            if owner is not None and where not in holders:
                name = getattr(func, "__name__", func)
                text = f"{where or 'the model'!r} reads a parameter of {owner!r}, which is split, by {name}"
                self.flow.clashes[Clash(text, frozenset([owner, where]))] = None

    def _check_reduction(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """What reduces over features that ranks share sees only a part of them."""
        name = getattr(func, "__name__", "")
        x = args[0] if args else kwargs.get("input")
        if name not in _REDUCTIONS or not isinstance(x, Tensor):
            return
        value = self._get(x)
        if value.sources and not value.apart and _takes_last(name, args, kwargs, x.dim()):
            where = self._stack[-1][0] if self._stack else "the model"
            text = f"{where!r} takes {name} over features each rank has a part of, of {quoted(value.sources)}"
            self.flow.clashes[Clash(text, value.sources | {where})] = None

    def _combine(self, given: list[Tensor]) -> _Value:
        values = [self._get(x) for x in given]
        maker = self._stack[-1][0] if self._stack else ""
        local = [(x, v) for x, v in zip(given, values, strict=True) if v.sources]
        if local:
            largest, of_it = max(local, key=lambda pair: pair[0].dim())
            sources = frozenset[str]().union(*(v.sources for _, v in local))
            for x, v in zip(given, values, strict=True):
                if not v.sources and x.requires_grad:
                    self._meet(
                        x, v, Meeting(tuple(x.shape), tuple(largest.shape), of_it.apart, sources)
                    )
            return _Value(sources, of_it.apart, None, False, maker)
        active = [v for v in values if v.params is None]
        params = frozenset[str]().union(*(v.params for v in values if v.params is not None))
        if not active:
            return _Value(params=params, maker=maker)
        copied = all(v.copied for v in active)
        if not copied:
            self.flow.whole |= params
        return _Value(copied=copied, maker=maker)

    def _meet(self, x: Tensor, value: _Value, meeting: Meeting) -> None:
        if value.params:
            for path in value.params:
                self.flow.met.setdefault(path, []).append(meeting)
        elif value.params is None and not value.copied:
            text = (
                f"what {value.maker or 'the model'!r} computes alike on every rank meets each rank's "
                f"part, of {quoted(meeting.sources)}"
            )
            modules = meeting.sources | ({value.maker} if value.maker else set())
            self.flow.clashes[Clash(text, frozenset(modules))] = None

    # ---- what is known ----

    def _get(self, x: Tensor) -> _Value:
        known = self._values.get(id(x))
        if known is not None:
            return known[1]
        return _Value() if x.requires_grad else _CONSTANT

    def _set(self, x: Tensor, value: _Value) -> None:
        self._values[id(x)] = (x, value)


def _reshaped(func: Any, given: list[Tensor], made: Tensor, value: _Value) -> _Value:
    """``value`` of what a function makes, which may take heads apart or put them together again."""
    if getattr(func, "__name__", "") not in _RESHAPES or not given[0].dim() or not made.dim():
        return value
    before, after = given[0].shape[-1], made.shape[-1]
    if after > before:
        return replace(value, apart=False)
    apart = after < before or made.dim() > given[0].dim()
    return replace(value, apart=value.apart or apart)


_RESHAPES = ("view", "reshape", "unflatten", "flatten", "_unsafe_view")


def quoted(names: frozenset[str]) -> str:
    """Names as messages have them."""
    return ", ".join(map(repr, sorted(names)))


def _is_transparent(style: Style) -> bool:
    """Whether the module's own code runs on what it is given."""
    return isinstance(style, (Replicated, PrepareInput, LocalParams))


def _wants(style: Style) -> str:
    """What a style's module must be given: ``"whole"``, ``"local"`` or anything."""
    if isinstance(style, (Colwise, Experts, RopeOutput)):
        return "whole"
    if isinstance(style, Rowwise):
        return "local" if style.input == "shard" else "whole"
    return ""


# Position and default of the argument that says over which dim; None: over all. ``...``: always the last.
_REDUCTIONS: dict[str, Any] = {
    **dict.fromkeys(("mean", "sum", "std", "var", "std_mean", "var_mean", "prod"), (1, None)),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin", "median"), (1, None)),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod"), (1, None)),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    **dict.fromkeys(("norm", "vector_norm", "quantile"), (2, None)),
    "topk": (2, -1),
    "normalize": (2, 1),
    **dict.fromkeys(("layer_norm", "rms_norm", "scaled_dot_product_attention"), ...),
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), ...),
}


def _takes_last(name: str, args: Any, kwargs: dict[str, Any], ndim: int) -> bool:
    """Whether a function of ``_REDUCTIONS`` reduces over the last of ``ndim`` dims."""
    if _REDUCTIONS[name] is ...:
        return True
    position, default = _REDUCTIONS[name]
    given = args[position] if len(args) > position else default
    dim = kwargs.get("dim", kwargs.get("axis", given))
    if isinstance(dim, Tensor):
        return False  # max(x, y) is elementwise
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return any(d is None or d in (-1, ndim - 1) for d in dims)
