"""make_buckets: which bucket each parameter of a unit goes into."""

from collections.abc import Sequence
from typing import Any

from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.extension import is_extended
from parallel3d.fsdp.buckets.extension_bucket import ExtensionBucket
from parallel3d.fsdp.buckets.hybrid_bucket import HybridBucket
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.precision.eval_precision import in_own_dtype

__all__ = ["make_buckets"]


def make_buckets(
    unit: str,
    params: Sequence[ShardedParam],
    policy: MixedPrecisionPolicy,
    offload: Any = None,
) -> list[Bucket]:
    """Sorts a unit's parameters into buckets, in order of their first parameter.

    Each bucket has its parameters' own axes. Parameters on meta may get values one by one, so they are apart
    from those that have some. Those that keep their dtype have a policy that says so.
    """
    grouped: dict[tuple[type[Bucket], *tuple[object, ...]], list[ShardedParam]] = {}
    policies: dict[object, MixedPrecisionPolicy] = {}
    # By ranks: two equal meshes in one process have groups of other names.
    meshes = {id(param.tp_mesh): param.tp_mesh for param in params}
    ranks = {i: None if m is None else tuple(m.mesh.tolist()) for i, m in meshes.items()}
    for param in params:
        tp = ranks[id(param.tp_mesh)]
        assert param.initial is not None
        meta = param.initial.is_meta
        kind = HybridBucket if param.axes.over_replicate else Bucket
        if is_extended(param.initial):
            kind = ExtensionBucket
        own = in_own_dtype(policy, param.dtype) if param.keeps_dtype else policy
        dtypes = param.dtype, param.grad_dtype
        key = (kind, dtypes, param.requires_grad, param.parts, tp, param.axes, meta, own)
        grouped.setdefault(key, []).append(param)
        policies[key] = own
    return [
        key[0](unit, members, members[0].axes, policies[key], offload)
        for key, members in grouped.items()
    ]
