"""What an optimizer's saved state is loaded into: what it has, or new tensors laid out as the parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from parallel3d._compat import get_local_tensor, make_dtensor, make_spec
from parallel3d.checkpoint.optimizer_groups import alike
from parallel3d.checkpoint.pieces import shares_memory_within
from parallel3d.checkpoint.torch_formats.archive import Entry
from parallel3d.checkpoint.torch_formats.expected_state import (
    PLAIN,
    ExpectedState,
    Kind,
    category,
    wrapped,
)
from parallel3d.checkpoint.torch_formats.model_target import boxes_of, fill
from parallel3d.checkpoint.torch_formats.names import shown
from parallel3d.checkpoint.torch_formats.saved_optimizer import SavedOptimizer
from parallel3d.checkpoint.torch_formats.sources import Box, Source, whole
from parallel3d.errors import CheckpointError
from parallel3d.fsdp.whole.optim_state_dict import check_optimizer, named_params, state_keys
from parallel3d.optim.local import LocalMatrixSteps

__all__ = ["OptimizerTarget", "Slot"]

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
