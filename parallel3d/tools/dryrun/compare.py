"""Compares the collectives of two ranks' dry runs, to find on a laptop what would hang a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from parallel3d._util.recorder import Collective
from parallel3d.errors import DryRunError
from parallel3d.mesh.agreement import name_ranks
from parallel3d.tools.dryrun.result import DryRun
from parallel3d.tools.dryrun.wording import counted, first_few

_WORLD = ""  # the axis of a group of all ranks that is no axis's
_UNEVEN = ("all_to_all", "gather", "scatter", "reduce")
_WINDOW, _MOST_SWAPPED = 400, 64


@dataclass(frozen=True)
class Issued:
    """A collective that one rank issues.

    Attributes:
        module, phase, step: where the program issues it.
        dtype: dtype of its input; "" if not known.
        group: its mesh axis; "" for a group of all ranks; None for another group.
    """

    call: Collective
    module: str
    phase: str
    step: int
    dtype: str
    group: str | None

    @property
    def key(self) -> tuple[str, str | None, str]:
        """(operation, axis, unit), which is equal on every rank of a correct program."""
        return self.call.op, self.call.axis, self.call.unit

    @property
    def short(self) -> str:
        """Its text for messages, such as "all_gather on shard for layers.0 (1,024 bytes, forward)"."""
        call = self.call
        axis = f" on {call.axis}" if call.axis else ""
        unit = call.unit or self.module
        where = f" for {unit}" if unit else ""
        return f"{call.op}{axis}{where} ({call.bytes:,} bytes, {self.phase})"

    def __str__(self) -> str:
        call = self.call
        axis = f" on {call.axis}" if call.axis else f" of {call.group_size} ranks of no axis"
        unit = f" for unit {call.unit}" if call.unit else ""
        module = f" in module {self.module}" if self.module and self.module != call.unit else ""
        dtype = f" of {self.dtype}" if self.dtype else ""
        return f"{call.op}{axis}{unit}{module}, {call.bytes:,} bytes{dtype} (step {self.step}, {self.phase})"


def _issued_by(run: DryRun) -> list[Issued]:
    """Returns the collectives of ``run`` in order, without send and recv."""
    found = []
    for each in run.operations:
        if each.kind == "collective" and each.collective is not None:
            call = run.collectives[each.collective]
            is_world = call.axis is None and call.group_size == run.world_size
            group = _WORLD if is_world else call.axis
            found.append(Issued(call, each.module, each.phase, each.step, each.dtype, group))
    return [issued for issued in found if issued.call.op not in ("send", "recv")]


@dataclass(frozen=True)
class Divergence:
    """The first difference between the collectives of two ranks.

    Attributes:
        ranks: the two ranks.
        position: index of the difference among the compared collectives.
        first, second: what the two ranks issue there; None if the rank issues nothing more.
        before: the last collective that both ranks issue alike, or None.
        kind: ``extra calls``, ``another order``, ``other bytes``, ``another dtype``, ``another group size``
            or ``other calls``.
        detail: a sentence on how the two sequences go on.
        consequence: ``hang``, ``silently wrong``, ``silently wrong, then hang`` or ``depends on other
            ranks``.
        why: a sentence on how that happens.
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
            f"ranks {a} and {b} diverge at collective {self.position}: {self.kind}",
            f"  rank {a}: {self.first or 'nothing: its program has ended'}",
            f"  rank {b}: {self.second or 'nothing: its program has ended'}",
            f"  before it, both: {self.before or 'nothing'}",
            f"  {self.detail}",
            f"  consequence: {self.consequence}. {self.why}",
        ]
        return "\n".join(lines)


def compare(a: DryRun, b: DryRun) -> Divergence | None:
    """Returns the first place where the two ranks communicate differently; None if there is none.

    Ranks of one program issue the same collectives in the same order: operation, axis, unit and group size
    are compared in one sequence over all axes. Bytes and dtype are compared on groups that contain both
    ranks, except for operations that allow other bytes on each rank (all_to_all, gather, scatter, reduce).
    send and recv concern only two ranks and are left out.

    Args:
        a, b: dry runs of two ranks of one world.

    Raises:
        DryRunError: the runs are not of the same world.
    """
    if (a.world_size, a.mesh) != (b.world_size, b.mesh):
        raise DryRunError(
            f"these are dry runs of different worlds: {a.world_size} ranks {a.mesh} and {b.world_size} ranks "
            f"{b.mesh}; record both with the same world_size and options"
        )
    found = _Comparison(a, b)
    if not (found.ours or found.theirs):
        return None
    first, second = (calls[0] if calls else None for calls in (found.ours, found.theirs))
    where = found.position, first, second, found.before
    return Divergence((a.rank, b.rank), *where, *found.how(), *found.consequence())


class _Comparison:
    """The collectives of two ranks, ``a`` and ``b``, from their first difference on.

    Attributes:
        shared: the axes on which both ranks are in the same group, and the group of all ranks.
        position: index of the first difference.
        ours, theirs: what ``a`` and ``b`` issue from there on.
    """

    def __init__(self, a: DryRun, b: DryRun) -> None:
        self.a, self.b = a, b
        self.shared = {_WORLD, *(x for x, r in a.axis_ranks.items() if r == b.axis_ranks.get(x))}
        ours, theirs = _issued_by(a), _issued_by(b)
        pairs = enumerate(zip(ours, theirs, strict=False))
        ends = min(len(ours), len(theirs))
        self.position = next((i for i, pair in pairs if self.difference(*pair)), ends)
        self.before = ours[self.position - 1] if self.position else None
        self.ours, self.theirs = ours[self.position :], theirs[self.position :]

    def difference(self, one: Issued, other: Issued) -> str:
        """Returns what differs: "call", "group size", "dtype" or "bytes"; "" if nothing does."""
        if one.key != other.key:
            return "call"
        if one.call.group_size != other.call.group_size:
            return "group size"
        if one.group not in self.shared:
            return ""
        if one.dtype and other.dtype and one.dtype != other.dtype:
            return "dtype"
        if one.call.bytes != other.call.bytes and one.call.op not in _UNEVEN:
            return "bytes"
        return ""

    # How the two sequences differ.

    def how(self) -> tuple[str, str]:
        """Returns ``Divergence``'s ``kind`` and ``detail``."""
        a, b, ours, theirs = self.a.rank, self.b.rank, self.ours, self.theirs
        if ours and theirs:
            what = self.difference(ours[0], theirs[0])
            if what != "call":
                pairs = list(zip(ours, theirs, strict=False))
                similar = [one for one, other in pairs if self.difference(one, other) == what]
                units = {issued.call.unit for issued in similar} - {""}
                where = f", in {len(units)} units" if len(units) > 1 else ""
                return f"{'other' if what == 'bytes' else 'another'} {what}", (
                    f"of the {len(pairs)} calls from there on, {len(similar)} differ in {what}{where}"
                )
            if swapped := self._swapped():
                return "another order", (
                    f"the same {swapped} calls come in another order: on rank {a} "
                    f"{_named(ours[:swapped])}; on rank {b} {_named(theirs[:swapped])}; then both continue "
                    "alike"
                )
        keys, others = ([issued.key for issued in calls[:_WINDOW]] for calls in (ours, theirs))
        matcher = SequenceMatcher(None, keys, others, autojunk=False)
        tag, i1, i2, j1, j2 = matcher.get_opcodes()[0]
        if tag in ("delete", "insert"):
            rank, more = (a, ours[i1:i2]) if tag == "delete" else (b, theirs[j1:j2])
            to_end = len(more) == max(len(ours), len(theirs))
            after = "to its end" if to_end else "then both continue alike for a while"
            count = counted(len(more), "call")
            return "extra calls", f"rank {rank} issues {count} more, {after}: {_named(more)}"
        second = f"rank {b} with {_named(theirs[j1:j2])}"
        return "other calls", f"rank {a} continues with {_named(ours[i1:i2])}; {second}"

    def _swapped(self) -> int:
        """Returns after how many calls both ranks have made the same in another order; 0: never."""
        both = (self.ours[:_MOST_SWAPPED], self.theirs[:_MOST_SWAPPED])
        keys, others = ([issued.key for issued in calls] for calls in both)
        counts = range(1, min(len(keys), len(others)) + 1)
        return next((n for n in counts if Counter(keys[:n]) == Counter(others[:n])), 0)

    # What happens on the machines.

    def consequence(self) -> tuple[str, str]:
        """Returns ``Divergence``'s ``consequence`` and ``why``.

        On a group that contains both ranks a backend matches the n-th call of one with the n-th of the other,
        whatever they are: another operation or number of bytes hangs (gloo: aborts), and the data of another
        unit or dtype is used as if it were right.
        """
        a, b = self.a.rank, self.b.rank
        groups = self.shared & {issued.group for issued in (*self.ours, *self.theirs)}
        found = [each for group in sorted(groups) for each in self._on_group(group)]
        wrong, hang = (
            min(((at, why) for end, at, why in found if end == kind), default=None)
            for kind in ("wrong", "hang")
        )
        if hang and wrong and wrong[0] < hang[0]:
            return "silently wrong, then hang", f"{wrong[1]} Then: {hang[1]}"
        if hang:
            return "hang", hang[1]
        if wrong:
            return "silently wrong", wrong[1]
        both = (self.ours, self.theirs)
        mine, yours = ([issued.key for issued in calls if issued.group in groups] for calls in both)
        if mine != yours:
            return "hang", (
                f"On each group of both ranks the calls match, but rank {a} waits on one group for rank "
                f"{b}, which waits on another."
            )
        return "depends on other ranks", self._elsewhere()

    def _on_group(self, group: str) -> Iterator[tuple[str, int, str]]:
        """Yields ("wrong" or "hang", index of the call, why) for the differing calls on ``group``, until one
        hangs."""
        a, b = self.a.rank, self.b.rank
        mine, yours = (
            [(at, issued) for at, issued in enumerate(calls) if issued.group == group]
            for calls in (self.ours, self.theirs)
        )
        for (at, one), (_, other) in zip(mine, yours, strict=False):
            what = self.difference(one, other)
            where = f"Rank {a}'s {one.short} meets rank {b}'s {other.short}"
            kinds = [(each.call.op, each.call.group_size) for each in (one, other)]
            if kinds[0] != kinds[1] or (what and one.call.bytes != other.call.bytes):
                yield "hang", at, f"{where} (gloo aborts, NCCL hangs or continues)."
                return
            if wrong := {"dtype": "bits", "call": "data"}.get(what):
                yield "wrong", at, f"{where}: both return, with each other's {wrong}."
        more, less = (a, b) if len(mine) > len(yours) else (b, a)
        if left := max(mine, yours, key=len)[min(len(mine), len(yours)) :]:
            at, issued = left[0]
            count = f"{len(left)} more calls" if len(left) > 1 else "one more call"
            waits = f"waits in {issued.short} for rank {less}, which does not come."
            yield "hang", at, f"Rank {more} makes {count}, and {waits}"

    def _elsewhere(self) -> str:
        own, others = self.a.axis_ranks, self.b.axis_ranks
        apart = [axis for axis in own if axis not in self.shared]
        if not apart:
            return "They differ only in groups that are not known here."
        groups = " and ".join(
            f"{name_ranks(own[x])} and {name_ranks(others.get(x, ()))} on {x}" for x in apart
        )
        joined = ", ".join(sorted(self.shared - {_WORLD})) or "no axis"
        return (
            f"They are in one group on {joined}, where all calls match, and in different groups elsewhere "
            f"({groups}): that is correct if all ranks of a group diverge alike, and may hang otherwise. "
            "Compare ranks of one group."
        )


def _named(calls: list[Issued]) -> str:
    return first_few([issued.short for issued in calls]) or "nothing"
