"""Sharded parameters beside plain tensors, outside their unit's forward: what works, and what errors mean.

At rest a parameter is a DTensor, which torch does not compute with beside plain tensors. A penalty on
parameters, added to a loss, works. Other operators, optimizers' steps and ``load_state_dict`` end in an error
that names the parameter; errors of functions that nothing here is called by get a note when they are printed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.optimizer import Optimizer

from parallel3d._torch.dtensor import watch_writes, wrap_operators
from parallel3d._torch.optimizers import step_apart, wrap_steps
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.param import ShardedParam, owner_of

MIXED = "mixed torch.Tensor and DTensor"
_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


@cache
def watch_mixed() -> None:
    """From now on penalties on parameters work, and errors of the rest name parameters."""
    wrap_operators(_operate)
    watch_writes(_refuse_write)
    wrap_steps(_explain_step)
    step_apart(lambda tensor: isinstance(tensor, DTensor))
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, at: Any) -> None:
        message = explain_mixed(error)
        if message is not None:
            error.add_note(message)
        before(kind, error, at)

    sys.excepthook = hook


def _operate(operator: Callable[..., Any], sharded: DTensor, other: torch.Tensor) -> Any:
    """``operator(sharded, other)``, of a DTensor and a plain tensor.

    A number computed from parameters becomes a plain tensor with its whole value, and what is computed with
    it the rank's own, like its loss. As all gradients, its gradient is then the mean over the ranks.
    """
    if not sharded.ndim and sharded.requires_grad and torch.is_grad_enabled():
        return operator(_MeanGradient.apply(sharded.full_tensor(), sharded.device_mesh), other)
    try:
        return operator(sharded, other)
    except RuntimeError as error:
        message = explain_mixed(error, [sharded])
        if message is None:
            raise
        raise StateError(message) from error


def _refuse_write(operands: Sequence[Any]) -> None:
    """Raises StateError: the first operand, a plain tensor, was changed in place by others, DTensors."""
    raise StateError(_message(operands, []))


class _MeanGradient(torch.autograd.Function):
    """The identity; its gradient is the mean over the ranks of a mesh."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        sizes = ctx.mesh.shape
        placements = [Partial() if size > 1 else Replicate() for size in sizes]
        parts = DTensor.from_local(grads[0], ctx.mesh, placements, run_check=False)
        return parts.full_tensor() / prod(sizes), None


# What errors mean.


def explain_mixed(error: BaseException, operands: Iterable[Any] = ()) -> str | None:
    """Returns what ``error`` means if it is of a plain tensor beside a sharded parameter, else None.

    Args:
        operands: tensors that were computed with, to be looked at before those on the stack.
    """
    if isinstance(error, Parallel3dError) or MIXED not in str(error):
        return None
    return _message(operands, list(traceback.walk_tb(error.__traceback__))[::-1])


def _message(operands: Iterable[Any], frames: list[tuple[FrameType, int]]) -> str:
    found = (*operands, *(value for frame, _ in frames for value in _tensors(frame.f_locals)))
    owner = next((o for each in found if (o := owner_of(each)) is not None), None)
    stack = (*frames, *traceback.walk_stack(sys._getframe()))
    lines = ((frame.f_code.co_filename, line) for frame, line in stack)
    where = next((f" ({f}:{line})" for f, line in lines if not f.startswith(_LIBRARIES)), "")
    what = "a sharded parameter, or what was computed from one,"
    if owner is not None:
        what = f"{_named(owner)} is sharded, a DTensor, and"
    return (
        f"{what} was used beside a plain tensor outside the unit's forward{where}. Use its whole value, "
        "param.full_tensor(), which all ranks must call; or give the other tensor its layout: "
        "torch.distributed.tensor.distribute_tensor(tensor, param.device_mesh, param.placements); or compute "
        "it in the unit's forward. A penalty is added to a loss by loss = loss + penalty, not in place"
    )


def _tensors(values: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in values.values():
        items = value if isinstance(value, (list, tuple)) else [value]
        yield from (each for each in items if isinstance(each, torch.Tensor))


def _named(owner: ShardedParam) -> str:
    unit = owner.unit()
    return f"parameter {owner.name}" + ("" if unit is None else f" of unit {unit.label}")


def _explain_step(optimizer: Optimizer, error: RuntimeError) -> str | None:
    """Returns what an error of ``optimizer.step()`` means, if it is about a sharded parameter; else None."""
    if isinstance(error, Parallel3dError):
        return None
    for param, state in optimizer.state.items():
        owner = owner_of(param)
        if owner is None or not param.ndim:
            continue
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue
            start = f"{type(optimizer).__name__}: the state {key!r} of {_named(owner)}"
            if not isinstance(value, DTensor):
                return (
                    f"{start} is a plain tensor, and the parameter is sharded: load whole states by "
                    "parallel3d.fsdp.load_optim_state_dict(model, optimizer, states), or a checkpoint by "
                    "parallel3d.checkpoint.load"
                )
            if "dtype" in str(error) and value.dtype != param.dtype:
                return (
                    f"{start} is {value.dtype}, and the parameter is now {param.dtype}: convert the model "
                    "(.float(), .to(dtype)) before the optimizer's first step, or make the optimizer anew"
                )
    return explain_mixed(error)


def explain_load(model: nn.Module, given: Mapping[str, Any], error: RuntimeError) -> str | None:
    """Returns why ``model.load_state_dict(given)`` ended in ``error``, if it is about sharded parameters."""
    problems: dict[str, list[str]] = {}
    for name, param in model.named_parameters():
        owner, value = owner_of(param), given.get(name)
        if owner is None or not isinstance(value, torch.Tensor):
            continue
        problem = _load_problem(owner, value)
        if problem is not None:
            text = f"{name} (shape {tuple(value.shape)}, the parameter's is {tuple(param.shape)})"
            problems.setdefault(problem, []).append(text)
    if not problems:
        return explain_mixed(error)
    lines = (
        f"  - {first}" + (f" and {len(more)} more" if more else "") + f": {problem}"
        for problem, (first, *more) in problems.items()
    )
    return "the state dict does not fit the sharded model:\n" + "\n".join(lines)


def _load_problem(owner: ShardedParam, value: torch.Tensor) -> str | None:
    if not isinstance(value, DTensor) and value.shape == owner.local_shape != owner.global_shape:
        return (
            "one rank's shard, as torch.save of local tensors writes it. Write checkpoints by "
            "parallel3d.checkpoint.save, or torch.save what parallel3d.fsdp.model_state_dict returns"
        )
    if value.shape != owner.global_shape:
        return (
            "another shape. Resize the plain model (resize_token_embeddings, of a vocabulary), before "
            "parallelize or fully_shard, then load; or give values of the parameter's shape"
        )
    if not isinstance(value, DTensor):
        return (
            "a plain tensor, and the parameter is sharded. Load whole values by "
            "parallel3d.fsdp.load_model_state_dict(model, state_dict)"
        )
    if value.device_mesh != owner.spec.mesh:
        return (
            f"of another mesh, {value.device_mesh}: what torch.save writes of DTensors fits the mesh it was "
            "written on. Use parallel3d.checkpoint.save and load, which reshard"
        )
    return None
