"""An optimizer's state as torch's files have it, in any of torch's forms, and loading it into an
optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from parallel3d._torch.dtensor import make_dtensor, make_spec
from parallel3d._torch.simulated import simulation_off
from parallel3d._util.arguments import counted
from parallel3d.checkpoint.pieces import boxes_of, shares_memory_within
from parallel3d.checkpoint.state import NO_OPTIONS, alike, empty_state, stateful
from parallel3d.checkpoint.torch_formats.names import shown
from parallel3d.checkpoint.torch_formats.sources import Source, Verify
from parallel3d.errors import CheckpointError
from parallel3d.fsdp.inspect import check_optimizer, named_params, state_keys
from parallel3d.optim.known import step_of
from parallel3d.optim.local import LocalMatrixSteps

_MAX_ENTRIES = 4_000_000

Key = str | int
"""A parameter: its name, or its number in the order of the optimizer's groups."""


@dataclass(frozen=True)
class SavedGroup:
    """A saved param group: its options without ``params``, and its parameters' names or numbers."""

    options: dict[str, Any]
    params: tuple[Key, ...]


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer as it was saved; ``state``: parameter -> key such as ``exp_avg`` -> value."""

    state: dict[Key, dict[str, Any]]
    groups: tuple[SavedGroup, ...]

    def for_names(self, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the saved state and the saved options of each of ``names``, the optimizer's parameters in
        the order of its groups; raises CheckpointError if others were saved."""
        saved = [key for group in self.groups for key in group.params]
        keys: list[Key] = list(names)
        if any(isinstance(key, int) for key in saved):
            _check_numbers(
                saved
            )  # before they are keys of a dict: numbers can be chosen to have one hash
            if len(saved) != len(names):
                raise CheckpointError(
                    f"the saved optimizer has {counted(len(saved), 'parameter')}, by number, and "
                    f"the optimizer has {len(names)}; make it of the same ones"
                )
            keys = saved
        options: dict[Key, dict[str, Any]] = {}
        for group in self.groups:
            for key in group.params:
                if key in options:
                    raise CheckpointError(
                        f"parameter {key!r} is in two groups of the saved optimizer"
                    )
                options[key] = group.options
        known = set(keys)
        missing = {str(key) for key in keys if key not in options}
        unknown = {str(key) for key in [*options, *self.state] if key not in known}
        for keys_of, text in (
            (missing, "has no {}, which the optimizer has"),
            (unknown, "has {}, which the optimizer doesn't have"),
        ):
            if keys_of:
                raise CheckpointError(f"the saved optimizer {text.format(shown(keys_of))}")
        return [self.state.get(key, {}) for key in keys], [options[key] for key in keys]


def _check_numbers(saved: list[Key]) -> None:
    """Raises CheckpointError unless ``saved`` has each integer from 0 on once, as ``state_dict()`` has."""
    numbers = sorted(key for key in saved if isinstance(key, int))
    twice = next((a for a, b in pairwise(numbers) if a == b), None)
    if twice is not None:
        raise CheckpointError(f"parameter {twice} is in two groups of the saved optimizer")
    if numbers != list(range(len(saved))):
        raise CheckpointError(
            f"the saved optimizer's groups have {counted(len(saved), 'parameter')}, of other numbers than 0 "
            f"to {len(saved) - 1}"
        )


def saved_in_dict(value: Any) -> SavedOptimizer:
    """Parses ``{"state": ..., "param_groups": ...}``, keyed by name or number; else a CheckpointError."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"the saved optimizer is a {type(value).__name__}; it must be a dict")
    if "param_groups" not in value:
        raise CheckpointError(f"the saved optimizer has no param_groups; it has {shown(value)}")
    states, groups = value.get("state", {}), value["param_groups"]
    valid = isinstance(states, Mapping) and isinstance(groups, (list, tuple))
    if not valid or not all(isinstance(item, Mapping) for item in (*states.values(), *groups)):
        raise CheckpointError("the saved optimizer's state and param_groups are not dicts")
    # A file may refer to one dict or list very often.
    lists = [p for g in groups if isinstance(p := g.get("params"), (list, tuple))]
    if sum(map(len, (*states.values(), *groups, *lists))) > _MAX_ENTRIES:
        raise CheckpointError(f"the saved optimizer has more than {_MAX_ENTRIES} entries")
    result = []
    for group in groups:
        params = group.get("params")
        if not isinstance(params, (list, tuple)) or not all(type(p) in (str, int) for p in params):
            raise CheckpointError("a group of the saved optimizer has no params")
        result.append(SavedGroup({k: v for k, v in group.items() if k != "params"}, tuple(params)))
    for key, state in states.items():
        if type(key) not in (str, int):
            raise CheckpointError(
                f"the saved optimizer has state of {type(key).__name__} {key!r:.80}"
            )
        for entry in state:
            if not isinstance(entry, str):
                raise CheckpointError(
                    f"the saved optimizer's state of {key!r:.80} has the key {entry!r:.80}, which is "
                    "not a string"
                )
    return SavedOptimizer({key: dict(state) for key, state in states.items()}, tuple(result))


def saved_in_names(stored: Mapping[str, Any], names: Iterable[str]) -> SavedOptimizer:
    """Parses flat names without the optimizer's prefix: ``state.NAME.exp_avg`` and ``param_groups.0.lr`` or,
    with ``flatten_optimizer_state_dict``, ``param_groups.NAME.lr``. ``names``: those that NAME may be."""
    known = set(names)
    state: dict[Key, dict[str, Any]] = {}
    by_number: dict[Key, dict[str, Any]] = {}
    by_name: dict[Key, dict[str, Any]] = {}
    for flat, value in stored.items():
        head, _, rest = flat.partition(".")
        if head == "state" and rest:
            key, what = _split(rest, known)
            state.setdefault(key, {})[what] = value
        elif head == "param_groups" and rest:
            key, what = _split(rest, known)
            groups = by_number if isinstance(key, int) else by_name
            groups.setdefault(key, {})[what] = value
    if "param_groups" in stored:  # one value, before torch 2.4
        return saved_in_dict({"state": state, "param_groups": stored["param_groups"]})
    if by_number and by_name:
        raise CheckpointError("the saved optimizer's param_groups are by number and by name")
    if by_name:
        return SavedOptimizer(state, tuple(SavedGroup(v, (key,)) for key, v in by_name.items()))
    ordered = [by_number[number] for number in sorted(by_number)]
    return saved_in_dict({"state": state, "param_groups": ordered})


def _split(rest: str, known: set[str]) -> tuple[Key, str]:
    """Splits ``NAME.key`` into (the longest known NAME, key), or ``3.key`` into (3, key)."""
    end = len(rest)
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in known:
            return rest[:end], rest[end + 1 :]
    head, _, what = rest.partition(".")
    if head.isdecimal() and len(head) < 10 and "." not in what and what:
        return int(head), what
    name, _, what = rest.rpartition(".")
    return name, what


_SIZES = (2, 3, 4, 5, 6)  # of the trial's parameter; distinct, to be recognised in its state
_NOT_TRIED = ("LBFGS", "SparseAdam")  # one state for all parameters; gradients of another layout
_EXECUTION = ("foreach", "fused", "capturable", "differentiable")  # they don't change results
_MAX_STEP = 1 << 62


@dataclass(frozen=True)
class Kind:
    """What an optimizer class keeps as one entry of a parameter's state: dims and kind of numbers."""

    dims: tuple[int | None, ...] | None
    """For each dim of a tensor, the parameter's dim of the same size, or None for size 1. None: a number, or
    a tensor without dims."""
    category: str  # of its dtype


def _try_step(
    cls: type[Optimizer], number: int, ndim: int, dtype: torch.dtype, options: Mapping[str, Any]
) -> dict[str, Kind] | None:
    """Returns what ``cls``, of ``torch.optim``, keeps as a parameter's state, by key: a step on a small
    parameter shows it. None if that fails; ``number``: of the group, for errors."""
    given = {
        k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v
        for k, v in options.items()
        if k not in (*NO_OPTIONS, *_EXECUTION)
    }
    named = inspect.signature(cls.__init__).parameters
    arguments: dict[str, Any] = {k: v for k, v in given.items() if k in named}
    arguments |= {k: False for k in _EXECUTION if k in named}
    with simulation_off(), torch.inference_mode(False), torch.no_grad():
        param = nn.Parameter(torch.ones(_SIZES[:ndim], dtype=dtype, device="cpu"))
        param.grad = torch.ones_like(param)
        try:
            trial = cls([{**given, "params": [param]}], **arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"the saved optimizer's group {number} has options that {cls.__name__} doesn't take: {error}"
            ) from error
        try:
            step_of(cls)(trial)
        except Exception:  # for sizes and a device that are not the user's
            return None
        return {str(key): _kind(value) for key, value in trial.state[param].items()}


def _kind(value: Any) -> Kind:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return Kind(None, "number")
    dims = tuple(_SIZES.index(n) if n in _SIZES else None for n in value.shape)
    return Kind(dims, _category(value.dtype))


def _category(dtype: torch.dtype) -> str:
    """Returns "floating", "integer", "complex" or "bool": what a cast may not change."""
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def _torch_class(optimizer: Any) -> type[Optimizer] | None:
    """Returns the ``torch.optim`` class whose ``step`` the optimizer runs; None if it runs another."""
    cls = type(stateful(optimizer))
    base = getattr(cls, "local_base", cls)
    for parent in base.__mro__:
        if parent.__module__.startswith("torch.optim") and parent is not Optimizer:
            same = issubclass(parent, Optimizer) and step_of(parent) is step_of(base)
            return parent if same and parent.__name__ not in _NOT_TRIED else None
    return None


@dataclass
class Slot:
    """A tensor of a parameter's optimizer state, its entry ``key``, into which ``source`` is read."""

    index: int  # number of the parameter in the order of the groups
    name: str
    key: str
    source: Source
    tensor: Tensor  # the optimizer's own if that fits, else a new one
    is_new: bool


class OptimizerTarget:
    """The optimizer to load. ``slots``: the tensors that its state gets; ``values``: its other entries, each
    (number of the parameter, key, value)."""

    def __init__(self, model: nn.Module, optimizer: Any, saved: SavedOptimizer, cast: bool) -> None:
        check_optimizer(optimizer)
        self.optimizer, self.cast = optimizer, cast
        self._before: tuple[Any, ...] | None = None
        named = named_params(model, optimizer)
        self.raw = optimizer.state_dict()
        self.keys = state_keys(self.raw)
        self.params = [param for _, param in named]
        states, options = saved.for_names([name for name, _ in named])
        self.groups = self._groups(options)
        self.slots: list[Slot] = []
        self.values: list[tuple[int, str, Any]] = []
        known = _torch_class(optimizer)  # of others nothing is expected: no unknown code is run

        @cache
        def expected(number: int, ndim: int, dtype: torch.dtype) -> dict[str, Kind] | None:
            if known is None or ndim > len(_SIZES):
                return None
            return _try_step(known, number, ndim, dtype, self.groups[number])

        group_of = [n for n, g in enumerate(self.groups) for _ in g["params"]]
        for index, ((name, param), state) in enumerate(zip(named, states, strict=True)):
            trial_dtype = torch.complex64 if param.is_complex() else torch.float32
            kinds = expected(group_of[index], param.dim(), trial_dtype)
            missing = [key for key in kinds or () if state and key not in state]
            if missing:
                raise CheckpointError(
                    f"the saved optimizer has no {missing[0]} of {name}; it has {shown(state)}, and "
                    f"{known and known.__name__} keeps {shown(kinds or ())}"
                )
            existing = self.raw["state"].get(self.keys[index], {})
            for key, value in state.items():
                kind = (kinds or {}).get(key)
                problem = _problem(key, value, param, existing.get(key), kind)
                if problem is not None:
                    raise CheckpointError(
                        f"the saved optimizer's {key} of {name} is {_described(value)}; {problem}"
                    )
                if not isinstance(value, Source):
                    self.values.append((index, key, value))
                    continue
                current, dtype = existing.get(key), self._dtype(key, param, value)
                tensor = _own_tensor(current, value, dtype)
                is_new = tensor is None
                if tensor is None:
                    if kind is None:  # its size is not checked otherwise
                        value.take(f"{key} of {name}")
                    tensor = self._new(key, param, value, current, dtype)
                self.slots.append(Slot(index, name, key, value, tensor, is_new))

    def _dtype(self, key: str, param: nn.Parameter, source: Source) -> torch.dtype:
        floating = param.is_floating_point() and source.dtype.is_floating_point
        return param.dtype if self.cast and key != "step" and floating else source.dtype

    def _new(
        self, key: str, param: nn.Parameter, source: Source, current: Any, dtype: torch.dtype
    ) -> Tensor:
        """Returns new memory for an entry: placed as ``param`` if of its shape, else whole on each rank."""
        sharded = isinstance(param, DTensor)
        if sharded and key != "step" and tuple(param.shape) == source.shape:
            return empty_state(param, dtype)
        shape, device = torch.Size(source.shape), "cpu" if key == "step" else param.device
        local = torch.empty(shape, dtype=dtype, device=device)
        as_dtensor = not isinstance(self.optimizer, LocalMatrixSteps)
        if isinstance(current, Tensor):
            as_dtensor = isinstance(current, DTensor)
        if not (sharded and as_dtensor and shape):
            return local
        mesh = param.device_mesh  # type: ignore[attr-defined]
        return make_dtensor(local, make_spec(mesh, [Replicate()] * mesh.ndim, shape, dtype))

    def _groups(self, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the optimizer's groups with the options that were saved for their parameters."""
        result = []
        start = 0
        for number, group in enumerate(self.raw["param_groups"]):
            count = len(group["params"])
            own_options, start = options[start : start + count], start + count
            saved = own_options[0] if own_options else group
            if any(other is not saved and not _same(other, saved) for other in own_options):
                raise CheckpointError(
                    "parameters of one group of the optimizer were saved with different options (lr, say); "
                    "give the optimizer groups as it had them"
                )
            saved = {k: v for k, v in saved.items() if k not in NO_OPTIONS}
            _check_options(number, group, saved)
            result.append({**group, **saved})
        return result

    def checks(self) -> list[Verify]:
        return [each for slot in self.slots for each in slot.source.checks(boxes_of(slot.tensor))]

    def read_new(self) -> None:
        """Reads into new tensors, which the optimizer doesn't have yet; checks step counts."""
        for slot in self.slots:
            if slot.is_new:
                new = slot.tensor
                slot.source.fill(new)
                if slot.key == "step" and new.numel() == 1 and not _is_step(new.item()):
                    raise CheckpointError(
                        f"the saved optimizer's step of {slot.name} is {new.item()}; it must be a number of "
                        "steps"
                    )

    def adopt(self) -> None:
        """Gives the optimizer its new tensors and options, by ``load_state_dict``; ``undo`` reverts it."""
        kept = stateful(self.optimizer)
        groups = [(group, dict(group)) for group in kept.param_groups]
        self._before = kept, getattr(kept, "state", None), kept.param_groups, groups
        state: dict[Any, dict[str, Any]] = {}
        for slot in self.slots:
            state.setdefault(self.keys[slot.index], {})[slot.key] = slot.tensor
        for index, key, value in self.values:
            state.setdefault(self.keys[index], {})[key] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": self.groups})
        if not self.cast:  # load_state_dict casts state to the parameter's dtype
            for slot, entry, current in self._loaded():
                if slot.key != "step" and current.dtype != slot.tensor.dtype:
                    entry[slot.key] = slot.tensor
        for index, key, value in self.values:
            if isinstance(value, (str, bytes)):  # load_state_dict makes an iterator's text of them
                self._state(index)[key] = value

    def undo(self) -> None:
        if self._before is None:
            return
        kept, state, groups, options = self._before
        kept.param_groups = groups
        if state is not None:
            kept.state = state
        for group, before in options:
            group.clear()
            group.update(before)

    def copy(self) -> None:
        """Reads into the tensors that the optimizer had before."""
        for slot in self.slots:
            if not slot.is_new:
                slot.source.fill(slot.tensor)
        for slot, _, current in self._loaded():
            if not slot.is_new and current is not slot.tensor:  # a cast or copied one
                current.copy_(slot.tensor)

    def _loaded(self) -> Iterator[tuple[Slot, dict[str, Any], Tensor]]:
        """Yields, after ``load_state_dict``: slot, the parameter's state, the tensor now in it."""
        for slot in self.slots:
            entry = self._state(slot.index)
            if isinstance(current := entry.get(slot.key), Tensor):
                yield slot, entry, current

    def _state(self, index: int) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(self.params[index], {})
        return state


def _own_tensor(current: Any, source: Source, dtype: torch.dtype) -> Tensor | None:
    """Returns ``current``, the optimizer's own tensor, if ``source`` can be read into it; else None."""
    if not isinstance(current, Tensor) or (tuple(current.shape), current.dtype) != (
        source.shape,
        dtype,
    ):
        return None
    # Numbers are allocated anew, because several parameters may share one.
    return current if current.ndim and not shares_memory_within(current) else None


def _problem(key: str, value: Any, param: Tensor, current: Any, kind: Kind | None) -> str | None:
    """Returns why ``value`` cannot be the entry ``key`` of the optimizer's state of ``param``, a text for an
    error, or None. ``current``: the entry now; ``kind``: what the optimizer's class keeps, if known."""
    if key == "step" and not isinstance(value, Source) and not _is_step(value):
        return "it must be a number of steps"
    own = f"the optimizer's own is {_described(current)}"
    shape, numbers = None, None
    if isinstance(value, Source):
        shape, numbers = value.shape, _category(value.dtype)
        is_number = not shape and numbers in ("floating", "integer")
    else:
        is_number = type(value) in (int, float)
        if isinstance(value, float) and value != value:
            return "it must not be NaN"
    if (key == "step" or (kind is not None and kind.dims is None)) and not is_number:
        return "it must be one number"
    if kind is not None and kind.dims is not None:
        want = tuple(1 if dim is None else param.shape[dim] for dim in kind.dims)
        if (shape, numbers) != (want, kind.category):
            return f"for shape {tuple(param.shape)} it must be {kind.category}, of shape {want}"
    if isinstance(value, Source):
        if isinstance(current, Tensor):
            same = (tuple(current.shape), _category(current.dtype)) == (shape, numbers)
            return own if (current.dim() or shape) and not same else None
        return own if current is not None and not is_number else None
    if isinstance(value, (str, bytes)) and not isinstance(current, type(value)):
        return "torch's load_state_dict doesn't take it"
    if isinstance(current, (str, bytes)) and type(value) is not type(current):
        return own
    if isinstance(current, Tensor) and not (is_number and current.numel() == 1):
        return own
    return None


def _is_step(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < _MAX_STEP


def _described(value: Any) -> str:
    if isinstance(value, (Source, Tensor)):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, (int, float, str)) or value is None:
        return f"{value!r:.80}"
    return f"a {type(value).__name__}"


def _check_options(number: int, own: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises CheckpointError if a group's ``saved`` options are another optimizer class's, or invalid."""
    only_own = sorted(own.keys() - saved.keys() - {*NO_OPTIONS, "initial_lr"})
    only_saved = sorted(map(str, saved.keys() - own.keys() - {"initial_lr"}))
    if only_own and only_saved:  # a newer torch may have added some on one side
        raise CheckpointError(
            f"the saved optimizer has the options {', '.join(only_saved)}, the optimizer has "
            f"{', '.join(only_own)} instead; it is of another class"
        )
    for key, value in saved.items():
        current = own.get(key)
        huge = type(value) is int and abs(value) >= 1 << 63
        invalid = value != value if isinstance(value, float) else huge
        switch = key in _EXECUTION and not (value is None or isinstance(value, bool))
        if invalid or switch or (key in own and not alike(current, value)):
            raise CheckpointError(
                f"the saved optimizer's group {number} has {key}={value!r:.80}, and the optimizer "
                f"{current!r:.80}, which is of another type"
            )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b or a != a)
