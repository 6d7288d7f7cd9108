"""Pieces: the plain tensors that a local optimizer steps on, and what they show as DTensors.

A piece is one parameter's local tensor, or part of a bucket's flat buffer; see ``run_piece``. The state an
optimizer makes for a piece is what ``optimizer.state`` shows under its parameters: DTensors, placed as they
are, of the same memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel3d._layout.packed import packing_of
from parallel3d._torch.dtensor import (
    DTensorSpec,
    get_local_tensor,
    make_dtensor,
    make_spec,
    spec_of,
)
from parallel3d._torch.kernels import local_tensors
from parallel3d._torch.simulated import inner_tensors
from parallel3d._util import dry_run
from parallel3d._util.storage import with_own_storage
from parallel3d.errors import StateError
from parallel3d.fsdp import chunk
from parallel3d.fsdp.inspect import (
    Bucket,
    ExtensionBucket,
    flat_gradient,
    flat_gradients_of,
    owner_of,
    waits_for_reduction,
)

State = dict[str, Any]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of ``tensor``: the very tensor, no copy."""
    return get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def placed_as(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``local``, which is to this rank's part of ``param`` what a state is to a parameter, as a DTensor."""
    if not isinstance(param, DTensor) or not param.dim():
        return local
    return make_dtensor(
        local, make_spec(param.device_mesh, param.placements, param.shape, local.dtype)
    )


def part_of(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a state of ``param``, given as a DTensor or whole."""
    if not isinstance(param, DTensor):
        return local_of(value)
    alike = isinstance(value, DTensor) and value.placements == param.placements
    if packing_of(param) is not None and not alike:
        return get_local_tensor(chunk(value, param.device_mesh, param.placements))
    if isinstance(value, DTensor):
        if not alike or value.device_mesh != param.device_mesh:
            value = value.redistribute(param.device_mesh, param.placements)
        return get_local_tensor(value)
    owner = owner_of(param)
    if owner is not None:
        return owner.local_part(value).clone()
    return get_local_tensor(
        distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    )


def reduced(grad: torch.Tensor) -> torch.Tensor:
    """``grad``, if it is the gradient, and not a sum that waits for its reduction.

    Raises:
        StateError: it waits.
    """
    if waits_for_reduction(grad):
        raise StateError(
            f"a gradient of shape {tuple(grad.shape)} waits for its reduction. Step after the backward of "
            "the last micro-batch"
        )
    return grad


class Apart(Exception):
    """The parameters of a piece can't be stepped on as one tensor any more."""


class Piece(ABC):
    """Some parameters of one group, stepped on as one plain tensor.

    Attributes:
        params: the parameters, as the user's groups have them.
        tensor: what the optimizer steps on.
        padding: the parts of ``tensor`` that belong to no parameter, and must stay zero.
    """

    params: list[nn.Parameter]
    tensor: nn.Parameter
    padding: list[torch.Tensor]

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """Whether the parameters still live in ``tensor``."""

    @abstractmethod
    def gradient(self) -> torch.Tensor | None:
        """The gradient, in the shape and dtype of ``tensor``.

        Raises:
            Apart: the parameters' gradients are not one tensor.
        """

    @abstractmethod
    def shown(self, value: torch.Tensor) -> list[torch.Tensor]:
        """A state of ``tensor``, parameter by parameter."""

    @abstractmethod
    def join(self, states: list[State]) -> State | None:
        """The states of the parameters as that of ``tensor``; None if they can't be one's."""

    def is_elementwise(self, value: Any) -> bool:
        """Whether ``value``, in a state, has an element for each of ``tensor``: others are single numbers."""
        return isinstance(value, torch.Tensor) and value.dim() == self.tensor.dim() > 0


class ParamPiece(Piece):
    """One parameter's local tensor."""

    def __init__(self, param: nn.Parameter) -> None:
        self.params, self.padding = [param], []
        self._local = get_local_tensor(param) if isinstance(param, DTensor) else param
        self._reduced: DTensorSpec | None = None  # the last gradient's
        self.tensor = param
        if isinstance(param, DTensor):
            self.tensor = nn.Parameter(self._local.detach(), requires_grad=param.requires_grad)

    @property
    def is_current(self) -> bool:
        param = self.params[0]
        return not isinstance(param, DTensor) or get_local_tensor(param) is self._local

    def gradient(self) -> torch.Tensor | None:
        grad = self.params[0].grad
        if grad is None:
            return None
        if isinstance(grad, DTensor):
            spec = spec_of(grad)
            if spec is not self._reduced:
                self._reduced = spec_of(cast(DTensor, reduced(grad)))
        local = local_of(grad)
        dtype = self.tensor.dtype
        return local if local.dtype is dtype else local.to(dtype)

    def shown(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [placed_as(self.params[0], value)]

    def join(self, states: list[State]) -> State:
        return {key: self._part(value) for key, value in states[0].items()}

    def _part(self, value: Any) -> Any:
        if self.is_elementwise(value):
            return part_of(self.params[0], value)
        scalar = isinstance(value, torch.Tensor) and not self.tensor.dim()
        if scalar and value.device == self.tensor.device:
            # Maybe a moment of the scalar parameter: of its own kind, also where ranks are simulated.
            return torch.empty_like(self._local, dtype=value.dtype).copy_(local_of(value))
        return value


# Whole buckets among parameters, and what pads their flat buffers.


def by_bucket(params: Sequence[torch.Tensor]) -> list[Bucket | torch.Tensor]:
    """The buckets whose parameters are all in ``params``, and the parameters that are in none of these.

    In the order of the first parameter of each. Buckets of all-gather extensions don't count: their flat
    buffer isn't the parameters' memory.
    """
    found = _buckets_of(params)
    present = Counter(id(bucket) for bucket in found if bucket is not None)
    result: list[Bucket | torch.Tensor] = []
    taken: set[int] = set()
    for param, bucket in zip(params, found, strict=True):
        if bucket is None or present[id(bucket)] != len(bucket.params):
            result.append(param)
        elif id(bucket) not in taken:
            taken.add(id(bucket))
            result.append(bucket)
    return result


def _buckets_of(params: Iterable[torch.Tensor]) -> list[Bucket | None]:
    """Of each parameter, that it is a sharded Parameter of."""
    by_param: dict[int, Bucket] = {}
    units: set[int] = set()
    result = []
    for param in params:
        owner = owner_of(param)
        unit = owner.unit() if owner is not None and owner.unit is not None else None
        if unit is not None and id(unit) not in units:
            units.add(id(unit))
            for bucket in unit.group.buckets:
                if not isinstance(bucket, ExtensionBucket):
                    by_param.update((id(p.sharded), bucket) for p in bucket.params)
        result.append(by_param.get(id(param)))
    return result


def padding_of(bucket: Bucket, first: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """(start, length) of what belongs to no parameter in a flat buffer (S,), and may hold anything.

    In the slots of the parameters from index ``first`` to before ``end``.
    """
    padding, slot_end = [], sum(bucket.slot_sizes[:first])
    for param in bucket.params[first:end]:
        slot_end += param.slot_numel
        rest = 0 if param.even else param.slot_numel - math.prod(param.local_shape)
        if not isinstance(rest, int) or rest:  # of simulated ranks some may have it
            padding.append((slot_end - rest, rest))
    return padding


def padding_in(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """The parts of ``flat`` that ``padding_of`` tells."""
    return [flat.narrow(0, start, length) for start, length in padding_of(bucket)]


# RunPiece: neighbours in a bucket, stepped on as one tensor; and which pieces a group's parameters
# make.
#
# Where one parameter group has all parameters of a bucket, what is stepped on is its whole flat
# buffer. Gradients that are missing, or the user's, and state that differs, divide it into runs of
# neighbours.

_grad_of = attrgetter("grad")


class RunPiece(Piece):
    """Neighbours in a bucket: their part of its flat buffer, with what pads it.

    Their gradients are the same part of the reduced buffer, or there are none. An elementwise optimizer may
    do to the padding what it does: of the weights it is cleared again, as gathers and casts run over whole
    buffers; of the state nobody sees it.
    """

    def __init__(self, bucket: Bucket, first: int = 0, end: int | None = None) -> None:
        """Of the bucket's parameters from index ``first`` to before ``end``."""
        self.bucket, self._first = bucket, first
        self._end = len(bucket.params) if end is None else end
        self._members = bucket.params[first : self._end]
        self._sizes = bucket.slot_sizes[first : self._end]
        self._start, self._numel = sum(bucket.slot_sizes[:first]), sum(self._sizes)
        self._padding = padding_of(bucket, first, self._end)
        self._flat = bucket.flat
        self.params = [param.sharded for param in self._members]
        self._is_whole = self._numel == bucket.numel
        part = bucket.flat.narrow(0, self._start, self._numel)
        self.padding = [bucket.flat.narrow(0, *place) for place in self._padding]
        self.tensor = nn.Parameter(part, requires_grad=self.params[0].requires_grad)

    def _parts(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of ``mine``, which is shaped as ``tensor``."""
        slots = mine.split_with_sizes(self._sizes)
        return [p.local_view(slot) for p, slot in zip(self._members, slots, strict=True)]

    @property
    def is_current(self) -> bool:
        bucket = self.bucket
        views = bucket.local_views[self._first : self._end]
        return bucket.flat is self._flat and all(map(is_, local_tensors(self.params), views))

    @property
    def is_one(self) -> bool:
        """Whether an optimizer can step on it as it is, and with the gradients that are there."""
        try:
            self.gradient()
        except Apart:
            return False
        return self.is_current and any(param.dim() for param in self.params)

    def gradient(self) -> torch.Tensor | None:
        grads = list(map(_grad_of, self.params))
        flat = flat_gradient(grads, self.bucket.slot_sizes, self._first)
        if flat is None:
            if any(grad is not None for grad in grads):
                raise Apart  # some are missing, not the engine's, or changed by the user
            return None
        for place in self._padding:
            flat.narrow(0, *place).zero_()
        mine = flat if self._is_whole else flat.narrow(0, self._start, self._numel)
        return mine if mine.dtype is self.tensor.dtype else mine.to(self.tensor.dtype)

    def divided(self, states: list[State] | None = None) -> list[Piece]:
        """Pieces in its place, each with gradients, and ``states`` if given, that go together."""
        bucket, first = self.bucket, self._first
        if not self.is_current:
            return list(map(ParamPiece, self.params))
        grads = [param.sharded.grad for param in bucket.params]
        kinds = flat_gradients_of(grads, bucket.slot_sizes)[first : self._end]
        run, runs = 0, [0]
        for i in range(1, len(kinds)):
            alike = states is None or _fit(states[i - 1], states[i])
            run += kinds[i] != kinds[i - 1] or not alike
            runs.append(run)
        pieces: list[Piece] = []
        for _, members in groupby(range(len(runs)), key=runs.__getitem__):
            run_of = list(members)
            params = [self.params[i] for i in run_of]
            # One parameter is its local tensor. Where no reason was found, each is by itself.
            if 1 < len(params) < len(self.params) and any(param.dim() for param in params):
                pieces.append(RunPiece(bucket, first + run_of[0], first + run_of[-1] + 1))
            else:
                pieces.extend(map(ParamPiece, params))
        return pieces

    def state_of(self, whole: RunPiece, state: State) -> State:
        """Its own of ``state``, that of ``whole``, which it was divided from.

        The same memory, but for single numbers: each piece counts its steps by itself.
        """
        own: State = {}
        for key, value in state.items():
            if whole.is_elementwise(value):
                value = value.narrow(0, self._start - whole._start, self._numel)
            elif isinstance(value, torch.Tensor):
                value = value.clone()
            own[key] = value
        return own

    def shown(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [
            placed_as(param, with_own_storage(part))
            for param, part in zip(self.params, self._parts(value.detach()), strict=True)
        ]

    def join(self, states: list[State]) -> State | None:
        if len({tuple(state) for state in states}) > 1:
            return None
        return self._joined(states) if states[0] else {}

    def _joined(self, states: list[State]) -> State | None:
        joined: State = {}
        largest = max(range(len(states)), key=lambda index: self.params[index].dim())
        for key, example in states[largest].items():
            values = [state[key] for state in states]
            if isinstance(example, torch.Tensor) and example.dim():
                mine = torch.zeros(self._numel, dtype=example.dtype, device=self._flat.device)
                for param, part, value in zip(self.params, self._parts(mine), values, strict=True):
                    part.copy_(part_of(param, value))
                joined[key] = mine
            elif all(_same(example, value) for value in values):
                joined[key] = example
            else:
                return None
        return joined


def _fit(a: State, b: State) -> bool:
    """Whether two parameters' states could be one's: what is no single number always could."""
    return tuple(a) == tuple(b) and all(
        (isinstance(a[key], torch.Tensor) and a[key].dim())
        or (isinstance(b[key], torch.Tensor) and b[key].dim())
        or _same(a[key], b[key])
        for key in a
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two single numbers are the same; tensors that differ by rank are the same nowhere."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if dry_run.active():  # counters of steps, which nobody has counted
            return True
        numbers = {x.item() for tensor in (a, b) for x in inner_tensors(tensor)}
        return len(numbers) == 1
    return type(a) is type(b) and bool(a == b)


def pieces_of(params: list[nn.Parameter]) -> list[Piece]:
    """Pieces of the parameters of one group, in the order of the first parameter of each bucket."""
    pieces: list[Piece] = []
    for each in by_bucket(params):
        if not isinstance(each, Bucket):
            pieces.append(ParamPiece(cast(nn.Parameter, each)))
            continue
        piece = RunPiece(each)
        pieces += [piece] if piece.is_one else piece.divided()
    return pieces
