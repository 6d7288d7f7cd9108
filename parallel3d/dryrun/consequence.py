"""What happens on the machines when two ranks don't communicate alike."""

from __future__ import annotations

from typing import NamedTuple

from parallel3d.dryrun.issued import WORLD, Issued, differs_in
from parallel3d.dryrun.result import DryRun
from parallel3d.mesh.naming import name_ranks

__all__ = ["Consequence", "consequence_of"]


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
