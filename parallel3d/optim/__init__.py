"""What surrounds the optimizer step: clipping and accumulation."""

from parallel3d.optim.accumulate import accumulate
from parallel3d.optim.clip import clip_grad_norm_
from parallel3d.optim.local import local

__all__ = ["accumulate", "clip_grad_norm_", "local"]
