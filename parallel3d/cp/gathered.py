"""All-gather of K and V: each rank computes its own queries with all keys."""

from __future__ import annotations

from torch import Tensor

from parallel3d.cp.axis import CpAxis
from parallel3d.cp.collectives import gather_positions
from parallel3d.cp.local import attend
from parallel3d.cp.rules import Rules
from parallel3d.cp.sequence import Sequence


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rules: Rules,
    sequence: Sequence,
    axis: CpAxis,
) -> Tensor:
    """Returns this rank's positions of the attention; arguments as ``attention`` has them.

    K and V are gathered in one call; their gradients are reduce-scattered in one. Under a causal mask each of
    this rank's parts is computed with the keys up to it and no others.
    """
    k, v = gather_positions((k, v), sequence, axis)
    return attend(q, k, v, sinks, rules, sequence, axis)
