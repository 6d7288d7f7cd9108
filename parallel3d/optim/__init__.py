"""Training utilities around the optimizer step: clipping, accumulation, loss scaling, averages."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.optim.accumulate import accumulate as accumulate
    from parallel3d.optim.accumulate import global_mean as global_mean
    from parallel3d.optim.capture import CapturedStep as CapturedStep
    from parallel3d.optim.capture import capture as capture
    from parallel3d.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from parallel3d.optim.ema import EMA as EMA
    from parallel3d.optim.grad_scaler import GradScaler as GradScaler
    from parallel3d.optim.local import local as local
    from parallel3d.optim.step_in_backward import StepInBackward as StepInBackward
    from parallel3d.optim.step_in_backward import step_in_backward as step_in_backward
else:
    export_lazily(
        __name__,
        {
            ".accumulate": "accumulate global_mean",
            ".capture": "CapturedStep capture",
            ".clip": "clip_grad_norm_",
            ".ema": "EMA",
            ".grad_scaler": "GradScaler",
            ".local": "local",
            ".step_in_backward": "StepInBackward step_in_backward",
        },
    )
