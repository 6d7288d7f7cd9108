"""What an optimizer's saved state is loaded into: what it has, or new tensors laid out as the parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, make_spec
from parallel3d._torch.simulated import simulation_off
from parallel3d.checkpoint.optimizer_state import alike
from parallel3d.checkpoint.pieces import shares_memory_within
from parallel3d.checkpoint.torch_formats.archive import Entry
from parallel3d.checkpoint.torch_formats.folder import Box, Source, whole
from parallel3d.checkpoint.torch_formats.model_target import boxes_of, fill, shown
from parallel3d.errors import CheckpointError
from parallel3d.fsdp.inspect import check_optimizer, named_params, state_keys
from parallel3d.optim.local import LocalMatrixSteps
from parallel3d.optim.step_in_backward import StepInBackward

# SavedOptimizer: an optimizer's state and options as a checkpoint has them, and what they are for
# ours.

_MOST_ENTRIES = 4_000_000

Key = str | int
"""A parameter: its name, or its place in the order of the optimizer's groups."""


@dataclass(frozen=True)
class SavedGroup:
    """One param group: options without ``params``, and these."""

    options: dict[str, Any]
    params: tuple[Key, ...]


@dataclass(frozen=True)
class SavedOptimizer:
    """As a checkpoint has it.

    Attributes:
        state: by parameter, then by what it is (``exp_avg``).
    """

    state: dict[Key, dict[str, Any]]
    groups: tuple[SavedGroup, ...]

    def for_names(self, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(state, options) for each of the parameters ``names``, which are in our optimizer's order.

        Raises:
            CheckpointError: the parameters are others.
        """
        saved = [key for group in self.groups for key in group.params]
        numbers = [key for key in saved if isinstance(key, int)]
        keys: list[Key] = list(names)
        if numbers:
            _check_numbers(numbers, len(saved))  # before they are keys of a dict
            keys = self._numbered(saved, names)
        options: dict[Key, dict[str, Any]] = {}
        for group in self.groups:
            for key in group.params:
                if key in options:
                    raise CheckpointError(
                        f"parameter {key!r} is in two groups of the saved optimizer"
                    )
                options[key] = group.options
        missing = [str(key) for key in keys if key not in options]
        known = set(keys)
        unknown = [str(key) for key in [*options, *self.state] if key not in known]
        for found, what in (
            (missing, "has no {}, which the optimizer has"),
            (unknown, "has {}, which the optimizer hasn't"),
        ):
            if found:
                raise CheckpointError(f"the saved optimizer {what.format(shown(set(found)))}")
        return [self.state.get(key, {}) for key in keys], [options[key] for key in keys]

    def _numbered(self, saved: list[Key], names: list[str]) -> list[Key]:
        """The saved numbers of ``names``, by their order."""
        if len(saved) != len(names):
            raise CheckpointError(
                f"the saved optimizer has {len(saved)} parameters, by number, and the optimizer has "
                f"{len(names)}; make it of the same ones"
            )
        return saved


def _check_numbers(numbers: list[int], count: int) -> None:
    """That they are what ``optimizer.state_dict()`` has: all of 0 to ``count`` - 1, once."""
    ordered = sorted(numbers)
    for number, found in enumerate(ordered):
        if number and found == ordered[number - 1]:
            raise CheckpointError(f"parameter {found} is in two groups of the saved optimizer")
        if found != number:
            break
    else:
        if len(numbers) == count:
            return
    raise CheckpointError(
        f"the saved optimizer's groups have {count} parameters, of other numbers than 0 to {count - 1}"
    )


def saved_in_dict(value: Any) -> SavedOptimizer:
    """From ``{"state": ..., "param_groups": ...}``, keyed by name or by number.

    Raises:
        CheckpointError: it is something else.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"the saved optimizer is a {type(value).__name__}; it must be a dict")
    if "param_groups" not in value:
        raise CheckpointError(f"the saved optimizer has no param_groups; it has {shown(value)}")
    states, groups = value.get("state", {}), value["param_groups"]
    well = isinstance(states, Mapping) and isinstance(groups, (list, tuple))
    if not well or not all(isinstance(each, Mapping) for each in (*states.values(), *groups)):
        raise CheckpointError("the saved optimizer's state and param_groups are no dicts")
    # A file may refer to one dict or list very often.
    lists = [p for g in groups if isinstance(p := g.get("params"), (list, tuple))]
    if sum(map(len, (*states.values(), *groups, *lists))) > _MOST_ENTRIES:
        raise CheckpointError(f"the saved optimizer has more than {_MOST_ENTRIES} entries")
    found = []
    for group in groups:
        params = group.get("params")
        if not isinstance(params, (list, tuple)) or not all(type(p) in (str, int) for p in params):
            raise CheckpointError("a group of the saved optimizer has no params")
        found.append(SavedGroup({k: v for k, v in group.items() if k != "params"}, tuple(params)))
    by_key = {_key(key): _by_text(key, state) for key, state in states.items()}
    return SavedOptimizer(by_key, tuple(found))


def saved_in_names(stored: Mapping[str, Any], names: Iterable[str]) -> SavedOptimizer:
    """From flat names of any of torch's forms: ``state.NAME.exp_avg`` and ``param_groups.0.lr`` or,
    flattened, ``param_groups.NAME.lr``.

    Args:
        stored: values after the optimizer's prefix.
        names: the parameters' there may be.
    """
    known = set(names)
    state: dict[Key, dict[str, Any]] = {}
    by_number: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for flat, value in stored.items():
        head, _, rest = flat.partition(".")
        if head == "state" and rest:
            key, what = _split(rest, known)
            state.setdefault(key, {})[what] = value
        elif flat == "param_groups":  # before torch 2.4, in one
            return saved_in_dict({"state": state_of(stored, known), "param_groups": value})
        elif head == "param_groups" and rest:
            name, what = _split(rest, known)
            if isinstance(name, int):
                by_number.setdefault(name, {})[what] = value
            else:
                by_name.setdefault(name, {})[what] = value
    if by_number and by_name:
        raise CheckpointError("the saved optimizer's param_groups are by number and by name")
    if by_name:
        groups = [SavedGroup(options, (name,)) for name, options in by_name.items()]
        return SavedOptimizer(state, tuple(groups))
    ordered = [by_number[number] for number in sorted(by_number)]
    return saved_in_dict({"state": state, "param_groups": ordered})


def state_of(stored: Mapping[str, Any], known: set[str]) -> dict[Key, dict[str, Any]]:
    """The state alone."""
    state: dict[Key, dict[str, Any]] = {}
    for flat, value in stored.items():
        if flat.startswith("state."):
            key, what = _split(flat.removeprefix("state."), known)
            state.setdefault(key, {})[what] = value
    return state


def _split(rest: str, known: set[str]) -> tuple[Key, str]:
    """``NAME.what`` -> (NAME, what), the longest known name; else (a number, what)."""
    end = len(rest)
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in known:
            return rest[:end], rest[end + 1 :]
    head, _, what = rest.partition(".")
    if head.isdecimal() and len(head) < 10 and "." not in what and what:
        return int(head), what
    name, _, what = rest.rpartition(".")
    return name, what


def _by_text(key: Key, state: Mapping[Any, Any]) -> dict[str, Any]:
    for each in state:
        if not isinstance(each, str):
            raise CheckpointError(
                f"the saved optimizer's state of {key!r:.80} has the key {each!r:.80}, which is no string"
            )
    return dict(state)


def _key(key: Any) -> Key:
    if type(key) not in (str, int):
        raise CheckpointError(f"the saved optimizer has state of {type(key).__name__} {key!r:.80}")
    return key


# What an optimizer's state must be like: by a step that its class takes on a tensor of a few
# elements.

_SIZES = (2, 3, 4, 5, 6)  # of the trial's tensor: each its own, to be known again in its state
_NOT_TRIED = ("LBFGS", "SparseAdam")  # state of all parameters in one; gradients of another layout
PLAIN = ("foreach", "fused", "capturable", "differentiable")  # how it is computed, not what


@dataclass(frozen=True)
class Kind:
    """One entry of a parameter's state.

    Attributes:
        dims: of a tensor: for each of its dims the parameter's that it is as long as, or None for 1.
            None: a number, or a tensor of no dims.
        category: of its dtype.
    """

    dims: tuple[int | None, ...] | None
    category: str

    def shape(self, param: Tensor) -> tuple[int, ...]:
        """For ``param``."""
        return tuple(1 if d is None else param.shape[d] for d in self.dims or ())


class ExpectedState:
    """What the classes of ``torch.optim`` keep for a parameter once they have stepped on it.

    Of other classes nothing is known: what they do is found by running them alone, and only the user does.
    """

    def __init__(self, optimizer: Any) -> None:
        self._class = stepping_class(optimizer)
        self.name = self._class.__name__ if self._class else type(optimizer).__name__
        self._known: dict[tuple[int, int, bool], dict[str, Kind] | None] = {}

    def of(self, number: int, options: Mapping[str, Any], param: Tensor) -> dict[str, Kind] | None:
        """By key, for a parameter of the group ``number``; None where it isn't known.

        Args:
            options: the group's.

        Raises:
            CheckpointError: the class doesn't take these.
        """
        if self._class is None:
            return None
        key = number, param.dim(), param.is_complex()
        if key not in self._known:
            self._known[key] = self._tried(*key, options)
        return self._known[key]

    def _tried(
        self, number: int, ndim: int, is_complex: bool, options: Mapping[str, Any]
    ) -> dict[str, Kind] | None:
        assert self._class is not None
        given = {k: v for k, v in options.items() if k not in ("params", "param_names", *PLAIN)}
        given = {k: v.item() if _is_number(v) else v for k, v in given.items()}
        named = inspect.signature(self._class.__init__).parameters
        if ndim > len(_SIZES):
            return None
        dtype = torch.complex64 if is_complex else torch.float32
        with simulation_off(), torch.inference_mode(False), torch.no_grad():
            param = nn.Parameter(torch.ones(_SIZES[:ndim], dtype=dtype, device="cpu"))
            param.grad = torch.ones_like(param)
            plain: dict[str, Any] = {k: False for k in PLAIN if k in named}
            try:
                trial = self._class(
                    [{**given, "params": [param]}],
                    **{k: v for k, v in given.items() if k in named},
                    **plain,
                )
            except (ValueError, TypeError, RuntimeError) as error:
                raise CheckpointError(
                    f"the saved optimizer's group {number} has options that {self._class.__name__} doesn't "
                    f"take: {error}"
                ) from error
            try:
                _step_of(self._class)(trial)
            except Exception:  # on sizes and a device that are not the user's
                return None
            return {str(key): _kind(value) for key, value in trial.state[param].items()}


def category(dtype: torch.dtype) -> str:
    """What kind of numbers it has; what can't become one another by a cast."""
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def wrapped(optimizer: Any) -> Any:
    """What has the state: itself, or what ``step_in_backward``'s stands for."""
    while isinstance(optimizer, StepInBackward):
        optimizer = optimizer.optimizer
    return optimizer


def stepping_class(optimizer: Any) -> type[Optimizer] | None:
    """The class of ``torch.optim`` whose ``step`` it takes; None if it is another's."""
    found = type(wrapped(optimizer))
    base = getattr(found, "local_base", found)
    for each in base.__mro__:
        if each.__module__.startswith("torch.optim") and each is not Optimizer:
            same = _step_of(each) is _step_of(base) and issubclass(each, Optimizer)
            return each if same and each.__name__ not in _NOT_TRIED else None
    return None


def _step_of(of: Any) -> Callable[..., Any]:
    """Without the hooks that torch puts around it."""
    step = of.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _kind(value: Any) -> Kind:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return Kind(None, "number")
    dims = tuple(_SIZES.index(n) if n in _SIZES else None for n in value.shape)
    return Kind(dims, category(value.dtype))


_MOST_STEPS = 1 << 62


@dataclass(frozen=True)
class Slot:
    """One entry of a parameter's state to be: ``source`` goes into ``tensor()``.

    Attributes:
        existing: what is loaded into; None: a new one.
        dtype: of the new one.
        replicated: whether a new one of another shape than the parameter's is a DTensor, whole on each rank.
    """

    name: str
    key: str
    param: nn.Parameter
    source: Source
    existing: Tensor | None
    dtype: torch.dtype
    replicated: bool

    @property
    def lies_as_param(self) -> bool:
        return self.key != "step" and tuple(self.param.shape) == tuple(self.source.shape)

    def boxes(self) -> list[Box]:
        """What this rank will hold of it."""
        if self.existing is not None:
            return boxes_of(self.existing)
        return boxes_of(self.param) if self.lies_as_param else [whole(self.source)]

    def tensor(self) -> Tensor:
        """The existing one, or one without values."""
        if self.existing is not None:
            return self.existing
        param, shape, dtype = self.param, torch.Size(self.source.shape), self.dtype
        if isinstance(param, DTensor) and self.lies_as_param:
            local = torch.empty_like(get_local_tensor(param.detach()), dtype=dtype)
            spec = make_spec(param.device_mesh, param.placements, shape, dtype)
            return make_dtensor(local, spec)
        device = "cpu" if self.key == "step" else param.device
        local = torch.empty(shape, dtype=dtype, device=device)
        if isinstance(param, DTensor) and self.replicated and shape:
            mesh = param.device_mesh
            return make_dtensor(local, make_spec(mesh, [Replicate()] * mesh.ndim, shape, dtype))
        return local


class OptimizerTarget:
    """An optimizer of ``model``'s parameters, and what it is to have.

    Attributes:
        slots: tensors of its state, by the parameter's place in the order of the groups. values: what else
            is in it.
        tensors: those of ``slots``, once allocated.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, saved: SavedOptimizer, *, cast: bool
    ) -> None:
        check_optimizer(optimizer)
        self.optimizer, self.cast = optimizer, cast
        self._before: tuple[Any, ...] | None = None
        named = named_params(model, optimizer)
        self.raw = optimizer.state_dict()
        self.keys = state_keys(self.raw)
        self.params = [param for _, param in named]
        states, options = saved.for_names([name for name, _ in named])
        self.groups = self._groups(options)
        self.slots: list[tuple[int, Slot]] = []
        self.values: list[tuple[int, str, Any]] = []
        self.tensors: list[Tensor] = []
        expected = ExpectedState(optimizer)
        group_of = [n for n, g in enumerate(self.groups) for _ in g["params"]]
        for index, ((name, param), state) in enumerate(zip(named, states, strict=True)):
            group = group_of[index]
            kinds = expected.of(group, self.groups[group], param)
            missing = [key for key in kinds or () if state and key not in state]
            if missing:
                raise CheckpointError(
                    f"the saved optimizer has no {missing[0]} of {name}; it has {shown(state)}, and "
                    f"{expected.name} keeps {shown(kinds or ())}"
                )
            existing = self.raw["state"].get(self.keys[index], {})
            for key, value in state.items():
                kind = (kinds or {}).get(key)
                _check_fits(f"{key} of {name}", key, value, param, existing.get(key), kind)
                if isinstance(value, Source):
                    slot = self._slot(name, key, param, value, existing)
                    if (
                        kind is None and slot.existing is None
                    ):  # nothing else says how large it may be
                        value.take(f"{key} of {name}")
                    self.slots.append((index, slot))
                else:
                    self.values.append((index, key, value))

    def _slot(
        self, name: str, key: str, param: nn.Parameter, source: Source, existing: dict[str, Any]
    ) -> Slot:
        dtype = source.dtype
        if self.cast and key != "step" and param.is_floating_point() and dtype.is_floating_point:
            dtype = param.dtype
        now = existing.get(key)
        replicated = not isinstance(self.optimizer, LocalMatrixSteps)
        if isinstance(now, Tensor):
            # Numbers are made anew: one may be shared by several parameters.
            fits = now.ndim > 0 and now.shape == torch.Size(source.shape) and now.dtype == dtype
            replicated = isinstance(now, DTensor)
            if not fits or shares_memory_within(now):
                now = None
        else:
            now = None
        return Slot(name, key, param, source, now, dtype, replicated)

    def _groups(self, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Our groups with the options that their parameters were saved with."""
        found = []
        start = 0
        for number, group in enumerate(self.raw["param_groups"]):
            count = len(group["params"])
            mine, start = options[start : start + count], start + count
            chosen = mine[0] if mine else group
            if any(other is not chosen and not same(other, chosen) for other in mine):
                raise CheckpointError(
                    "parameters of one group of the optimizer were saved with different options (lr, say); "
                    "give the optimizer groups as it had them"
                )
            own = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            _check_same_kind(own, chosen)
            _check_options(number, own, chosen)
            kept = {k: group[k] for k in ("param_names",) if k in group}
            changed = {k: v for k, v in chosen.items() if k not in ("params", "param_names")}
            found.append({**own, **changed, **kept, "params": group["params"]})
        return found

    def entries(self) -> list[Entry]:
        """The records that this rank reads."""
        return [entry for _, slot in self.slots for entry in slot.source.entries(slot.boxes())]

    def allocate(self) -> None:
        """Makes the tensors that are not there yet."""
        self.tensors = [slot.tensor() for _, slot in self.slots]

    def read_new(self) -> None:
        """Reads what is new, which nobody sees yet.

        Raises:
            CheckpointError: a count of steps can't be one.
        """
        for (_, slot), tensor in zip(self.slots, self.tensors, strict=True):
            if slot.existing is None:
                fill(tensor, slot.source)
                if slot.key == "step" and tensor.numel() == 1:
                    _check_step(f"step of {slot.name}", tensor.item())

    def adopt(self) -> None:
        """Gives the optimizer its new state and options; what is read in place isn't read yet."""
        kept = wrapped(self.optimizer)
        groups = [(group, dict(group)) for group in kept.param_groups]
        self._before = kept, getattr(kept, "state", None), kept.param_groups, groups
        state: dict[Any, dict[str, Any]] = {}
        for (index, slot), tensor in zip(self.slots, self.tensors, strict=True):
            state.setdefault(self.keys[index], {})[slot.key] = tensor
        for index, key, value in self.values:
            state.setdefault(self.keys[index], {})[key] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": self.groups})
        if not self.cast:
            self._undo_casts()
        for index, key, value in self.values:
            if isinstance(value, (str, bytes)):  # torch makes text of their letters' iterator
                self._state(index)[key] = value

    def undo(self) -> None:
        """What was before ``adopt``."""
        if self._before is None:
            return
        kept, state, groups, options = self._before
        kept.param_groups = groups
        if state is not None:
            kept.state = state
        for group, before in options:
            group.clear()
            group.update(before)

    def read(self) -> None:
        """Reads what is there already."""
        for (index, slot), tensor in zip(self.slots, self.tensors, strict=True):
            if slot.existing is not None:
                fill(tensor, slot.source)
                now = self._state(index).get(slot.key)
                if isinstance(now, Tensor) and now is not tensor:  # cast, or copied
                    now.copy_(tensor)

    def _state(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(self.params[index], {})
        return found

    def _undo_casts(self) -> None:
        """``load_state_dict`` casts state to the parameter's dtype; it is to be as it was saved."""
        for (index, slot), tensor in zip(self.slots, self.tensors, strict=True):
            entry = self._state(index)
            now = entry.get(slot.key)
            if slot.key != "step" and isinstance(now, Tensor) and now.dtype != tensor.dtype:
                entry[slot.key] = tensor


def _check_fits(
    what: str, key: str, value: Any, param: Tensor, now: Any, kind: Kind | None
) -> None:
    """Raises unless ``value`` can be the entry ``key`` of the state of ``param``.

    Args:
        now: what is there; None: nothing. kind: what its class keeps; None: not known.
    """
    problem = f"the saved optimizer's {what} is {_described(value)}"
    number = type(value) in (int, float)
    if key == "step" and not isinstance(value, Source):
        _check_step(what, value)
    if isinstance(value, Source):
        shape, numbers = tuple(value.shape), category(value.dtype)
        scalar = not shape and numbers in ("floating", "integer")
        if key == "step" and not scalar:
            raise CheckpointError(f"{problem}; it must be one number")
        if kind is not None:
            want = kind.shape(param)
            if kind.dims is None and not scalar:
                raise CheckpointError(f"{problem}; it must be one number")
            if kind.dims is not None and (shape, numbers) != (want, kind.category):
                raise CheckpointError(
                    f"{problem}; for a parameter of shape {tuple(param.shape)} it must be "
                    f"{kind.category}, of shape {want}"
                )
        if isinstance(now, Tensor) and (now.dim() or shape):
            if tuple(now.shape) != shape or category(now.dtype) != numbers:
                raise CheckpointError(
                    f"{problem}; the optimizer's own is {now.dtype} of shape {tuple(now.shape)}"
                )
        elif now is not None and not isinstance(now, Tensor) and not scalar:
            raise CheckpointError(f"{problem}; the optimizer's own is {_described(now)}")
    elif number and value != value:
        raise CheckpointError(problem)
    elif kind is not None and not (number and kind.dims is None):
        want = kind.shape(param)
        raise CheckpointError(
            f"{problem}; it must be one number"
            if kind.dims is None
            else f"{problem}; it must be a tensor of shape {want}"
        )
    elif isinstance(value, (str, bytes)) and not isinstance(now, type(value)):
        raise CheckpointError(f"{problem}, which torch's load_state_dict doesn't take")
    elif isinstance(now, (str, bytes)) and type(value) is not type(now):
        raise CheckpointError(f"{problem}; the optimizer's own is {_described(now)}")
    elif isinstance(now, Tensor) and not (number and now.numel() == 1):
        raise CheckpointError(
            f"{problem}; the optimizer's own is {now.dtype} of shape {tuple(now.shape)}"
        )


def _check_step(what: str, value: Any) -> None:
    if type(value) not in (int, float) or not (math.isfinite(value) and 0 <= value < _MOST_STEPS):
        raise CheckpointError(
            f"the saved optimizer's {what} is {_described(value)}; it must be a number of steps"
        )


def _described(value: Any) -> str:
    if isinstance(value, Source):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, (int, float, str)) or value is None:
        return f"{value!r:.80}"
    return f"a {type(value).__name__}"


def _check_options(number: int, ours: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises if an option is of another kind than ours, or is none."""
    for key, value in saved.items():
        now = ours.get(key)
        wrong = value != value if isinstance(value, float) else _is_huge(value)
        switch = key in PLAIN and not (value is None or isinstance(value, bool))
        if wrong or switch or (key in ours and not alike(now, value)):
            raise CheckpointError(
                f"the saved optimizer's group {number} has {key}={value!r:.80}, and the optimizer "
                f"{now!r:.80}, which is of another kind"
            )


def _is_huge(value: Any) -> bool:
    return type(value) is int and abs(value) >= 1 << 63


def _check_same_kind(ours: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises if each has options that the other hasn't: they are of two classes of optimizers."""
    only_ours = sorted(ours.keys() - saved.keys() - {"initial_lr"})
    only_saved = sorted(
        map(str, saved.keys() - ours.keys() - {"params", "param_names", "initial_lr"})
    )
    if only_ours and only_saved:
        raise CheckpointError(
            f"the saved optimizer has the options {', '.join(only_saved)}, the optimizer has "
            f"{', '.join(only_ours)} instead; it is of another class"
        )


def same(a: Any, b: Any) -> bool:
    """Whether two options are equal; tensors count by their values."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b or a != a)
