"""Gradients that each tp rank has a part of: how parts and whole ones are added, and the sum over tp.

Our own styles say beforehand which gradients are partial. With torch's styles a replicated parameter is a
DTensor in forward, and autograd decides: its gradient may come as ``Partial()`` from one use and as
``Replicate()`` from another. As soon as one part comes, a parameter's sum is a sum of parts, to which a whole
gradient contributes the same on each of the n tp ranks: one n-th of itself.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from parallel3d._compat import foreach_copy_
from parallel3d.fsdp.collectives import all_reduce

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["sum_over_tp"]


def sum_over_tp(bucket: Bucket, tensor: torch.Tensor, found: Collection[int]) -> None:
    """Sums partial gradients in a sharded buffer over tp, by one collective in the buffer's dtype.

    Args:
        tensor: (S,), or rows of it: (R * S,).
        found: indices of those that have turned out to be partial, beside those that always are.
    """
    assert bucket.tp_group is not None
    runs = _runs(bucket, found)
    rows = tensor.view(-1, bucket.numel)
    pieces = [row.narrow(0, start, length) for row in rows.unbind() for start, length in runs]
    if not pieces:
        return
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    work = all_reduce(packed, bucket.tp_group, unit=bucket.unit)
    if work is not None:
        work.wait()
    if len(pieces) > 1:
        foreach_copy_(pieces, list(packed.split([piece.numel() for piece in pieces])))


def _runs(bucket: Bucket, found: Collection[int]) -> list[tuple[int, int]]:
    """(start, length) of what is to be summed, neighbours joined."""
    runs: list[tuple[int, int]] = []
    start = 0
    for index, size in enumerate(bucket.slot_sizes if found else ()):
        if index in found:
            if runs and sum(runs[-1]) == start:
                runs[-1] = (runs[-1][0], runs[-1][1] + size)
            else:
                runs.append((start, size))
        start += size
    tail = bucket.numel - bucket.partial_start
    if tail:  # always partial, and last
        if runs and sum(runs[-1]) == bucket.partial_start:
            runs[-1] = (runs[-1][0], runs[-1][1] + tail)
        else:
            runs.append((bucket.partial_start, tail))
    return runs
