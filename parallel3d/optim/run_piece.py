"""RunPiece: neighbours in a bucket, stepped on as one tensor; and which pieces a group's parameters make.

Where one parameter group has all parameters of a bucket, what is stepped on is its whole flat buffer.
Gradients that are missing, or the user's, and state that differs, divide it into runs of neighbours.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import nn

from parallel3d import _dry_run
from parallel3d._compat import inner_tensors
from parallel3d._compat_foreach import local_tensors
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.grads import flat_gradient, flat_gradients_of
from parallel3d.fsdp.storage import with_own_storage
from parallel3d.optim.flat import by_bucket, padding_of
from parallel3d.optim.pieces import Apart, ParamPiece, Piece, State, part_of, placed_as

__all__ = ["RunPiece", "pieces_of"]

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
        if _dry_run.active():  # counters of steps, which nobody has counted
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
