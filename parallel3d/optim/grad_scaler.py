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
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.inspect import refuse_unfinalized
from parallel3d.optim.accumulate import group_of
from parallel3d.optim.pieces import check_reduced

_last_scaled = -1  # id of the last backward that began at a scaled loss


def _note_backward(_: torch.Tensor) -> None:
    global _last_scaled
    _last_scaled = backward_id()


def is_scaled(backward: int) -> bool:
    """Whether the backward with this number began at a loss that our ``GradScaler`` has scaled."""
    return backward != -1 and backward == _last_scaled


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded models: all ranks skip a step if any rank finds an infinity.

    torch's own checks only this rank's shards: a rank that has the infinity skips the step and halves its
    scale, the others do neither, and the ranks' weights and scales diverge silently. Here each ``unscale_``
    (or ``step`` without one) all-reduces one number, so that all ranks decide alike. Used as torch's::

        scaler = p3d.optim.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        p3d.optim.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    Gradients may be DTensors on any meshes, plain (of ignored parameters), float16, and on the CPU under
    CPU offload. Method: Micikevicius et al. 2018, arXiv:1710.03740.

    Args:
        device: device type of the loss.
        init_scale: the first scale.
        growth_factor: factor of the scale after ``growth_interval`` steps without an infinity.
        backoff_factor: factor of the scale after a skipped step.
        growth_interval: see ``growth_factor``.
        enabled: False makes every method do nothing.
        mesh: the ranks that agree; by default all ranks. All of them must call.

    Raises:
        MeshError: ``mesh`` is no mesh.
        StateError: in ``unscale_`` or ``step``: a gradient is not reduced yet; or in the backward, if
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
            group_of(mesh, "GradScaler")  # may make a group, which takes all ranks
        self._mesh = mesh

    def scale(self, outputs: Any) -> Any:
        """Multiplies the outputs by the scale, see ``torch.amp.GradScaler.scale``."""
        if not isinstance(outputs, torch.Tensor) and isinstance(outputs, Iterable):
            outputs = outputs if isinstance(outputs, (list, tuple)) else list(outputs)
        scaled = super().scale(outputs)
        if self._enabled:
            for tensor in tensors_in(scaled):
                if tensor.requires_grad:
                    tensor.register_hook(_note_backward)
        return scaled

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscales the gradients. Returns device -> 1.0 if any rank has found an infinity or nan, else 0.0.

        float16 gradients are unscaled too, whatever ``allow_fp16`` is: parameters may be float16, or
        gradients (``keep_low_precision_grads``).
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        refuse_unfinalized(params, f"unscaling the gradients of {type(optimizer).__name__}")
        by_device = {found_inf.device: found_inf}
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for param in params:
            if param.grad is not None:
                local = _local_values(param)
                by_kind[local.device, local.dtype].append(local)
        with torch.no_grad():
            for (device, _), grads in by_kind.items():
                if device not in by_device:
                    by_device[device] = found_inf.to(device, copy=True)
                unscale_(grads, by_device[device], inv_scale.to(device, non_blocking=True))
            elsewhere = [flag for flag in by_device.values() if flag is not found_inf]
            for flag in elsewhere:
                torch.maximum(found_inf, flag.to(found_inf.device), out=found_inf)
            group = group_of(self._mesh, "GradScaler")
            if group is not None:
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
            for flag in elsewhere:
                flag.copy_(found_inf, non_blocking=True)
        return by_device


def _local_values(param: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of the gradient of ``param``, or the values of a sparse gradient."""
    grad = param.grad
    assert grad is not None
    check_reduced(grad, "Unscale")
    if isinstance(grad, DTensor):
        return get_local_tensor(grad)
    if grad.is_sparse:
        # Coalesced first: a sum of float16 values may overflow where none of them does.
        param.grad = grad.coalesce()
        return param.grad._values()
    if grad.layout is not torch.strided:
        raise Parallel3dError(
            f"GradScaler: a gradient has layout {grad.layout}; it unscales dense and sparse COO ones"
        )
    return grad
