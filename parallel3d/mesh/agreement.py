"""Ranks compare what they are about to run before they run it, through the c10d store.

A difference that would end in a hang or in wrong numbers becomes one error, the same on every rank.
The store is a key-value server that exists before any process group: no collective is used.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import groupby, takewhile
from typing import TypeVar

from torch import distributed as dist

from parallel3d._torch.groups import group_timeout
from parallel3d.errors import AgreementError, PeerFailureError, StateError
from parallel3d.mesh.exchange import StoreExchange
from parallel3d.mesh.failures import FailedAlone, print_once
from parallel3d.mesh.store import Late, next_table, others, ranks_are_played

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for each other's report while there is no process group, whose timeout it else is."""

# How much longer than the first rank the others wait, so that they raise its verdict and not a timeout of
# their own; and how long it keeps a store that it may host alive for them to read the verdict.
_GRACE = timedelta(seconds=5)

_MOST_LINES = 16  # a model in another dtype differs in every parameter
_UNSET = "(not set)"

T = TypeVar("T", bound=Hashable)
RanksOf = Mapping[str, list[int]]  # value of a setting -> the ranks that have it
# One rank's settings; names where a difference is a warning.
_Report = tuple[dict[str, str], list[str]]
_Explain = Mapping[str, Callable[[RanksOf], str]]


def describe(differences: Mapping[str, RanksOf], world_size: int) -> str:
    """Returns the text of an error: which ranks differ from the majority, then a line for each setting with
    its values, the most common first. ``differences``: setting -> value -> ranks."""
    odd: set[int] = set()
    lines = []
    for name, ranks_of in differences.items():
        # Ties go to the value of the lowest rank: ranks_of is in the order of first appearance.
        values = sorted(ranks_of, key=lambda value: -len(ranks_of[value]))
        common, second = values[:2]
        if 2 * len(ranks_of[common]) > world_size:
            odd.update(rank for value in values[1:] for rank in ranks_of[value])
        parts = [
            f"{excerpt(value, second if value == common else common)} "
            f"on {name_ranks(ranks_of[value])}"
            for value in values[:4]
        ]
        if len(values) > 4:
            parts.append(f"{len(values) - 4} other values on the rest")
        lines.append(f"\n  {name}: {'; '.join(parts)}")
    head = "no value has a majority."
    if odd:
        head = f"{name_ranks(odd)} differ{'s' * (len(odd) == 1)} from the majority."
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"\n  and {len(lines) - _MOST_LINES} more"]
    return head + "".join(lines)


def excerpt(value: str, other: str, width: int = 160) -> str:
    """Returns ``value``, or ``width`` characters of it around the first difference from ``other``."""
    if len(value) <= width:
        return value
    pairs = zip(value, other, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    start = max(0, min(same - width // 4, len(value) - width))
    end = start + width
    return f"{'...' if start else ''}{value[start:end]}{'...' if end < len(value) else ''}"


def name_ranks(ranks: Iterable[int], most: int = 8) -> str:
    """Returns a text such as ``rank 3`` or ``ranks 0-4, 7``, with at most ``most`` ranges."""
    ordered = sorted(ranks)
    # In a run of consecutive ranks, rank minus index stays the same.
    groups = groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:most]]
    rest = sum(map(len, runs[most:]))
    more = f" and {rest} more" if rest else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}{more}"


def ranks_by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    """Returns {value: ranks that have it} from {rank: value}, in the order of first appearance."""
    found: dict[T, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def seconds(time: timedelta) -> str:
    """Returns ``time`` as a text such as ``0.5 s``."""
    return f"{time.total_seconds():g} s"


@dataclass(frozen=True)
class _Verdict:
    """The result of a comparison, by the first rank; texts are None if there is nothing to report."""

    error: str | None
    warning: str | None
    readers: int
    differs: bool = False  # whether the error is a difference, and all ranks have reported
    failed: Sequence[int] = ()  # ranks that have raised before they reported


def check_agreement(
    topic: str,
    value: Mapping[str, str],
    *,
    timeout: timedelta | None = None,
    warn_only: Collection[str] = (),
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    ranks: Sequence[int] | None = None,
    by_digest: bool = False,
    explain: _Explain | None = None,
) -> None:
    """Checks that every rank passes the same ``value``; every rank must call it.

    Each rank writes its value into the store, rank 0 compares all of them and writes a verdict,
    every rank reads the verdict. It returns when all have read it. Nothing happens with a world of
    one rank, a fake or emulated default process group or simulated ranks.

    Args:
        topic: what is compared, as it appears in errors: ``"mesh"``, ``"plan"``. Calls with one
            topic are matched in order; they may be repeated.
        value: named settings. A name that only some ranks have is a difference.
        timeout: how long rank 0 waits for the others, and the others for rank 0; by default the default
            process group's timeout. A rank that arrives long before rank 0 may wait twice this time. After
            30 s one of the waiting ranks prints which ranks are missing.
        warn_only: names whose difference is a warning, issued on rank 0, instead of an error.
        store: the store to use, with ``rank`` and ``world_size``; by default those of the default
            process group.
        ranks: the ranks that compare, by default all; the same list on each of them.
        by_digest: compare a digest of ``value`` first, and the settings themselves only if it differs.
        explain: name of a setting -> function from value -> ranks to the message for the case that this
            is the only difference; the default message if it returns ``""``.

    Raises:
        AgreementError: on every rank, naming the settings, their values and the odd ranks; or, on
            the ranks that did report, naming those that did not within ``timeout``.
        PeerFailureError: a rank that is waited for has failed alone, see ``mesh.failures``; within
            ``guards.watch``: any other rank has failed.
        StateError: there is no process group and no store with rank and world size.
    """
    if ranks_are_played():
        return
    if store is None:
        if not dist.is_initialized():
            raise StateError(
                "check_agreement needs the default process group, or a store with rank= and world_size=. "
                "Call build_mesh or torch.distributed.init_process_group first."
            )
        found = others()
        if found is None:
            return
        store, rank, world_size = found
        print_once()
    elif rank is not None and not dist.is_initialized():
        print_once(store, rank)
    if rank is None or world_size is None:
        raise StateError("check_agreement with a store needs rank= and world_size= as well.")
    members = range(world_size) if ranks is None else sorted(ranks)
    if len(members) == 1:
        return
    if timeout is None:
        timeout = group_timeout() if dist.is_initialized() else DEFAULT_TIMEOUT
    whole = store
    if len(members) < world_size:
        # Two sets of one size may begin with the same rank: the prefix names the whole set.
        digest = hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]
        store = dist.PrefixStore(f"ranks {members[0]} to {members[-1]}, {digest}", store)

    def compare(topic: str, report: _Report, explain: _Explain) -> _Verdict:
        table = next_table(store, f"agreement/{topic}", rank)
        reports = StoreExchange(table, rank, members, timeout, "report", topic, whole)
        return _ReportComparison(reports, explain).run(report)

    report = dict(value), sorted(warn_only)
    text = json.dumps(report, sort_keys=True)
    hashed = {"digest": hashlib.sha256(text.encode()).hexdigest()}
    try:
        verdict = compare(topic, (hashed, []) if by_digest else report, explain or {})
        if verdict.differs and by_digest:
            verdict = compare(f"{topic} in detail", report, explain or {})
            error = None if verdict.error is None else verdict.error.replace(" in detail", "", 1)
            verdict = replace(verdict, error=error)
    except dist.DistNetworkError as error:
        raise AgreementError(
            f"rank {rank} lost the store while the ranks compared {topic!r}: the process that "
            f"hosts it, usually rank 0 or its launcher, has ended. Look at its output first."
        ) from error
    if verdict.warning is not None and rank == members[0]:
        warnings.warn(verdict.warning, stacklevel=2)
    if verdict.failed:
        raise PeerFailureError(str(verdict.error), tuple(verdict.failed))
    if verdict.error is not None:
        raise AgreementError(verdict.error)


@dataclass(frozen=True)
class _ReportComparison:
    """One comparison of settings ("reports") between ranks through the store, as run on one of them."""

    reports: StoreExchange
    explain: _Explain

    def run(self, report: _Report) -> _Verdict:
        """Writes this rank's report; returns the verdict, which the first member makes of all reports."""
        reports = self.reports
        reports.put(report)
        if reports.rank == reports.members[0]:
            verdict = self._judge()
            reports.table.set("verdict", json.dumps(asdict(verdict)))
        else:
            verdict = self._await_verdict()
        self._leave(verdict.readers)
        return verdict

    def _judge(self) -> _Verdict:
        """On the first member: collects and compares the reports."""
        members, topic = self.reports.members, self.reports.topic
        try:
            reports = self.reports.collect()
        except FailedAlone as failed:
            readers = sum(map(self.reports.has, members))
            return _Verdict(str(failed), None, readers, failed=failed.error.ranks)
        error, warning = self._compare(reports)
        missing = sorted({*members} - {*reports})
        if not missing:
            return _Verdict(error, warning, len(reports), differs=error is not None)
        absent = (
            f"{name_ranks(missing)} of {len(members)} did not report {topic!r} within "
            f"{seconds(self.reports.timeout)}. They failed before this call, hang, or never make it: look at "
            "their output first. If they are only slow, give a longer timeout, here or to init_process_group."
        )
        error = absent if error is None else f"{absent}\nOf those that did report: {error}"
        return _Verdict(error, warning, len(reports))

    def _await_verdict(self) -> _Verdict:
        """On other members: waits for the first one's report, then, with a new timeout, for its verdict."""
        reports, first = self.reports, self.reports.members[0]
        # That the first is slow in its verdict is said by the first.
        verdict = replace(reports, timeout=reports.timeout + _GRACE, topic="")
        steps = (
            (reports, reports.key(first), "did not report"),
            (verdict, "verdict", "reported but gave no verdict on"),
        )
        for step, key, what in steps:
            try:
                step.wait({first: key})
            except Late as error:
                raise AgreementError(
                    f"rank {first} {what} {reports.topic!r} within {seconds(step.timeout)}, so rank "
                    f"{reports.rank} can't compare with the others. Rank {first} failed before this call, "
                    "hangs, or never makes it: look at its output first."
                ) from error
            except FailedAlone as failed:
                raise failed.error from None
        return _Verdict(**json.loads(reports.table.get("verdict")))

    def _leave(self, readers: int) -> None:
        """Deletes this comparison's keys. The first member, which may host the store and may raise next,
        first waits until all ``readers`` have read the verdict.

        If a rank was missing the keys stay, so that it can read the verdict when it arrives.
        """
        table, members = self.reports.table, self.reports.members
        own, is_first = self.reports.key(self.reports.rank), self.reports.rank == members[0]
        # The verdict is known: a store or a rank that has ended since doesn't change it.
        with suppress(RuntimeError):
            if not is_first:
                table.delete_key(own)
            if table.add("readers", 1) == readers:
                table.set("all read", "")
            if is_first:
                table.wait(["all read"], _GRACE)
                if readers == len(members):
                    for key in (own, "verdict", "readers", "all read"):
                        table.delete_key(key)

    def _compare(self, reports: Mapping[int, _Report]) -> tuple[str | None, str | None]:
        """Returns (error, warning) about the settings in which the reports differ."""
        tolerated = {name for _, warn_only in reports.values() for name in warn_only}
        errors: dict[str, RanksOf] = {}
        notices: dict[str, RanksOf] = {}
        # Names in the order of their first appearance.
        for name in dict.fromkeys(name for settings, _ in reports.values() for name in settings):
            ranks_of = ranks_by_value({r: s.get(name, _UNSET) for r, (s, _) in reports.items()})
            if len(ranks_of) > 1:
                (notices if name in tolerated else errors)[name] = ranks_of
        error = warning = None
        if errors:
            error = (
                f"The ranks disagree about {self.reports.topic!r}: {describe(errors, len(reports))}\n"
                f"Start every rank with the same program, arguments and libraries."
            )
            if len(errors) == 1 and (names := errors.keys() & self.explain.keys()):
                (name,) = names
                explained = self.explain[name](errors[name])
                error = f"{self.reports.topic}: {explained}." if explained else error
        if notices:
            warning = (
                f"The ranks differ in {self.reports.topic!r}, which may be intended: "
                f"{describe(notices, len(reports))}"
            )
        return error, warning
