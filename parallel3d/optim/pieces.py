"""Pieces: the plain tensors that a local optimizer steps on, and what they show as DTensors.

A piece is a bucket's whole flat buffer where one parameter group has all its parameters, and their gradients
are the reduced buffer (or there are none); otherwise one parameter's local tensor. The state an optimizer
makes for a piece is what ``optimizer.state`` shows under its parameters: DTensors, placed as they are, of the
same memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import is_
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel3d._compat import (
    DTensorSpec,
    get_local_tensor,
    inner_tensors,
    make_dtensor,
    make_spec,
    spec_of,
)
from parallel3d._compat_foreach import local_tensors
from parallel3d._packed import packing_of
from parallel3d.errors import StateError
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.grads import flat_gradient
from parallel3d.fsdp.buckets.held_sum import waits_for_reduction
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.storage import with_own_storage
from parallel3d.fsdp.whole.transforms import chunk
from parallel3d.optim.flat import by_bucket, padding_in

__all__ = [
    "Apart",
    "BucketPiece",
    "ParamPiece",
    "Piece",
    "State",
    "local_of",
    "part_of",
    "pieces_of",
    "placed_as",
    "reduced",
]

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


class BucketPiece(Piece):
    """All parameters of a bucket: its flat buffer, with what pads it.

    An elementwise optimizer may do to the padding what it does: of the weights it is cleared again, as
    gathers and casts run over whole buffers; of the state nobody sees it.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.flat = bucket.flat
        self.params = [param.sharded for param in bucket.params]
        self.padding = padding_in(bucket, self.flat)
        self.tensor = nn.Parameter(self.flat, requires_grad=self.params[0].requires_grad)

    @property
    def is_current(self) -> bool:
        bucket = self.bucket
        return bucket.flat is self.flat and all(
            map(is_, local_tensors(self.params), bucket.local_views)
        )

    @property
    def is_one(self) -> bool:
        """Whether an optimizer can step on it as it is, and with the gradients that are there."""
        try:
            self.gradient()
        except Apart:
            return False
        return self.is_current and any(param.dim() for param in self.params)

    def gradient(self) -> torch.Tensor | None:
        grads = [param.grad for param in self.params]
        flat = flat_gradient(grads)
        if flat is None:
            if any(grad is not None for grad in grads):
                raise Apart  # some are missing, not the engine's, or changed by the user
            return None
        for padding in padding_in(self.bucket, flat) if self.padding else ():
            padding.zero_()
        return flat if flat.dtype is self.flat.dtype else flat.to(self.flat.dtype)

    def shown(self, value: torch.Tensor) -> list[torch.Tensor]:
        parts = self.bucket.local_parts(value.detach())
        return [
            placed_as(param, with_own_storage(part))
            for param, part in zip(self.params, parts, strict=True)
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
                flat = torch.zeros(self.bucket.numel, dtype=example.dtype, device=self.flat.device)
                parts = self.bucket.local_parts(flat)
                for param, part, value in zip(self.params, parts, values, strict=True):
                    part.copy_(part_of(param, value))
                joined[key] = flat
            elif all(_same(example, value) for value in values):
                joined[key] = example
            else:
                return None
        return joined


def _same(a: Any, b: Any) -> bool:
    """Whether two single numbers are the same; tensors that differ by rank are the same nowhere."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        numbers = {x.item() for tensor in (a, b) for x in inner_tensors(tensor)}
        return len(numbers) == 1
    return type(a) is type(b) and bool(a == b)


def pieces_of(params: list[nn.Parameter]) -> list[Piece]:
    """Pieces of the parameters of one group, in the order of the first parameter of each."""
    pieces: list[Piece] = []
    for each in by_bucket(params):
        if not isinstance(each, Bucket):
            pieces.append(ParamPiece(cast(nn.Parameter, each)))
            continue
        piece = BucketPiece(each)
        if piece.is_one:
            pieces.append(piece)
        else:
            pieces.extend(map(ParamPiece, piece.params))
    return pieces
