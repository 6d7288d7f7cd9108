"""Fewer samples of memory, and fewer spans, that look the same."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.dryrun.result import MemorySample

__all__ = ["thinned"]


def thinned(samples: Sequence[MemorySample], most: int) -> list[MemorySample]:
    """At most about ``most`` of them, in order: of each stretch of equally many the highest and the lowest,
    so that no peak is lost; the first and the last."""
    if len(samples) <= most:
        return list(samples)
    stretch = -(-2 * len(samples) // most)
    kept = {0, len(samples) - 1}
    for start in range(0, len(samples), stretch):
        each = range(start, min(start + stretch, len(samples)))
        kept.add(max(each, key=lambda i: samples[i].total))
        kept.add(min(each, key=lambda i: samples[i].total))
    return [samples[i] for i in sorted(kept)]
