"""Pieces: the plain tensors that a local optimizer steps on, and what they show as DTensors.

A piece is one parameter's local tensor, or part of a bucket's flat buffer; see ``run_piece``. The state an
optimizer makes for a piece is what ``optimizer.state`` shows under its parameters: DTensors, placed as they
are, of the same memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel3d._compat import (
    DTensorSpec,
    get_local_tensor,
    make_dtensor,
    make_spec,
    spec_of,
)
from parallel3d._packed import packing_of
from parallel3d.errors import StateError
from parallel3d.fsdp.buckets.held_sum import waits_for_reduction
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.whole.transforms import chunk

__all__ = [
    "Apart",
    "ParamPiece",
    "Piece",
    "State",
    "local_of",
    "part_of",
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
