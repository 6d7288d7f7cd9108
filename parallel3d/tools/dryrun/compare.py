"""Where two ranks' dry runs part: found on a laptop instead of in a job that hangs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

from parallel3d._util.recorder import Collective
from parallel3d.errors import DryRunError
from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.dryrun.result import DryRun

# A collective as a rank issues it, with where, in the form in which ranks are compared.

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


# What happens on the machines when two ranks don't communicate alike.


class Consequence(NamedTuple):
    """``name`` as in ``Divergence.consequence``; ``why``, in a sentence."""

    name: str
    why: str


def consequence_of(
    a: DryRun, b: DryRun, ours: list[Issued], theirs: list[Issued], shared: frozenset[str]
) -> Consequence:
    """Of the two sequences from the first difference on.

    On a group that has both ranks the n-th call of one meets the n-th call of the other, whatever they are
    for. A backend matches them by nothing else: another operation or number of bytes hangs (gloo: aborts),
    another unit or dtype is computed with.
    """
    each_group = [
        _on_one_group(group, a, b, ours, theirs, shared)
        for group in sorted(
            {each.group for each in (*ours, *theirs) if each.group in shared} - {None}
        )
    ]
    hangs = min((each.hangs for each in each_group if each.hangs), default=None)
    wrong = min((each.wrong for each in each_group if each.wrong), default=None)
    if hangs is not None:
        if wrong is not None and wrong.at < hangs.at:
            return Consequence("silently wrong, then hang", f"{wrong.why} Then: {hangs.why}")
        return Consequence("hang", hangs.why)
    if wrong is not None:
        return Consequence("silently wrong", wrong.why)
    mine, yours = ([x.key for x in each if x.group in shared] for each in (ours, theirs))
    if mine != yours:
        return Consequence(
            "hang",
            f"On each group of both ranks the calls match, but rank {a.rank} waits on one group for rank "
            f"{b.rank}, which waits on another.",
        )
    return Consequence("depends on other ranks", _apart(a, b, shared))


class _Event(NamedTuple):
    """Something at the ``at``-th call of a rank."""

    at: int
    why: str


class _Outcome(NamedTuple):
    """Of the calls on one group: what is wrong first, and where it hangs."""

    wrong: _Event | None
    hangs: _Event | None


def _on_one_group(
    group: str,
    a: DryRun,
    b: DryRun,
    ours: list[Issued],
    theirs: list[Issued],
    shared: frozenset[str],
) -> _Outcome:
    mine = [(at, each) for at, each in enumerate(ours) if each.group == group]
    yours = [(at, each) for at, each in enumerate(theirs) if each.group == group]
    wrong: _Event | None = None
    for (at, one), (_, other) in zip(mine, yours, strict=False):
        what = _mismatch(one, other, shared)
        where = f"Rank {a.rank}'s {one.short} meets rank {b.rank}'s {other.short}"
        if what == "hang":
            return _Outcome(wrong, _Event(at, f"{where} (gloo aborts, NCCL hangs or goes on)."))
        if what and wrong is None:
            wrong = _Event(at, f"{where}: both return, with each other's {what}.")
    if len(mine) == len(yours):
        return _Outcome(wrong, None)
    more, less = (a, b) if len(mine) > len(yours) else (b, a)
    left = max(mine, yours, key=len)[min(len(mine), len(yours)) :]
    count = f"{len(left)} more calls" if len(left) > 1 else "one more call"
    return _Outcome(
        wrong,
        _Event(
            left[0][0],
            f"Rank {more.rank} makes {count}, and waits in {left[0][1].short} for rank {less.rank}, "
            "which does not come.",
        ),
    )


def _mismatch(one: Issued, other: Issued, shared: frozenset[str]) -> str:
    if one.call.op != other.call.op or one.call.group_size != other.call.group_size:
        return "hang"
    what = differs_in(one, other, shared)
    if one.call.bytes != other.call.bytes and what:
        return "hang"
    return {"dtype": "bits", "call": "data"}.get(what, "")


def _apart(a: DryRun, b: DryRun, shared: frozenset[str]) -> str:
    apart = [axis for axis in a.axis_ranks if axis not in shared]
    if not apart:
        return "They differ only in groups that are not known here."
    groups = " and ".join(
        f"{name_ranks(a.axis_ranks[x])} and {name_ranks(b.axis_ranks.get(x, ()))} on {x}"
        for x in apart
    )
    joined = ", ".join(axis or "all ranks" for axis in sorted(shared - {WORLD})) or "no axis"
    return (
        f"They are of one group on {joined}, where all matches, and of different groups elsewhere "
        f"({groups}): that goes well if all ranks of a group part alike, and may hang if not. Compare "
        "ranks of one group."
    )


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
