"""Full precision in eval: a bucket computes in one of two dtypes, and keeps what belongs to the other aside.

Only a bucket that has been in both has buffers and unsharded parameters for both; those that are not in use
have no storage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from parallel3d.fsdp.api import MixedPrecisionPolicy

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket

__all__ = ["in_own_dtype", "switch_precision"]


def in_own_dtype(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """``policy`` for parameters that compute in ``dtype``, their own, and are reduced in no lower one."""
    if not dtype.is_floating_point:
        return policy
    wanted = torch.promote_types(dtype, policy.reduce_dtype or policy.param_dtype or dtype)
    return replace(policy, param_dtype=None, reduce_dtype=None if wanted == dtype else wanted)


def switch_precision(bucket: Bucket, full: bool) -> None:
    """Lets ``bucket``, which is sharded, compute in its parameters' own dtype, or in the policy's again."""
    if bucket.full is full:
        return
    bucket.leave_precision()
    bucket.full = full
    before = {name: getattr(bucket, name) for name in bucket.by_precision}
    if bucket.other_precision is not None:
        vars(bucket).update(bucket.other_precision)
        bucket.enter_precision()
    else:
        bucket.set_dtypes()
        if bucket.compute_dtype != before["compute_dtype"]:
            bucket.small = None
            bucket.build_unsharded()
    bucket.other_precision = before
