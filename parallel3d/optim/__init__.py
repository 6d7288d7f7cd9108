"""Training utilities around the optimizer step: clipping, accumulation, loss scaling, averages."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.optim.accumulate import accumulate, global_mean
    from parallel3d.optim.clip import clip_grad_norm_
    from parallel3d.optim.ema import EMA
    from parallel3d.optim.grad_scaler import GradScaler
    from parallel3d.optim.local import local
    from parallel3d.optim.step_in_backward import StepInBackward, step_in_backward

__all__ = [
    "EMA",
    "GradScaler",
    "StepInBackward",
    "accumulate",
    "clip_grad_norm_",
    "global_mean",
    "local",
    "step_in_backward",
]

export_lazily(
    __name__,
    {
        "optim.accumulate": "accumulate global_mean",
        "optim.clip": "clip_grad_norm_",
        "optim.ema": "EMA",
        "optim.grad_scaler": "GradScaler",
        "optim.local": "local",
        "optim.step_in_backward": "StepInBackward step_in_backward",
    },
)
