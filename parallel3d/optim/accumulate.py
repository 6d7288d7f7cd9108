"""Gradient accumulation that all-reduces over the replicate axis once, on the last micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule  # torch's, of which ours is a child
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import assert_async
from parallel3d._torch.dtensor import flatten_axes
from parallel3d._torch.simulated import inner_tensors
from parallel3d._util import dry_run
from parallel3d.errors import MeshError, Parallel3dError

T = TypeVar("T")


def accumulate(model: nn.Module, micro_batches: Iterable[T]) -> Iterator[T]:
    """Yields ``micro_batches``; only the backward of the last one runs HSDP's all-reduce.

    Gradients are still reduce-scattered each time, so memory stays that of one micro-batch::

        for tokens in p3d.optim.accumulate(model, micro_batches):
            (loss_of(model(tokens)) / len(micro_batches)).backward()
        optimizer.step()

    Args:
        model: a model that ``parallelize`` or ``fully_shard`` was applied to.
        micro_batches: any iterable; read one ahead.

    Raises:
        Parallel3dError: ``model`` has no sharded unit, or there is no micro-batch.
    """
    if not isinstance(model, nn.Module) or not isinstance(micro_batches, Iterable):
        raise Parallel3dError(
            f"accumulate was given {type(model).__name__} and {type(micro_batches).__name__}; it needs a "
            "module and an iterable of micro-batches"
        )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise Parallel3dError(
            f"accumulate: {type(model).__name__} is not parallel; call parallel3d.parallelize first"
        )
    return _deferring_all_reduce(units, iter(micro_batches))


def _deferring_all_reduce(units: Sequence[FSDPModule], source: Iterator[T]) -> Iterator[T]:
    def set_all_reduce(wanted: bool) -> None:
        for unit in units:
            unit.set_requires_all_reduce(wanted, recurse=False)

    try:
        current = next(source)
    except StopIteration:
        raise Parallel3dError("accumulate: there is no micro-batch; give at least one") from None
    try:
        for following in source:
            set_all_reduce(False)
            yield current
            current = following
        set_all_reduce(True)
        yield current
    finally:
        set_all_reduce(True)


def group_of(mesh: DeviceMesh | None, what: str) -> ProcessGroup | None:
    """Returns the process group over all ranks of ``mesh``, or the default group if ``mesh`` is None; None if
    no process group is initialized. ``what``: the caller's name, for errors."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise MeshError(f"{what}: mesh is {mesh!r}; it must be a DeviceMesh, or None for all ranks")
    if not dist.is_initialized():
        return None
    if mesh is None or mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    if mesh.get_coordinate() is None:
        raise MeshError(f"{what}: this rank is not in {mesh}; give one that it is in, or None")
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.mesh_dim_names is None:
        raise MeshError(f"{what}: {mesh} has several axes without names; make it with build_mesh")
    return flatten_axes(mesh, mesh.mesh_dim_names).get_group()


def global_mean(
    loss_sum: torch.Tensor, n_tokens: int | torch.Tensor, *, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Returns the loss to call ``backward`` on so that gradients are those of the mean over all tokens.

    A mean on each rank is wrong where ranks or micro-batches have different numbers of tokens (padding,
    packing, masks): a token of a short batch counts for more. With N tokens in all, and D data ranks that the
    engine averages over, the backward of each rank must start from ``loss_sum * D / N``. The all-reduce goes
    over tp too, whose T ranks count each token T times: ``N * T`` over ``D * T`` ranks is the same ratio::

        n = sum(int((t != PAD).sum()) for t in micro_batches)  # of this rank, for the whole step
        for tokens in p3d.optim.accumulate(model, micro_batches):
            loss_sum = cross_entropy(model(tokens), targets, ignore_index=PAD, reduction="sum")
            p3d.optim.global_mean(loss_sum, n).backward()

    Each call all-reduces one number; on an accelerator the CPU does not wait for it. Summed over
    micro-batches and averaged over ranks, the returned values are the mean over all tokens. Do not combine it
    with ``set_gradient_divide_factor``, which changes what the engine divides by.

    Args:
        loss_sum: scalar, the sum over this rank's tokens of one micro-batch; the same on all ranks of tp.
        n_tokens: this rank's number of tokens in all micro-batches of the step; 0 is allowed on some ranks.
            A tensor of one element may be fractional (a sum of weights).
        mesh: the ranks to count over; by default all ranks. All of them must call.

    Returns:
        A scalar of the dtype of ``loss_sum``.

    Raises:
        Parallel3dError: ``loss_sum`` is no scalar, ``n_tokens`` is negative or not finite, or no rank has a
            token (on an accelerator a device-side assertion).
        MeshError: ``mesh`` is no mesh.
    """
    is_tensor = isinstance(loss_sum, torch.Tensor)
    if not is_tensor or loss_sum.numel() != 1 or not loss_sum.is_floating_point():
        shown = f"{loss_sum.dtype} {tuple(loss_sum.shape)}" if is_tensor else repr(loss_sum)
        raise Parallel3dError(
            f"loss_sum is {shown}; it must be a floating-point tensor of one element, such as "
            "cross_entropy(..., reduction='sum')"
        )
    total = _count(n_tokens, loss_sum)
    group = group_of(mesh, "global_mean")
    ranks = 1
    if group is not None:
        ranks = dist.get_world_size(group)
        dist.all_reduce(total, group=group)
    _check_total(total, n_tokens)
    # Multiplied in float64, also in backward: over many tokens the factor alone is below float16's range.
    return (loss_sum.double() * (ranks / total)).to(loss_sum.dtype)


def _count(n_tokens: int | torch.Tensor, loss_sum: torch.Tensor) -> torch.Tensor:
    """Returns ``n_tokens`` as a new float64 tensor: exact, and of one dtype on all ranks."""
    if isinstance(n_tokens, DTensor):
        raise Parallel3dError(
            f"n_tokens is a DTensor ({n_tokens.placements}); it must be this rank's number, such as "
            "n_tokens.to_local()"
        )
    if isinstance(n_tokens, torch.Tensor):
        if n_tokens.numel() != 1 or n_tokens.is_complex():
            raise Parallel3dError(
                f"n_tokens is a {n_tokens.dtype} tensor of shape {tuple(n_tokens.shape)}; it must be one "
                "number, such as (targets != PAD).sum()"
            )
        total = n_tokens.detach().to(loss_sum.device, torch.float64, copy=True).reshape(())
        # All ranks raise after the all-reduce: the others would wait in it if this one raised here.
        return torch.where(torch.isfinite(total) & (total >= 0), total, torch.nan)
    is_int = isinstance(n_tokens, (int, torch.SymInt)) and not isinstance(n_tokens, bool)
    if not is_int or n_tokens < 0:
        raise Parallel3dError(
            f"n_tokens is {n_tokens!r}; it must be this rank's number of tokens, an integer of at least 0 or "
            "a tensor"
        )
    return torch.full((), n_tokens, dtype=torch.int64, device=loss_sum.device).double()


def _check_total(total: torch.Tensor, n_tokens: object) -> None:
    if dry_run.active():  # the total has no value
        return
    if total.device.type != "cpu":
        assert_async(
            total > 0, "global_mean: n_tokens is 0 on every rank, or below 0 or nan on one"
        )
        return
    totals = [float(t) for t in inner_tensors(total)]  # one for each simulated rank
    if any(map(math.isnan, totals)):
        raise Parallel3dError(
            f"n_tokens is {n_tokens} here; on every rank it must be at least 0 and finite"
        )
    if not min(totals) > 0:
        raise Parallel3dError("n_tokens is 0 on every rank; skip such a step on all ranks")
