"""Pieces: the plain tensors that a local optimizer steps on in place of DTensor parameters.

A piece is the local tensor of one parameter, or the part of a bucket's flat buffer that holds a run of
neighbouring parameters. The state that an optimizer makes for a piece is shown in ``optimizer.state`` under
the parameters of the piece, as DTensors that have the parameters' placements and share the memory of the
state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel3d._layout.packed import packing_of
from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, make_spec
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
)

State = dict[str, Any]

_grad_of = attrgetter("grad")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, without a copy; any other tensor is returned detached."""
    return get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def placed_as(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns ``local`` as a DTensor placed as ``param``; ``local`` itself if ``param`` is no DTensor."""
    if not isinstance(param, DTensor):
        return local
    spec = make_spec(param.device_mesh, param.placements, param.shape, local.dtype)
    return make_dtensor(local, spec)


def part_of(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of ``value``, a whole tensor or DTensor of the global shape of ``param``, as
    ``param`` is sharded."""
    if not isinstance(param, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value.detach()
    same_placements = isinstance(value, DTensor) and value.placements == param.placements
    if packing_of(param) is not None and not same_placements:
        return get_local_tensor(chunk(value, param.device_mesh, param.placements))
    if isinstance(value, DTensor):
        if not same_placements or value.device_mesh != param.device_mesh:
            value = value.redistribute(param.device_mesh, param.placements)
        return get_local_tensor(value)
    owner = owner_of(param)
    if owner is not None:
        return owner.local_part(value).clone()
    placed = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    return get_local_tensor(placed)


def check_reduced(grad: torch.Tensor, action: str) -> None:
    """Raises StateError if ``grad`` is not reduced yet, which advises to do ``action`` (``"Clip"``) later."""
    for axis, placement in enumerate(grad.placements if isinstance(grad, DTensor) else ()):
        if placement.is_partial():
            raise StateError(
                f"a gradient of shape {tuple(grad.shape)} is {placement} on axis {axis} of "
                f"{cast(DTensor, grad).device_mesh}: it is not reduced yet. {action} after the backward "
                "of the last micro-batch"
            )


def reduced_grad(param: torch.Tensor, action: str) -> torch.Tensor:
    """Returns the local gradient of ``param`` in the parameter's dtype; StateError if it is not reduced yet,
    see ``check_reduced``."""
    assert param.grad is not None
    check_reduced(param.grad, action)
    return local_of(param.grad).to(param.dtype)


class SeparateGradients(Exception):
    """Raised if the gradients of a piece's parameters are not parts of one tensor: it must be split."""


class ParamPiece:
    """A piece that is the local tensor of one parameter.

    Attributes:
        params: the parameters of the piece, as the user's groups have them.
        tensor: the plain tensor that the optimizer steps on.
        padding: the parts of ``tensor`` that belong to no parameter and must stay zero.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self.params, self.tensor = [param], param
        self.padding: list[torch.Tensor] = []
        if isinstance(param, DTensor):
            local = get_local_tensor(param).detach()
            self.tensor = nn.Parameter(local, requires_grad=param.requires_grad)

    def gradient(self) -> torch.Tensor | None:
        """Returns the gradient for ``tensor``, in its dtype, or None; StateError if it is not reduced."""
        return None if self.params[0].grad is None else reduced_grad(self.params[0], "Step")

    def split_state(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Returns ``value``, a state of the shape of ``tensor``, as one DTensor for each parameter."""
        return [placed_as(self.params[0], value)]

    def join_states(self, states: list[State]) -> State | None:
        """Returns one state for ``tensor`` from its parameters' states; None if they can't be joined."""
        return {key: self._part(value) for key, value in states[0].items()}

    def _part(self, value: Any) -> Any:
        if is_elementwise(self, value):
            return part_of(self.params[0], value)
        scalar = isinstance(value, torch.Tensor) and not self.tensor.dim()
        if scalar and value.device == self.tensor.device:
            # May be a moment of a scalar parameter: it gets the local tensor's class (simulated ranks).
            return torch.empty_like(self.tensor.detach(), dtype=value.dtype).copy_(local_of(value))
        return value


def padding_of(bucket: Bucket, first: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """Returns (start, length) of the padding of the parameters ``first`` to ``end`` - 1 in a bucket's flat
    buffer; start counts from parameter 0."""
    padding, segment_end = [], sum(bucket.layout.segment_sizes[:first])
    for geometry in (param.geometry for param in bucket.params[first:end]):
        segment_end += geometry.padded_numel
        rest = 0 if geometry.even else geometry.padded_numel - math.prod(geometry.local_shape)
        if not isinstance(rest, int) or rest:  # a SymInt: some simulated ranks may have padding
            padding.append((segment_end - rest, rest))
    return padding


class RunPiece:
    """A piece that is the part of a bucket's flat buffer which holds some neighbouring parameters, with
    padding.

    Either their gradients are the same part of the reduced buffer, or none of them has a gradient. An
    elementwise optimizer also steps on the padding. That of the weights is zeroed after each step, since
    gathers and casts run over whole buffers; that of the state is never shown.

    Attributes:
        params, tensor, padding: as in ``ParamPiece``.
    """

    def __init__(self, bucket: Bucket, first: int = 0, end: int | None = None) -> None:
        self.bucket, self._first = bucket, first
        self._end = len(bucket.params) if end is None else end
        self._members = bucket.params[first : self._end]
        self._sizes = bucket.layout.segment_sizes[first : self._end]
        self._start, self._numel = sum(bucket.layout.segment_sizes[:first]), sum(self._sizes)
        self._padding = padding_of(bucket, first, self._end)
        self._flat = bucket.flat
        self.params = [param.sharded for param in self._members]
        self.padding = [bucket.flat.narrow(0, *place) for place in self._padding]
        part = bucket.flat.narrow(0, self._start, self._numel)
        self.tensor = nn.Parameter(part, requires_grad=self.params[0].requires_grad)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns each parameter's view of ``flat``, a tensor of the shape of ``tensor``."""
        segments = flat.split_with_sizes(self._sizes)
        return [
            p.geometry.local_view(segment)
            for p, segment in zip(self._members, segments, strict=True)
        ]

    @property
    def is_current(self) -> bool:
        """Whether ``tensor`` still is the memory of the parameters' local tensors."""
        views = self.bucket.local_views[self._first : self._end]
        return self.bucket.flat is self._flat and all(map(is_, local_tensors(self.params), views))

    def gradient(self) -> torch.Tensor | None:
        """Returns the gradient for ``tensor``, or None; SeparateGradients if it is no single tensor."""
        grads = list(map(_grad_of, self.params))
        flat = flat_gradient(grads, self.bucket.layout.segment_sizes, self._first)
        if flat is None:
            if any(grad is not None for grad in grads):
                raise SeparateGradients  # some are missing, or the user has set them
            return None
        for place in self._padding:
            flat.narrow(0, *place).zero_()
        if self._numel != self.bucket.layout.numel:
            flat = flat.narrow(0, self._start, self._numel)
        return flat if flat.dtype is self.tensor.dtype else flat.to(self.tensor.dtype)

    def split(self, states: list[State] | None = None) -> list[Piece]:
        """Returns smaller pieces: in each the gradients are parts of one tensor, and ``states``, by
        parameter, can be joined."""
        grads = [param.sharded.grad for param in self.bucket.params]
        kinds = flat_gradients_of(grads, self.bucket.layout.segment_sizes)[self._first : self._end]
        splits = [
            i
            for i in range(1, len(kinds))
            if kinds[i] != kinds[i - 1] or (states and not _fit(states[i - 1], states[i]))
        ]
        pieces: list[Piece] = []
        for start, end in pairwise([0, *splits, len(kinds)]):
            params = self.params[start:end]
            # Where no reason to split was found, each parameter becomes a piece.
            if 1 < len(params) < len(self.params) and any(param.dim() for param in params):
                pieces.append(RunPiece(self.bucket, self._first + start, self._first + end))
            else:
                pieces.extend(map(ParamPiece, params))
        return pieces

    def state_from(self, source: RunPiece, state: State) -> State:
        """Returns this piece's part of ``state``, the state of the larger piece ``source``: views of
        elementwise tensors; copies of others, such as step counts, as each piece counts its own steps."""
        own: State = {}
        for key, value in state.items():
            if is_elementwise(source, value):
                value = value.narrow(0, self._start - source._start, self._numel)
            elif isinstance(value, torch.Tensor):
                value = value.clone()
            own[key] = value
        return own

    def split_state(self, value: torch.Tensor) -> list[torch.Tensor]:
        """As ``ParamPiece.split_state``."""
        views = map(with_own_storage, self._views(value.detach()))
        return [placed_as(p, v) if p.dim() else v for p, v in zip(self.params, views, strict=True)]

    def join_states(self, states: list[State]) -> State | None:
        """As ``ParamPiece.join_states``."""
        if len({tuple(state) for state in states}) > 1:
            return None
        largest = max(range(len(states)), key=lambda index: self.params[index].dim())
        joined = dict(states[largest])
        for key, example in joined.items():
            values = [state[key] for state in states]
            if isinstance(example, torch.Tensor) and example.dim():
                flat = torch.zeros(self._numel, dtype=example.dtype, device=self._flat.device)
                for param, view, value in zip(self.params, self._views(flat), values, strict=True):
                    view.copy_(part_of(param, value))
                joined[key] = flat
            elif not all(_same_number(example, value) for value in values):
                return None
        return joined


Piece = ParamPiece | RunPiece


def is_elementwise(piece: Piece, value: Any) -> bool:
    """Whether ``value``, an entry of the state of a piece, has one element for each element of its tensor."""
    return isinstance(value, torch.Tensor) and value.dim() == piece.tensor.dim() > 0


def _fit(a: State, b: State) -> bool:
    """Whether two parameters' states can be joined: they have the same keys and equal single numbers."""
    return tuple(a) == tuple(b) and all(
        any(isinstance(value, torch.Tensor) and value.dim() for value in (a[key], b[key]))
        or _same_number(a[key], b[key])
        for key in a
    )


def _same_number(a: Any, b: Any) -> bool:
    """Whether two single numbers are equal; for tensors, also on all simulated ranks."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if dry_run.active():  # step counters have no values there
            return True
        return len({inner.item() for tensor in (a, b) for inner in inner_tensors(tensor)}) == 1
    return type(a) is type(b) and bool(a == b)


def by_bucket(params: Sequence[torch.Tensor]) -> list[Bucket | torch.Tensor]:
    """Returns the buckets all of whose parameters are in ``params``, and the other parameters one by one, in
    the order of ``params``. Parameters with all-gather extensions are always single."""
    units = {owner.unit() for owner in map(owner_of, params) if owner is not None}
    by_param = {
        id(param.sharded): bucket
        for unit in units
        for bucket in (() if unit is None else unit.group.buckets)
        if not isinstance(bucket, ExtensionBucket)
        for param in bucket.params
    }
    buckets = [by_param.get(id(param)) for param in params]
    present = Counter(buckets)
    result: list[Bucket | torch.Tensor] = []
    taken: set[Bucket] = set()
    for param, bucket in zip(params, buckets, strict=True):
        if bucket is None or present[bucket] != len(bucket.params):
            result.append(param)
        elif bucket not in taken:
            taken.add(bucket)
            result.append(bucket)
    return result


def pieces_of(params: list[nn.Parameter]) -> list[Piece]:
    """Returns the pieces for one group's ``params``: one for each bucket that is in the group as a whole, one
    for each other parameter."""
    pieces: list[Piece] = []
    for item in by_bucket(params):
        if not isinstance(item, Bucket):
            pieces.append(ParamPiece(cast(nn.Parameter, item)))
            continue
        run = RunPiece(item)
        can_step = run.is_current and any(param.dim() for param in run.params)
        pieces += [run] if can_step else map(ParamPiece, run.params)
    return pieces
