"""Traffic: what a module communicates over ``tp`` for each token, for the report."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Traffic", "entered", "summed"]


@dataclass(frozen=True)
class Traffic:
    """One collective of a module's forward or backward.

    Attributes:
        op: ``"all-reduce"``, ``"all-gather"`` or ``"reduce-scatter"``; or ``"torch's own"``, whatever its
            DTensors do.
        phase: when it runs.
        elements: of the whole tensor for each token: what is reduced, or what is gathered. ``None``: only
            the input shows it.
    """

    op: Literal["all-reduce", "all-gather", "reduce-scatter", "torch's own"]
    phase: Literal["forward", "backward"]
    elements: int | None


def entered(layout: str, elements: int | None) -> tuple[Traffic, ...]:
    """Taking an input that column-parallel modules read, which is whole, or a part of the sequence."""
    if layout == "replicate":
        return (Traffic("all-reduce", "backward", elements),)
    if layout == "sequence":
        return (
            Traffic("all-gather", "forward", elements),
            Traffic("reduce-scatter", "backward", elements),
        )
    return ()


def summed(layout: str, elements: int | None) -> tuple[Traffic, ...]:
    """Summing the ranks' parts into the whole, or into parts of the sequence."""
    if layout == "replicate":
        return (Traffic("all-reduce", "forward", elements),)
    return (
        Traffic("reduce-scatter", "forward", elements),
        Traffic("all-gather", "backward", elements),
    )
