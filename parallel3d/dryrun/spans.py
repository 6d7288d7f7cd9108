"""Spans of a predicted timeline, and the streams they are on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parallel3d._recorder import Collective

__all__ = ["COMPUTE", "COPIES", "DATA_AXES", "STREAMS", "Span", "stream_of", "unit_of"]

COMPUTE = "compute"
COPIES = "copies"
STREAMS = (COMPUTE, "tp", COPIES, "gather", "reduce", "all-reduce")
"""In the order in which they are drawn; others follow."""

DATA_AXES = ("replicate", "shard", "dp_replicate", "dp_shard", "dp")
"""Axes over which the engine gathers parameters and reduces gradients."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs on a stream from ``start`` to ``end``, predicted seconds.

    Attributes:
        stream: ``compute``, ``copies`` (into what is sent), or the collectives' (``stream_of``).
        kind: the operation's; ``wait``: the computation stands still until a collective ends.
        name: of the operation; of a wait the collective's.
        module: in which it runs. unit: the engine's of a collective, else the block that the module is of.
        axis: of a collective or wait; ``""`` for none.
        operation: position among the run's. collective: position among its collectives, or None.
    """

    stream: str
    kind: str
    name: str
    module: str
    unit: str
    axis: str
    phase: str
    step: int
    start: float
    end: float
    operation: int
    collective: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def stream_of(call: Collective) -> str:
    """The engine's collectives have a stream for each operation, those of another axis one for the axis."""
    if call.axis is None:
        return "other"
    if call.axis not in DATA_AXES:
        return call.axis
    names = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all-reduce"}
    return names.get(call.op, "other")


@lru_cache(maxsize=65536)
def unit_of(module: str) -> str:
    """The repeated block that ``module`` is a part of, such as ``layers.3``; else its first name."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return parts[0]
