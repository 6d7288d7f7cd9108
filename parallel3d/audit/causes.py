"""The likely cause of a difference: a table, the first row that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parallel3d.audit.findings import Finding, named


def cause_of(
    found: Finding, ranks: tuple[int, ...], sizes: Mapping[str, int], state: Any
) -> Finding:
    """Returns ``found`` with its ranks and its likely cause.

    Args:
        state: what the modules of a context-parallel model share; None: it is none.
    """
    cp = sizes.get("cp", 1) > 1 and state is not None
    factor = found.gap.factor
    axis = "" if factor is None else named(factor, sizes)
    what = found.what
    scalar = not found.gap.place
    cause = ""
    if what.startswith("gradient of ") and axis:
        cause = f"a sum over {axis.removeprefix(' = ').removeprefix('1 / ')} that is missing or made twice"
    elif "position" in what:
        cause = "positions of this rank's part, where those of the whole sequence are needed"
    elif what.startswith("output") and scalar and cp:
        cause = (
            "a mean over this rank's part, of which ranks have other numbers of tokens; use "
            "p3d.optim.global_mean, or num_items_in_batch"
        )
    elif what.startswith("output") and cp and _skipped(found.unit, state):
        cause = (
            "the attention that was made parallel was not called: another kernel ran, which attends to this "
            "rank's part alone; call F.scaled_dot_product_attention for real tensors too"
        )
    elif cp and not what.startswith("gradient"):
        cause = (
            "positions are mixed by something else than attention, or it depends on the length or on the "
            "positions of this rank's part; compute it of what p3d.cp.positions gives, or before shard_batch"
        )
    elif cp:
        cause = "something outside attention mixes positions in the backward"
    elif what.startswith("output"):
        cause = (
            "the plan: a layer whose style does not fit what is computed around it, or other weights "
            "than the plain model's"
        )
    elif what.startswith("gradient"):
        cause = "a gradient that is partial over an axis and was not summed, or was summed twice"
    return replace(found, ranks=ranks, cause=cause)


def _skipped(unit: str, state: Any) -> bool:
    """Whether attention in ``unit`` was planned, and none of it was called."""
    prefix = f"{unit}." if unit else ""
    inside = [path for path in state.planned if path == unit or path.startswith(prefix)]
    return bool(inside) and not any(path in state.attended for path in inside)
