"""All-gather extensions that the user sets on local tensors of sharded Parameters.

torch asks the local tensor itself, whatever its class. Here it is asked when the model first runs.
"""

from __future__ import annotations

from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.extension import is_extended
from parallel3d.fsdp.buckets.extension_bucket import ExtensionBucket
from parallel3d.fsdp.buckets.in_place import count_in_place, is_small

__all__ = ["with_late_extensions"]

_SETTINGS = (
    "divide_factor",
    "reduce_unused",
    "all_reduce_hook",
    "all_reduce_hook_stream",
    "comm_hook",
    "gather_comm",
    "scatter_comm",
    "scatter_group",
    "max_inputs",
    "force_sum",
    "guard",
    "keep_storage",
)


def with_late_extensions(buckets: list[Bucket]) -> list[Bucket] | None:
    """``buckets``, whose extended parameters have gone over to buckets of their own; None if there are none.

    Raises:
        Parallel3dError: one of the methods alone, or in a bucket that can't be parted.
    """
    found = [
        bucket
        for bucket in buckets
        if not isinstance(bucket, ExtensionBucket) and any(map(is_extended, bucket.local_views))
    ]
    if not found:
        return None
    result = []
    for bucket in buckets:
        result += _parted(bucket) if bucket in found else [bucket]
    return result


def _parted(bucket: Bucket) -> list[Bucket]:
    if type(bucket) is not Bucket or bucket.grads.is_busy:
        names = [p.name for p in bucket.params if is_extended(p.local)]
        raise Parallel3dError(
            f"the local tensor of parameter {', '.join(names)} of unit {bucket.unit} was given "
            "fsdp_pre_all_gather, which does not go with shard_optimizer_over_replicate, nor with gradients "
            "that wait; give it before the first forward, or before fully_shard"
        )
    extended = [param for param in bucket.params if is_extended(param.local)]
    rest = [param for param in bucket.params if not is_extended(param.local)]
    new = ExtensionBucket(bucket.unit, extended, bucket.axes, bucket.given_policy, bucket.offload)
    for name in _SETTINGS:
        setattr(new, name, getattr(bucket, name))
    if not rest:
        return [new]
    device_type = bucket.axes.mesh.device_type
    locals_ = [param.local for param in rest]
    bucket.params = rest
    if bucket.shard_group is not None:
        bucket.in_place = count_in_place(rest, device_type)
    bucket.small_grads = [is_small(param, device_type) for param in rest]
    bucket._take(locals_)
    return [bucket, new]
