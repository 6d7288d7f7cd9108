"""Where two ranks' dry runs part: found on a laptop instead of in a job that hangs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

from parallel3d.dryrun.consequence import Consequence, consequence_of
from parallel3d.dryrun.issued import Issued, differs_in, issued_by, shared_axes
from parallel3d.dryrun.result import DryRun
from parallel3d.errors import DryRunError

__all__ = ["Divergence", "compare"]

_WINDOW, _MOST_SWAPPED, _SHOWN = 400, 64, 3


@dataclass(frozen=True)
class Divergence:
    """The first difference between what two ranks communicate.

    Attributes:
        ranks: the two.
        position: among the collectives that are compared, from 0.
        first, second: what each rank issues there; None where its program has ended.
        before: the last call that both made, or None.
        kind: ``extra calls``, ``another order``, ``other bytes``, ``another dtype``, ``another group size``
            or ``other calls``.
        detail: how the two go on.
        consequence: ``hang``, ``silently wrong``, ``silently wrong, then hang`` or ``depends
            on other ranks``.
        why: how that comes about.
    """

    ranks: tuple[int, int]
    position: int
    first: Issued | None
    second: Issued | None
    before: Issued | None
    kind: str
    detail: str
    consequence: str
    why: str

    def __str__(self) -> str:
        a, b = self.ranks
        lines = [
            f"ranks {a} and {b} part at collective {self.position}: {self.kind}",
            f"  rank {a}: {self.first or 'nothing: its program has ended'}",
            f"  rank {b}: {self.second or 'nothing: its program has ended'}",
            f"  before it, both: {self.before or 'nothing'}",
            f"  {self.detail}",
            f"  consequence: {self.consequence}. {self.why}",
        ]
        return "\n".join(lines)


def compare(a: DryRun, b: DryRun) -> Divergence | None:
    """The first place where the two ranks don't communicate alike; None if there is none.

    Ranks of one program issue the same collectives in the same order: operation, axis, unit and size of the
    group are compared in one sequence over all axes. Bytes and dtype are compared on the groups that have
    both ranks in them, but for the operations that allow other bytes on each rank (all_to_all, gather,
    scatter, reduce). send and recv, which are two ranks' own matter, are left out.

    Raises:
        DryRunError: the runs are not of one world.
    """
    if (a.world_size, a.mesh) != (b.world_size, b.mesh):
        raise DryRunError(
            f"these are dry runs of different worlds: {a.world_size} ranks {a.mesh} and {b.world_size} ranks "
            f"{b.mesh}; record both with the same world_size and options"
        )
    shared = shared_axes(a, b)
    ours, theirs = issued_by(a), issued_by(b)
    position = _first_difference(ours, theirs, shared)
    if position is None:
        return None
    first = ours[position] if position < len(ours) else None
    second = theirs[position] if position < len(theirs) else None
    kind, detail = _how(a, b, ours[position:], theirs[position:], shared)
    found: Consequence = consequence_of(a, b, ours[position:], theirs[position:], shared)
    before = ours[position - 1] if position else None
    return Divergence(
        (a.rank, b.rank), position, first, second, before, kind, detail, found.name, found.why
    )


def _first_difference(
    ours: list[Issued], theirs: list[Issued], shared: frozenset[str]
) -> int | None:
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if differs_in(one, other, shared):
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _how(
    a: DryRun, b: DryRun, ours: list[Issued], theirs: list[Issued], shared: frozenset[str]
) -> tuple[str, str]:
    """(kind, detail) of two sequences that differ at once."""
    if ours and theirs:
        what = differs_in(ours[0], theirs[0], shared)
        if what in ("bytes", "dtype", "group size"):
            word = "other" if what == "bytes" else "another"
            return f"{word} {what}", _more_like_it(ours, theirs, shared, what)
        swapped = _swapped(ours, theirs)
        if swapped:
            mine, yours = _named(ours[:swapped]), _named(theirs[:swapped])
            return "another order", (
                f"the same {swapped} calls come in another order: on rank {a.rank} {mine}; on rank {b.rank} "
                f"{yours}; then both go on alike"
            )
    keys, others = [e.key for e in ours[:_WINDOW]], [e.key for e in theirs[:_WINDOW]]
    matcher = SequenceMatcher(None, keys, others, autojunk=False)
    tag, i1, i2, j1, j2 = matcher.get_opcodes()[0]
    if tag in ("delete", "insert"):
        rank, more = (a.rank, ours[i1:i2]) if tag == "delete" else (b.rank, theirs[j1:j2])
        at_end = len(more) == max(len(ours), len(theirs))
        after = "to its end" if at_end else "then both go on alike for a while"
        return "extra calls", f"rank {rank} issues {_count(more)} more, {after}: {_named(more)}"
    return "other calls", (
        f"rank {a.rank} goes on with {_named(ours[i1:i2])}; rank {b.rank} with {_named(theirs[j1:j2])}"
    )


def _more_like_it(
    ours: list[Issued], theirs: list[Issued], shared: frozenset[str], what: str
) -> str:
    found = [differs_in(x, y, shared) for x, y in zip(ours, theirs, strict=False)]
    units = {x.call.unit for x, w in zip(ours, found, strict=False) if w == what and x.call.unit}
    where = f", in {len(units)} units" if len(units) > 1 else ""
    return f"of the {len(found)} calls from there on, {found.count(what)} differ in {what}{where}"


def _swapped(ours: list[Issued], theirs: list[Issued]) -> int:
    """How many calls are the same on both in another order; 0 if they aren't the same."""
    balance: Counter[object] = Counter()
    for count, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if count > _MOST_SWAPPED:
            break
        balance[one.key] += 1
        balance[other.key] -= 1
        if not any(balance.values()):
            return count
    return 0


def _count(calls: list[Issued]) -> str:
    return f"{len(calls)} call" + ("s" if len(calls) != 1 else "")


def _named(calls: list[Issued]) -> str:
    left = len(calls) - _SHOWN
    named = ", ".join(each.short for each in calls[:_SHOWN]) or "nothing"
    return named + (f" and {left} more" if left > 0 else "")
