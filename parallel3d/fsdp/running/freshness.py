"""weights_stamp: whether gathered parameters still hold what the shards hold.

Version counters alone don't tell: fused and foreach optimizers leave a DTensor's as it was. So optimizer
steps are counted too, by a hook on every optimizer that is set when the first stamp is taken. Not those of
optimizers without a DTensor: one rank may step such a one alone (a probe that rank 0 trains), and would
then gather what no other rank does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from parallel3d._compat import untraced

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["weights_stamp"]

_steps: int | None = None  # None until the first stamp


@untraced
def _count(optimizer: Optimizer, *_: Any) -> None:
    global _steps
    assert _steps is not None
    groups = optimizer.param_groups  # maybe of other DTensors, master weights that it copies from
    if any(isinstance(param, DTensor) for group in groups for param in group["params"]):
        _steps += 1


def weights_stamp(buckets: Sequence[Bucket]) -> object:
    """A value that differs after an optimizer step or an in-place change of a sharded Parameter.

    Changes that autograd can't see either (``param.data.add_(1)``) don't show, nor those of
    ``torch._foreach_`` functions on DTensors outside of an optimizer.
    """
    global _steps
    if _steps is None:
        _steps = 0
        register_optimizer_step_post_hook(_count)
    versions = sum(
        p.sharded._version + p.local._version for bucket in buckets for p in bucket.params
    )
    return _steps, versions
