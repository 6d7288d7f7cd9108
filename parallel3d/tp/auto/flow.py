"""Flow: the tensors of a model's forward that differ between tp ranks, found by running it once on meta.

A plan says what happens in modules. Between them the model's own code runs, on each rank with its part of
the features or heads. This finds errors in that, without values and without ranks: the model's copy runs on
the meta device under a ``TorchFunctionMode`` that records for each tensor whether it is *local* (different
on each rank: the output of a column-parallel module and all that is computed from it) or whole.

- A parameter without a rule that is used with a local tensor gets only a part of its gradient.
- So does a whole activation that is used with one without a column-parallel module between.
- A parameter whose gradient is summed over tp and that is used with whole activations gets it tp times.
- A row-parallel module needs a local input, a column-parallel one a whole input.
- Code that the plan wasn't written for may use whole tensors only, and only a split module may use its
  parameters.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._torch.simulated import simulation_off
from parallel3d._trace.copies import left_by_forward, meta_copy
from parallel3d._trace.record import Functions
from parallel3d._util.forwards import packages_of
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


def plan_packages(model: nn.Module) -> frozenset[str]:
    """Returns the packages that define the plans of ``model`` and of the models inside it."""
    packages = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        for owner, name in ((module, "_tp_plan"), (config, "base_model_tp_plan")):
            for cls in type(owner).__mro__:
                plan = vars(cls).get(name)
                if isinstance(plan, Mapping) and plan:
                    packages.add(_package(cls.__module__))
    return frozenset(packages)


class OwnCode:
    """Recognises code that a plan, which one of ``packages`` defines, was not written for.

    A plan is right only with its family's code between the split modules. A subclass with a forward of its
    own, a patched forward, a hook, or a registered attention function may mix heads or features of different
    ranks, which no rule shows.
    """

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages | {"torch", "parallel3d", *sys.stdlib_module_names} - {"__main__"}
        self._classes: dict[type, bool] = {}

    def runs_in(self, module: nn.Module) -> bool:
        """Whether ``module`` runs, or may run, code of other packages."""
        if self._is(vars(module).get("forward")):  # patched
            return True
        cls = type(module)
        if cls not in self._classes:
            self._classes[cls] = any(map(self._is, _methods(cls)))
        return self._classes[cls] or self._attends_by(module)

    def hooks_of(self, module: nn.Module) -> bool:
        """Whether ``module`` has a forward hook of other packages, which may change its input or output."""
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        return any(map(self._is, hooks))

    def _attends_by(self, module: nn.Module) -> bool:
        """Whether the attention function in the module's config is of other packages."""
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if "config._attn_implementation" not in (reads_of(module) or ()):
            return False
        transformers = sys.modules.get("transformers.modeling_utils")
        known = getattr(transformers, "ALL_ATTENTION_FUNCTIONS", {})
        return name in known and self._is(known[name])

    def _is(self, function: Any) -> bool:
        return not self._packages.issuperset(packages_of(function))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _methods(cls: type) -> Iterator[Callable[..., Any]]:
    for base in cls.__mro__:
        if base not in (nn.Module, object):
            for name, member in vars(base).items():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                is_function = callable(function) and not isinstance(function, type)
                if is_function and name not in NOT_COMPUTING:
                    yield function


@dataclass(frozen=True)
class LocalUse:
    """One use of a whole parameter together with a local tensor.

    Attributes:
        shape: of the parameter, or of what was computed from parameters alone.
        local_shape: of the local tensor, as in the plain model.
        apart, sources: of the local tensor, as in ``_Value``.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    apart: bool
    sources: frozenset[str]


@dataclass(frozen=True)
class Conflict:
    """An error that no rule for a parameter corrects: a message, and the modules that it is about."""

    text: str
    modules: frozenset[str]


@dataclass
class Flow:
    """The record of one forward: the uses of parameters, by path, with local tensors; the parameters that are
    used with whole activations; and errors with all rules for parameters."""

    local_uses: dict[str, list[LocalUse]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    conflicts: dict[Conflict, None] = field(default_factory=dict)

    def joined(self, other: "Flow") -> "Flow":
        """Returns the records of both."""
        paths = {**self.local_uses, **other.local_uses}
        uses = {k: self.local_uses.get(k, []) + other.local_uses.get(k, []) for k in paths}
        return Flow(uses, self.whole | other.whole, {**self.conflicts, **other.conflicts})


@dataclass(frozen=True)
class _Value:
    """What is known of a tensor, which the module ``maker`` computed.

    Attributes:
        sources: modules (or split parameters) by which it is local; empty: it is whole.
        apart: whether the last dim, which those split, became two: heads and the features of each.
        params: the parameters from which alone it is computed; ``None``: it is an activation.
        copied: whether its gradient is summed where it was made, so that it may be used with local tensors.
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
    """Runs a meta copy of ``model`` by ``call``, whose errors it raises, and records where local tensors of
    its ``styles`` (path of a module or a parameter -> style) are used."""
    with simulation_off():
        twin = meta_copy(model).eval()
        watch = _Watch(twin, styles, code)
        with torch.enable_grad(), Functions(watch.function):
            result = call(twin)
        watch.check_result(result)
        watch.check_attributes(twin)
    return watch.flow


class _Watch:
    """Follows local tensors through the calls of torch's functions and of modules."""

    def __init__(self, model: nn.Module, styles: dict[str, Style], code: OwnCode) -> None:
        self.flow = Flow()
        self._code = code
        self._values: dict[int, tuple[Tensor, _Value]] = {}  # the tensor too, so that its id stays
        # The modules whose code runs: path, and whether it is code that the plan wasn't written for.
        self._stack: list[tuple[str, bool]] = []
        self._split: dict[int, str] = {}  # id of a parameter -> the module whose style splits it
        self._inside = 0  # depth of modules whose style determines their output
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

    @property
    def _where(self) -> str:
        return self._stack[-1][0] if self._stack else ""

    def _conflict(self, text: str, sources: frozenset[str], *modules: str) -> None:
        """Records a conflict about local tensors of ``sources`` (none: about whole ones), in ``modules``."""
        text += f", of {quoted(sources)}" if sources else ""
        self.flow.conflicts[Conflict(text, sources.union(modules))] = None

    # ---- modules ----

    def _hook(self, path: str, module: nn.Module, style: Style | None) -> None:
        transparent = style is None or _is_transparent(style)
        own, hooked = self._code.runs_in(module), self._code.hooks_of(module)
        if own:
            module.training = True  # to run its code for training too
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
            seen = (self._get(x).sources for x in tensors_in((args, kwargs, output)))
            if hooked and (sources := frozenset[str]().union(*seen)):
                self._conflict(f"{path!r} has a hook, which sees each rank's part", sources, path)

        # The module's own hooks run outside of it, between these.
        module.register_forward_pre_hook(hooks_begin, prepend=True)
        module.register_forward_pre_hook(hooks_end)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(hooks_begin, prepend=True)
        module.register_forward_hook(after, with_kwargs=True, prepend=True)
        module.register_forward_hook(hooks_end)
        if isinstance(style, Experts):  # its code branches on values
            module.forward = lambda *args, **kwargs: next(tensors_in((args, kwargs))) * 1

    def _check_input(self, path: str, style: Any, args: Any, kwargs: Any) -> None:
        values = [self._get(x) for x in tensors_in((args, kwargs)) if x.is_floating_point()]
        if isinstance(style, Rowwise) and style.input == "shard":
            if values and not values[0].sources:
                text = f"{path!r} as {style} wants each rank's part, but its input is whole"
                self._conflict(text, frozenset(), path)
        elif isinstance(style, (Colwise, Rowwise, Experts, RopeOutput)):
            for sources in (value.sources for value in values if value.sources):
                text = f"{path!r} as {style} wants a whole input, but gets parts"
                self._conflict(text, sources, path)

    def _set_output(self, path: str, style: Any, output: Any) -> None:
        local = isinstance(style, Colwise) and style.output == "shard"
        sources = frozenset([path]) if local else frozenset[str]()
        for x in tensors_in(output):
            self._set(x, _Value(sources, False, None, isinstance(style, RopeOutput), path))

    def check_result(self, result: Any) -> None:
        """Records a conflict if the model's output is local."""
        for x in tensors_in(result):
            if sources := self._get(x).sources:
                self._conflict("the model's output is each rank's part", sources)

    def check_attributes(self, model: nn.Module) -> None:
        """Records a conflict for a local tensor that a forward has left in an attribute."""
        for path, module, name in left_by_forward(model):
            seen = (self._get(x).sources for x in tensors_in(vars(module)[name]))
            if sources := frozenset[str]().union(*seen):
                text = f"{path!r} leaves each rank's part in self.{name}"
                self._conflict(text, sources, path)

    # ---- functions ----

    def function(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A function of torch, whose results are local where what it reads is."""
        if getattr(func, "__name__", "") == "__bool__":
            return True  # it has no value here; models ask whether a mask is of the usual kind
        result = func(*args, **kwargs)
        if self._inside:
            return result
        changed = args[:1] if getattr(func, "__name__", "") == "__setitem__" else ()
        made = [*tensors_in(result), *tensors_in(changed)]
        self._check_reduction(func, args, kwargs)
        if made:
            given = list(tensors_in((args, kwargs)))
            value = self._combine(given)
            self._check_code(func, given, value)
            for x in made:
                self._set(x, _reshaped(func, given, x, value) if value.sources else value)
        return result

    def _check_code(self, func: Any, given: list[Tensor], value: _Value) -> None:
        """Records a conflict if this code may not use parts, or a parameter that is split."""
        where, own = self._stack[-1] if self._stack else ("", False)
        if own and value.sources:
            text = f"{where!r} runs code that the plan was not written for, on each rank's part"
            self._conflict(text, value.sources, where)
        for x in given:
            owner = self._split.get(id(x))
            # A module with a tied parameter gets a style in the end.
            if owner is not None and where not in self._holders.get(id(x), []):
                name = getattr(func, "__name__", func)
                text = f"{where or 'the model'!r} reads a parameter of {owner!r}, which is split, by {name}"
                self._conflict(text, frozenset(), owner, where)

    def _check_reduction(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Records a conflict for a reduction over features of which each rank has a part."""
        name = getattr(func, "__name__", "")
        x = args[0] if args else kwargs.get("input")
        if name not in _REDUCTIONS or not isinstance(x, Tensor):
            return
        value = self._get(x)
        if value.sources and not value.apart and _takes_last(name, args, kwargs, x.dim()):
            where = self._stack[-1][0] if self._stack else "the model"
            text = f"{where!r} takes {name} over features each rank has a part of"
            self._conflict(text, value.sources, where)

    def _combine(self, given: list[Tensor]) -> _Value:
        """Returns what is known of the result of a function of these tensors."""
        values = [self._get(x) for x in given]
        local = [(x, v) for x, v in zip(given, values, strict=True) if v.sources]
        if local:
            largest, of_it = max(local, key=lambda pair: pair[0].dim())
            sources = frozenset[str]().union(*(v.sources for _, v in local))
            for x, v in zip(given, values, strict=True):
                if v.sources or not x.requires_grad:
                    continue
                use = LocalUse(tuple(x.shape), tuple(largest.shape), of_it.apart, sources)
                for path in v.params or ():
                    self.flow.local_uses.setdefault(path, []).append(use)
                if v.params is None and not v.copied:
                    maker = repr(v.maker or "the model")
                    text = f"what {maker} computes alike on every rank meets each rank's part"
                    self._conflict(text, sources, *filter(None, [v.maker]))
            return _Value(sources, of_it.apart, None, False, self._where)
        active = [v for v in values if v.params is None]
        params = frozenset[str]().union(*(v.params for v in values if v.params is not None))
        if not active:
            return _Value(params=params, maker=self._where)
        copied = all(v.copied for v in active)
        if not copied:
            self.flow.whole |= params
        return _Value(copied=copied, maker=self._where)

    def _get(self, x: Tensor) -> _Value:
        known = self._values.get(id(x))
        if known is not None:
            return known[1]
        return _Value() if x.requires_grad else _CONSTANT

    def _set(self, x: Tensor, value: _Value) -> None:
        self._values[id(x)] = (x, value)


def _reshaped(func: Any, given: list[Tensor], made: Tensor, value: _Value) -> _Value:
    """Returns ``value`` for the result of a function that may split the last dim into heads, or join it."""
    if getattr(func, "__name__", "") not in _RESHAPES or not given[0].dim() or not made.dim():
        return value
    before, after = given[0].shape[-1], made.shape[-1]
    if after > before:
        return replace(value, apart=False)
    apart = after < before or made.dim() > given[0].dim()
    return replace(value, apart=value.apart or apart)


_RESHAPES = ("view", "reshape", "unflatten", "flatten", "_unsafe_view")


def quoted(names: frozenset[str]) -> str:
    """Returns the names for a message."""
    return ", ".join(map(repr, sorted(names)))


def _is_transparent(style: Style) -> bool:
    """Whether the module's own code runs on its inputs."""
    return isinstance(style, (Replicated, PrepareInput, LocalParams))


# Position and default of the argument for the reduced dim; None: all dims. ``...``: always the last.
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
