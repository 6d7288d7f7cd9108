"""clip_grad_norm_: the global norm over any mix of sharded, replicated and plain gradients."""

import math
from collections.abc import Iterable

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.running.members import parameters_at_rest
from parallel3d.optim.pieces import local_of
from parallel3d.optim.step_in_backward import refuse_stepped

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients in place so that their norm is at most ``max_norm``.

    Each element of the plain model's gradient counts once, wherever it is: a sharded gradient's parts are
    summed over the axes that cut it, a replicated or plain one counts on its own. At most one small
    all-reduce per mesh axis.

    Args:
        parameters: a module, or tensors whose ``.grad`` to clip.
        max_norm: the largest norm to leave.
        norm_type: the p of the norm, above 0; ``inf`` for the largest magnitude.
        error_if_nonfinite: raise if the norm is nan or infinite (waits for the device).

    Returns:
        The norm before clipping, a scalar tensor; the same on every rank if plain gradients (of ignored
        parameters, say) are.

    Raises:
        Parallel3dError: bad ``max_norm`` or ``norm_type``, or a non-finite norm if asked for.
        StateError: a gradient waits for its reduction, as between micro-batches; or parameters are updated
            in backward (``step_in_backward``).
    """
    _check_numbers(max_norm, norm_type)
    tensors = _tensors(parameters)
    refuse_stepped(tensors, "clip_grad_norm_")
    grads = [p.grad for p in tensors if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = _total_norm(grads, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise Parallel3dError(
            f"the {norm_type}-norm of the gradients is {norm.item()}; it must be finite to clip by"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for local in map(local_of, grads):
        local.mul_(factor.to(local.dtype))
    return norm


def _check_numbers(max_norm: float, norm_type: float) -> None:
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise Parallel3dError(f"max_norm is {max_norm!r}; it must be a number >= 0")
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise Parallel3dError(
            f"norm_type is {norm_type!r}; it must be a number > 0, such as 2.0 or float('inf')"
        )


def _tensors(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
) -> Iterable[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        return parameters_at_rest(parameters)
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, str):
        raise Parallel3dError(
            f"parameters is {parameters!r}; it must be a module, a tensor or an iterable of tensors"
        )
    return list(parameters)


def _cut_by(grad: torch.Tensor, groups: dict[str, ProcessGroup]) -> frozenset[str]:
    """Names of the process groups over which ``grad``'s parts differ; adds them to ``groups``.

    ``groups`` ends up innermost axis first, in the same order on every rank.
    """
    if not isinstance(grad, DTensor):
        return frozenset()
    names = set()
    mesh = grad.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = grad.placements[axis]
        if placement.is_partial():
            raise StateError(
                f"a gradient of shape {tuple(grad.shape)} is {placement} on axis {axis} of {mesh}: it "
                "waits for its reduction. Clip after the backward of the last micro-batch"
            )
        if isinstance(placement, Replicate) or mesh.size(axis) == 1:
            continue
        group = mesh.get_group(axis)
        groups[group.group_name] = group
        names.add(group.group_name)
    return frozenset(names)


def _total_norm(grads: list[torch.Tensor], p: float) -> torch.Tensor:
    groups: dict[str, ProcessGroup] = {}
    members: dict[frozenset[str], list[torch.Tensor]] = {}
    for grad in grads:
        members.setdefault(_cut_by(grad, groups), []).append(local_of(grad))
    parts = {key: _power_sum(locals_, p) for key, locals_ in members.items()}
    for name, group in groups.items():
        _reduce_over(name, group, parts, p)
    (total,) = parts.values()
    return total if math.isinf(p) else total ** (1.0 / p)


def _power_sum(locals_: list[torch.Tensor], p: float) -> torch.Tensor:
    """Sum of |x|^p over the tensors (largest |x| for p = inf), at least in float32."""
    if math.isinf(p):
        # A rank may hold no row of a tensor, and the maximum of nothing is an error: add a zero.
        zero = locals_[0].new_zeros(1)
        largest = [torch.cat([x.flatten().abs().to(zero.dtype), zero]).max() for x in locals_]
        return torch.stack(largest).max().to(torch.promote_types(zero.dtype, torch.float32))
    dtype = torch.promote_types(locals_[0].dtype, torch.float32)
    norms = [torch.linalg.vector_norm(x, p, dtype=_norm_dtype(x)).to(dtype) for x in locals_]
    return torch.stack(norms).pow(p).sum()


def _norm_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _reduce_over(
    name: str, group: ProcessGroup, parts: dict[frozenset[str], torch.Tensor], p: float
) -> None:
    """Sums the parts that ``group`` cuts over it, and merges them with those it doesn't cut."""
    keys = [key for key in parts if name in key]
    summed = torch.stack([parts[key] for key in keys])
    op = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    dist.all_reduce(summed, op, group=group)
    for key, value in zip(keys, summed.unbind(), strict=True):
        del parts[key]
        rest = key - {name}
        if rest not in parts:
            parts[rest] = value
        elif math.isinf(p):
            parts[rest] = torch.maximum(parts[rest], value)
        else:
            parts[rest] = parts[rest] + value
