"""GradScaler: float16's loss scaling, with all ranks skipping the same steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d._torch.autograd import backward_id
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.kernels import unscale_
from parallel3d._util.trees import tensors_in
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.inspect import refuse_unfinalized, waits_for_reduction
from parallel3d.optim.accumulate import group_of

# Which backwards are of a loss that our GradScaler has scaled.

_last = -1


def _note(_: torch.Tensor) -> None:
    global _last
    _last = backward_id()


def mark_scaled(loss: torch.Tensor) -> None:
    """Lets a backward from ``loss`` be known by its ``backward_id`` from the beginning."""
    if loss.requires_grad:
        loss.register_hook(_note)


def is_scaled(backward: int) -> bool:
    """Whether ``backward`` is one."""
    return backward != -1 and backward == _last


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded models: an infinity on any rank is one on all.

    torch's own looks at each rank's shards alone: a rank that has the infinity skips the step and halves
    its scale, the others do neither, and weights and scales part silently. Here one all-reduce of one number
    for each ``unscale_`` (or ``step`` without one) lets all ranks know. Used as torch's::

        scaler = p3d.optim.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        p3d.optim.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    Gradients may be of DTensors on any meshes, plain (of ignored parameters), float16, on the CPU too under
    CPU offload. Method: Micikevicius et al. 2018, arXiv:1710.03740.

    Args:
        device: type of the device of the loss.
        init_scale: the first scale.
        growth_factor: what it is multiplied by after ``growth_interval`` steps without an infinity.
        backoff_factor: what it is multiplied by after a skipped step.
        growth_interval: see ``growth_factor``.
        enabled: False makes every method do nothing.
        mesh: over whose ranks to agree; by default all ranks. All of them must call.

    Raises:
        MeshError: ``mesh`` is no mesh.
        StateError: in ``unscale_`` or ``step``: a gradient waits for its reduction; or in the backward, if
            the parameters are updated there (``step_in_backward``).
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        if mesh is not None:
            group_of(mesh, "GradScaler")  # its group is made here, where all ranks are
        self._mesh = mesh

    def scale(self, outputs: Any) -> Any:
        """As ``torch.amp.GradScaler.scale``: the outputs, times the scale."""
        if not isinstance(outputs, torch.Tensor) and isinstance(outputs, Iterable):
            outputs = outputs if isinstance(outputs, (list, tuple)) else list(outputs)
        scaled = super().scale(outputs)
        if self._enabled:
            for tensor in tensors_in(scaled):
                mark_scaled(tensor)
        return scaled

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """What ``unscale_`` and ``step`` of the base come to.

        float16 gradients are unscaled too, whatever ``allow_fp16`` says: parameters may be kept in it, or
        gradients (``keep_low_precision_grads``).

        Returns:
            By device, whether any rank has found an infinity or nan there: 0.0 or 1.0.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        refuse_unfinalized(params, f"unscaling the gradients of {type(optimizer).__name__}")
        found = {found_inf.device: found_inf}
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for param in params:
            if param.grad is not None:
                local = _local_values(param)
                by_kind[local.device, local.dtype].append(local)
        with torch.no_grad():
            for (device, _), grads in by_kind.items():
                if device not in found:
                    found[device] = found_inf.to(device, copy=True)
                unscale_(grads, found[device], inv_scale.to(device, non_blocking=True))
            self._agree(found, found_inf)
        return found

    def _agree(self, found: dict[torch.device, torch.Tensor], first: torch.Tensor) -> None:
        """Makes all of ``found`` 1.0, on all ranks, if any is on any."""
        for other in found.values():
            if other is not first:
                torch.maximum(first, other.to(first.device), out=first)
        group = group_of(self._mesh, "GradScaler")
        if group is not None:
            dist.all_reduce(first, dist.ReduceOp.MAX, group=group)
        for other in found.values():
            if other is not first:
                other.copy_(first, non_blocking=True)


def _local_values(param: torch.Tensor) -> torch.Tensor:
    """The part of the gradient of ``param`` that is in this rank's memory; of a sparse one its values."""
    grad = param.grad
    if waits_for_reduction(grad):
        raise StateError(
            f"GradScaler: the gradient of a parameter of shape {tuple(param.shape)} waits for its reduction. "
            "Unscale after the backward of the last micro-batch"
        )
    if isinstance(grad, DTensor):
        return get_local_tensor(grad)
    assert grad is not None
    if grad.is_sparse:
        # Added up first: a sum of float16 values may overflow where none of them does.
        param.grad = grad.coalesce()
        return param.grad._values()
    if grad.layout is not torch.strided:
        raise Parallel3dError(
            f"GradScaler: a gradient has layout {grad.layout}; it unscales dense and sparse COO ones"
        )
    return grad
