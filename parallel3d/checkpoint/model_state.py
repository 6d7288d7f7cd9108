"""What a checkpoint holds of a model: names, tensors, ties."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor, make_dtensor, spec_of
from parallel3d.checkpoint.values import encode, keeper
from parallel3d.errors import CheckpointError
from parallel3d.fsdp.running.members import units_of
from parallel3d.fsdp.whole.other_form import check_at_rest

__all__ = ["PREFIX", "ModelState", "has_extra", "model_state", "parameter_names", "plain_name"]

PREFIX = "model."
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass
class ModelState:
    """The tensors of a model as they lie, by the name they are stored under: Parameters, not copies.

    Attributes:
        parameters: every parameter of the model, by its first name.
        tensors: parameters and persistent buffers, each once.
        buffers: names of those that are buffers.
        ties: other names of these -> the first.
        extra: modules' ``get_extra_state()``, encoded; by module.
        extra_tensors: that are in these.
        derived: names of wrapper subclasses that hold more than their values, such as a precomputed scale.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)
    derived: list[str] = field(default_factory=list)


def model_state(model: nn.Module, only: str | None = None) -> ModelState:
    """The state of ``model``; with ``only="trainable"`` that of parameters with ``requires_grad``.

    Raises:
        StateError: a unit is in a forward or backward, where parameters are others.
        CheckpointError: a parameter or buffer is on the meta device, or a module's extra state can't be kept.
    """
    for unit in units_of(model, recurse=True):
        check_at_rest(unit, "checkpoint.save or load")
        unit.show_shards()
    state = ModelState()
    first: dict[int, str] = {}
    # Once for all that a save asks: an async one blocks training meanwhile.
    modules = [(plain_name(n), m) for n, m in model.named_modules(remove_duplicate=False)]
    for prefix, module in modules:
        for key, param in module._parameters.items():
            if param is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            known = first.setdefault(id(param), name)
            if known == name:
                state.parameters[name] = param
            if only == "trainable" and not param.requires_grad:
                continue
            if known != name:
                state.ties[PREFIX + name] = PREFIX + known
            else:
                state.tensors[PREFIX + name] = _checked(name, param, state)
    if only == "trainable":
        return state
    seen: set[nn.Module] = set()
    for prefix, module in modules:
        at = f"{prefix}." if prefix else ""
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                known = first.setdefault(id(buffer), at + key)
                if known != at + key:
                    state.ties[PREFIX + at + key] = PREFIX + known
                else:
                    state.tensors[PREFIX + at + key] = _checked(at + key, buffer, state)
                    state.buffers.append(PREFIX + at + key)
        if has_extra(module) and module not in seen:
            seen.add(module)
            where = f"{PREFIX}{at}_extra_state"
            state.extra[prefix] = encode(
                module.get_extra_state(), where, keeper(state.extra_tensors)
            )
    return state


def has_extra(module: nn.Module) -> bool:
    """Whether it has a ``get_extra_state`` of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def parameter_names(model: nn.Module) -> dict[int, str]:
    """id of a parameter -> its first name."""
    return {id(param): plain_name(name) for name, param in model.named_parameters()}


def plain_name(name: str) -> str:
    """Without what ``torch.compile(model)`` and checkpoint_wrapper put into it."""
    if not any(part in name for part in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _checked(name: str, tensor: Tensor, state: ModelState) -> Tensor:
    local = get_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if local.device.type == "meta":
        raise CheckpointError(
            f"{name} is on the meta device and has no values; call parallel3d.materialize first"
        )
    if tensor.layout != torch.strided:
        raise CheckpointError(f"{name} is {tensor.layout}; checkpoints hold dense tensors only")
    if not hasattr(local, "__tensor_flatten__"):
        return tensor
    values = _values_of(name, local, state)
    return make_dtensor(values, spec_of(tensor)) if isinstance(tensor, DTensor) else values


def _values_of(name: str, local: Tensor, state: ModelState) -> Tensor:
    """The one inner tensor of a wrapper subclass that holds its values as they are.

    A float8 weight of torchao's is such a wrapper, with a scale derived from the values at times. One that
    holds its values in another form (NF4) has no dense tensor to store.
    """
    inner = {each: getattr(local, each) for each in local.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
    values = [t for t in inner.values() if (t.shape, t.dtype) == (local.shape, local.dtype)]
    if len(values) != 1 or any(t.numel() > 1 for t in inner.values() if t is not values[0]):
        raise CheckpointError(
            f"{name} is a {type(local).__name__}, whose values lie in {', '.join(inner)}; checkpoints hold "
            'dense tensors only. only="trainable" leaves out frozen weights, which come again from the model '
            "that they were quantised from"
        )
    if len(inner) > 1:
        state.derived.append(name)
    return values[0]
