"""Whole buckets among parameters, and what pads their flat buffers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.extension_bucket import ExtensionBucket
from parallel3d.fsdp.param import owner_of

__all__ = ["by_bucket", "padding_in", "padding_of"]


def by_bucket(params: Sequence[torch.Tensor]) -> list[Bucket | torch.Tensor]:
    """The buckets whose parameters are all in ``params``, and the parameters that are in none of these.

    In the order of the first parameter of each. Buckets of all-gather extensions don't count: their flat
    buffer isn't the parameters' memory.
    """
    found = _buckets_of(params)
    present = Counter(id(bucket) for bucket in found if bucket is not None)
    result: list[Bucket | torch.Tensor] = []
    taken: set[int] = set()
    for param, bucket in zip(params, found, strict=True):
        if bucket is None or present[id(bucket)] != len(bucket.params):
            result.append(param)
        elif id(bucket) not in taken:
            taken.add(id(bucket))
            result.append(bucket)
    return result


def _buckets_of(params: Iterable[torch.Tensor]) -> list[Bucket | None]:
    """Of each parameter, that it is a sharded Parameter of."""
    by_param: dict[int, Bucket] = {}
    units: set[int] = set()
    result = []
    for param in params:
        owner = owner_of(param)
        unit = owner.unit() if owner is not None and owner.unit is not None else None
        if unit is not None and id(unit) not in units:
            units.add(id(unit))
            for bucket in unit.group.buckets:
                if not isinstance(bucket, ExtensionBucket):
                    by_param.update((id(p.sharded), bucket) for p in bucket.params)
        result.append(by_param.get(id(param)))
    return result


def padding_of(bucket: Bucket, first: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """(start, length) of what belongs to no parameter in a flat buffer (S,), and may hold anything.

    In the slots of the parameters from index ``first`` to before ``end``.
    """
    padding, slot_end = [], sum(bucket.slot_sizes[:first])
    for param in bucket.params[first:end]:
        slot_end += param.slot_numel
        rest = 0 if param.even else param.slot_numel - math.prod(param.local_shape)
        if not isinstance(rest, int) or rest:  # of simulated ranks some may have it
            padding.append((slot_end - rest, rest))
    return padding


def padding_in(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """The parts of ``flat`` that ``padding_of`` tells."""
    return [flat.narrow(0, start, length) for start, length in padding_of(bucket)]
