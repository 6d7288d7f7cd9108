"""How the components of memory and time are put together where a person looks at them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parallel3d.planner.mesh_plan import Refused
from parallel3d.planner.prediction import Prediction
from parallel3d.planner.terms import Term

__all__ = [
    "MEMORY",
    "TIME",
    "Reason",
    "grouped",
    "memory_groups",
    "reasons",
    "setting",
    "short",
    "time_groups",
]

# group -> beginnings of the components' names; what no group has goes into "other"
MEMORY = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "unsharded, buffers": ("unsharded", "gather and reduce"),
    "activations": ("activations",),
    "logits, loss": ("logits",),
    "framework": ("gaps", "workspace", "context"),
}
TIME = {
    "matmul": ("matmul",),
    "attention": ("attention",),
    "elementwise": ("elementwise",),
    "recompute": ("recompute",),
    "tensor parallel": ("tensor parallel",),
    "exposed gather, reduce": ("exposed gather", "exposed reduce"),
    "exposed all-reduce": ("exposed all_reduce",),
    "stragglers": ("stragglers",),
    "slowdown": ("slowdown",),
    "copies, launch": ("copies", "launch", "accumulate"),
    "optimizer": ("optimizer",),
}


def grouped(terms: Mapping[str, Term], groups: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """The terms' values added up by group, in the groups' order; "other" last, if there are any."""
    found = dict.fromkeys(groups, 0.0)
    for name, term in terms.items():
        group = next((g for g, begin in groups.items() if name.startswith(begin)), "other")
        found[group] = found.get(group, 0.0) + term.value
    return found


def memory_groups(prediction: Prediction) -> dict[str, float]:
    """Bytes; they add up to ``memory.needed``."""
    memory = prediction.memory
    return grouped({**memory.terms, **{term.name: term for term in memory.beyond}}, MEMORY)


def time_groups(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step; they add up to ``step_seconds``."""
    return grouped(prediction.time.terms, TIME)


def short(prediction: Prediction) -> str:
    """The layout's sizes, "4 x 8 x 8": replicate, shard, tp."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, prediction.layout.sizes))


def setting(prediction: Prediction) -> str:
    """Checkpointing, and whether parameters are kept between forward and backward."""
    kind = prediction.workload.checkpointing.replace("_", " ")
    keeps = not prediction.workload.reshard_after_forward and prediction.layout.shard > 1
    return f"{kind}, keep" if keeps else kind


@dataclass(frozen=True)
class Reason:
    """Refusals that differ in numbers only.

    Attributes:
        text: of the first; ``count``: how many; ``examples``: the first few layouts' sizes.
    """

    text: str
    count: int
    examples: str


def reasons(refused: Iterable[Refused], most: int = 3) -> list[Reason]:
    """The refusals by reason, the most frequent first."""
    kinds: dict[str, list[Refused]] = {}
    for each in refused:
        kinds.setdefault(re.sub(r"[\d.]+", "N", _kind(each)), []).append(each)
    found = []
    for same in sorted(kinds.values(), key=len, reverse=True):
        near = sorted(same, key=lambda r: r.prediction.memory.needed if r.prediction else 0.0)
        names = ["\N{MULTIPLICATION SIGN}".join(map(str, r.layout.sizes)) for r in near]
        text = ", ".join(names[:most]) + (" \N{HORIZONTAL ELLIPSIS}" if len(names) > most else "")
        found.append(Reason(near[0].reason, len(same), text))
    return found


def _kind(each: Refused) -> str:
    return "memory" if each.prediction is not None else each.reason
