"""A collective as a rank issues it, with where, in the form in which ranks are compared."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d._recorder import Collective
from parallel3d.dryrun.result import DryRun

__all__ = ["Issued", "differs_in", "issued_by", "shared_axes"]

WORLD = ""  # the axis of a group of no axis that has all ranks
_UNEVEN = ("all_to_all", "gather", "scatter", "reduce")
_MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Issued:
    """A collective of one rank.

    Attributes:
        module, phase, step: where it is issued. dtype: of what it brings, "" if not known.
        world: whether its group is all ranks, and no axis.
    """

    call: Collective
    module: str
    phase: str
    step: int
    dtype: str
    world: bool

    @property
    def key(self) -> tuple[str, str | None, str]:
        """What is the same on every rank of a program."""
        return self.call.op, self.call.axis, self.call.unit

    @property
    def group(self) -> str | None:
        """The axis, ``WORLD``, or None for a group that isn't known."""
        return WORLD if self.world else self.call.axis

    @property
    def short(self) -> str:
        """In a few words."""
        call = self.call
        axis = f" on {call.axis}" if call.axis else ""
        of = call.unit or self.module
        where = f" for {of}" if of else ""
        return f"{call.op}{axis}{where} ({call.bytes:,} bytes, {self.phase})"

    def __str__(self) -> str:
        call = self.call
        axis = f" on {call.axis}" if call.axis else f" of {call.group_size} ranks of no axis"
        unit = f" for unit {call.unit}" if call.unit else ""
        module = f" in module {self.module}" if self.module and self.module != call.unit else ""
        dtype = f" of {self.dtype}" if self.dtype else ""
        return f"{call.op}{axis}{unit}{module}, {call.bytes:,} bytes{dtype} (step {self.step}, {self.phase})"


def issued_by(run: DryRun) -> list[Issued]:
    """What ``run`` communicates, in order, without send and recv."""
    return [
        Issued(
            call := run.collectives[operation.collective],
            operation.module,
            operation.phase,
            operation.step,
            operation.dtype,
            call.axis is None and call.group_size == run.world_size,
        )
        for operation in run.operations
        if operation.kind == "collective"
        and operation.collective is not None
        and run.collectives[operation.collective].op not in _MESSAGES
    ]


def shared_axes(a: DryRun, b: DryRun) -> frozenset[str]:
    """The axes on which both ranks are of one group, and ``WORLD``."""
    both = a.axis_ranks.keys() & b.axis_ranks.keys()
    return frozenset({WORLD, *(x for x in both if a.axis_ranks[x] == b.axis_ranks[x])})


def differs_in(one: Issued, other: Issued, shared: frozenset[str]) -> str:
    """``call``, ``group size``, ``dtype`` or ``bytes``; ``""`` if they may be the same collective."""
    if one.key != other.key:
        return "call"
    if one.call.group_size != other.call.group_size:
        return "group size"
    if one.group not in shared:
        return ""
    if one.dtype and other.dtype and one.dtype != other.dtype:
        return "dtype"
    if one.call.bytes != other.call.bytes and one.call.op not in _UNEVEN:
        return "bytes"
    return ""
