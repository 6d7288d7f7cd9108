"""What a checkpoint holds of a model: names, tensors, ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor
from parallel3d.checkpoint.values import encode
from parallel3d.errors import CheckpointError

__all__ = ["ModelState", "model_state", "parameter_names"]

PREFIX = "model."


@dataclass
class ModelState:
    """The tensors of a model as they lie, by the name they are stored under: Parameters, not copies.

    Attributes:
        tensors: parameters and persistent buffers, each once.
        ties: other names of these -> the first.
        extra: modules' ``get_extra_state()``, encoded; by module.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def model_state(model: nn.Module, only: str | None = None) -> ModelState:
    """The state of ``model``; with ``only="trainable"`` that of parameters with ``requires_grad``.

    Raises:
        CheckpointError: a parameter or buffer is on the meta device, or a module's extra state can't be kept.
    """
    state = ModelState()
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if only == "trainable" and not param.requires_grad:
            continue
        known = first.setdefault(id(param), name)
        if known != name:
            state.ties[PREFIX + name] = PREFIX + known
        else:
            state.tensors[PREFIX + name] = _checked(name, param)
    if only == "trainable":
        return state
    for prefix, module in model.named_modules():
        at = f"{prefix}." if prefix else ""
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                known = first.setdefault(id(buffer), at + key)
                if known != at + key:
                    state.ties[PREFIX + at + key] = PREFIX + known
                else:
                    state.tensors[PREFIX + at + key] = _checked(at + key, buffer)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            where = f"{PREFIX}{at}_extra_state"
            state.extra[prefix] = encode(module.get_extra_state(), where, _keeper(state.tensors))
    return state


def parameter_names(model: nn.Module) -> dict[int, str]:
    """id of a parameter -> its first name."""
    return {id(param): name for name, param in model.named_parameters()}


def _keeper(tensors: dict[str, Tensor]) -> Callable[[Tensor, str], str]:
    def keep(tensor: Tensor, where: str) -> str:
        tensors[where] = tensor
        return where

    return keep


def _checked(name: str, tensor: Tensor) -> Tensor:
    local = get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if local.device.type == "meta":
        raise CheckpointError(
            f"{name} is on the meta device and has no values; call parallel3d.materialize first"
        )
    if tensor.layout != torch.strided:
        raise CheckpointError(f"{name} is {tensor.layout}; checkpoints hold dense tensors only")
    return tensor
