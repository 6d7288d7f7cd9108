"""weights_stamp: whether gathered parameters still hold what the shards hold.

Version counters alone don't tell: fused and foreach optimizers leave a DTensor's as it was. So optimizer
steps are counted too, by a hook on every optimizer that is set when the first stamp is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["weights_stamp"]

_steps: int | None = None  # None until the first stamp


def _count(*_: Any) -> None:
    global _steps
    assert _steps is not None
    _steps += 1


def weights_stamp(buckets: Sequence[Bucket]) -> object:
    """A value that differs after an optimizer step or an in-place change of a sharded Parameter.

    Changes that autograd can't see either (``param.data.add_(1)``) don't show.
    """
    global _steps
    if _steps is None:
        _steps = 0
        register_optimizer_step_post_hook(_count)
    versions = sum(
        p.sharded._version + p.local._version for bucket in buckets for p in bucket.params
    )
    return _steps, versions
