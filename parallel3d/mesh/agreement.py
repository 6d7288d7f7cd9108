"""Ranks compare what they are about to run before they run it, through the c10d store.

A difference that would end in a hang or in wrong numbers becomes one error, the same on every rank.
The store is a key-value server that exists before any process group: no collective is used.
"""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from torch import distributed as dist

from parallel3d.errors import AgreementError, PeerFailureError, StateError
from parallel3d.mesh.store import next_table, others, ranks_are_played, wait_for

# Differences between ranks, and ranks themselves, in words.

_MOST_LINES = 16  # a model in another dtype differs in every parameter


def describe(differences: Mapping[str, Mapping[str, list[int]]], world_size: int) -> str:
    """The odd ranks, then each setting on a line with its values, the commonest first."""
    odd: set[int] = set()
    lines = []
    for name, ranks_of in differences.items():
        # Ties go to the value of the lowest rank: ranks_of is in the order of first appearance.
        ordered = Counter({value: len(ranks) for value, ranks in ranks_of.items()}).most_common()
        common, count = ordered[0]
        if 2 * count > world_size:
            odd.update(rank for v, ranks in ranks_of.items() if v != common for rank in ranks)
        parts = [
            f"{excerpt(value, ordered[1][0] if value == common else common)} "
            f"on {name_ranks(ranks_of[value])}"
            for value, _ in ordered[:4]
        ]
        if len(ordered) > 4:
            parts.append(f"{len(ordered) - 4} other values on the rest")
        lines.append(f"\n  {name}: {'; '.join(parts)}")
    if not odd:
        head = "no value has a majority."
    elif len(odd) == 1:
        head = f"{name_ranks(odd)} differs from the majority."
    else:
        head = f"{name_ranks(odd)} differ from the majority."
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"\n  and {len(lines) - _MOST_LINES} more"]
    return head + "".join(lines)


def excerpt(value: str, other: str, width: int = 160) -> str:
    """``value``, or of a long one the part where it first differs from ``other``."""
    if len(value) <= width:
        return value
    same = next(
        (i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b),
        min(len(value), len(other)),
    )
    start = max(0, min(same - width // 4, len(value) - width))
    end = start + width
    return f"{'...' if start else ''}{value[start:end]}{'...' if end < len(value) else ''}"


def name_ranks(ranks: Iterable[int], most: int = 8) -> str:
    """``rank 3`` or ``ranks 0-4, 7``; of many ranges the first ones."""
    ordered = sorted(ranks)
    ranges: list[tuple[int, int]] = []
    for rank in ordered:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    rest = sum(last - first + 1 for first, last in ranges[most:])
    more = f" and {rest} more" if rest else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}{more}"


def seconds(time: timedelta) -> str:
    return f"{time.total_seconds():g} s"


DEFAULT_TIMEOUT = timedelta(seconds=30)
"""How long ranks wait for each other's report, unless told otherwise."""

# How much longer than rank 0 the others wait, so that its verdict, not their own timeout, is what
# they raise; and how long rank 0 keeps a store it may host alive for them to read the verdict.
_GRACE = timedelta(seconds=5)

_UNSET = "(not set)"

_Explain = Mapping[str, Callable[[Mapping[str, list[int]]], str]]


@dataclass(frozen=True)
class _Report:
    """What one rank says about a topic."""

    value: dict[str, str]
    warn_only: list[str]


@dataclass(frozen=True)
class _Verdict:
    """What rank 0 concludes; the texts are ``None`` where all is well."""

    error: str | None
    warning: str | None
    readers: int
    differs: bool = False  # that, and nothing else, is the error


def check_agreement(
    topic: str,
    value: Mapping[str, str],
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    warn_only: Collection[str] = (),
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    ranks: Sequence[int] | None = None,
    details: Callable[[], Mapping[str, str]] | None = None,
    explain: _Explain | None = None,
) -> None:
    """Checks that every rank passes the same ``value``; every rank must call it.

    Each rank writes its value into the store, rank 0 compares all of them and writes a verdict,
    every rank reads the verdict. It returns when all have read it. Nothing happens with a world of
    one rank, a fake or emulated default process group or simulated ranks: there is nobody to
    disagree with.

    Args:
        topic: what is compared, as it appears in errors: ``"mesh"``, ``"plan"``. Calls with one
            topic are matched in order; they may be repeated.
        value: named settings. A name that only some ranks have is a difference.
        timeout: how long rank 0 waits for the others, and the others for rank 0. A rank that
            arrives long before rank 0 may so wait twice this time.
        warn_only: names whose difference is a warning, issued on rank 0, instead of an error.
        store: the store to use, with ``rank`` and ``world_size``; by default those of the default
            process group.
        ranks: the ranks that compare, where they are not all; the same list on each of them.
        details: what is behind ``value``, if that is a digest of it: asked for, and compared, only where
            the digests differ.
        explain: name of a setting -> what to say, given value -> ranks, where it is the only one that
            differs; ``""`` is what is said of any other.

    Raises:
        AgreementError: on every rank, naming the settings, their values and the odd ranks; or, on
            the ranks that did report, naming those that did not within ``timeout``.
        PeerFailureError: within ``guards.watch``: another rank has failed meanwhile.
        StateError: there is no process group and no store with rank and world size.
    """
    if store is None:
        if ranks_are_played():
            return
        if not dist.is_initialized():
            raise StateError(
                "check_agreement needs the default process group, or a store with rank= and "
                "world_size=. Call build_mesh or torch.distributed.init_process_group first."
            )
        found = others()
        if found is None:
            return
        store, rank, world_size = found
    elif ranks_are_played():
        return
    if rank is None or world_size is None:
        raise StateError("check_agreement with a store needs rank= and world_size= as well.")
    members = range(world_size) if ranks is None else sorted(ranks)
    if len(members) == 1:
        return
    if len(members) < world_size:
        store = dist.PrefixStore(_name_members(members), store)

    try:
        report = _Report(dict(value), sorted(warn_only))
        verdict = _exchange(store, topic, report, timeout, rank, members, explain or {})
        if verdict.differs and details is not None:
            report = _Report(dict(details()), [])
            found_more = _exchange(store, f"{topic} in detail", report, timeout, rank, members, {})
            if found_more.error is not None:
                verdict = replace(found_more, error=found_more.error.replace(" in detail", "", 1))
    except dist.DistNetworkError as error:
        raise AgreementError(
            f"rank {rank} lost the store while the ranks compared {topic!r}: the process that "
            f"hosts it, usually rank 0 or its launcher, has ended. Look at its output first."
        ) from error
    if verdict.warning is not None and rank == members[0]:
        warnings.warn(verdict.warning, stacklevel=2)
    if verdict.error is not None:
        raise AgreementError(verdict.error)


def _exchange(
    store: dist.Store,
    topic: str,
    report: _Report,
    timeout: timedelta,
    rank: int,
    members: Sequence[int],
    explain: _Explain,
) -> _Verdict:
    """Hands in this rank's report and returns the first member's verdict on all of them."""
    table = next_table(store, f"agreement/{topic}", rank)
    table.set(_report_key(rank), json.dumps(asdict(report)))
    if rank == members[0]:
        verdict = _judge(table, topic, members, timeout, explain)
        table.set("verdict", json.dumps(asdict(verdict)))
    else:
        verdict = _await_verdict(table, topic, rank, members[0], timeout)
    _leave(table, rank, members, verdict.readers)
    return verdict


def _name_members(members: Sequence[int]) -> str:
    """Another one for each set of ranks: two of one size may begin with the same rank."""
    digest = hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]
    return f"ranks {members[0]} to {members[-1]}, {digest}"


def _report_key(rank: int) -> str:
    return f"report/{rank}"


def _judge(
    table: dist.Store, topic: str, ranks: Sequence[int], timeout: timedelta, explain: _Explain
) -> _Verdict:
    """The first member's part: collects the reports and compares them."""
    missing: list[int] = []
    try:
        wait_for(table, [_report_key(rank) for rank in ranks], timeout)
    except PeerFailureError:
        raise
    except RuntimeError:  # the stores share no narrower type for a timeout
        missing = [rank for rank in ranks if not table.check([_report_key(rank)])]
    reports = {
        rank: _Report(**json.loads(table.get(_report_key(rank))))
        for rank in ranks
        if rank not in set(missing)
    }
    error, warning = _compare(topic, reports, explain)
    if missing:
        absent = (
            f"{name_ranks(missing)} of {len(ranks)} did not report {topic!r} within "
            f"{seconds(timeout)}. They failed before this call, hang, or never make it: "
            f"look at their output first. If they are only slow to start, give a longer timeout."
        )
        error = absent if error is None else f"{absent}\nOf those that did report: {error}"
    differs = error is not None and not missing
    return _Verdict(error, warning, readers=len(reports), differs=differs)


def _await_verdict(
    table: dist.Store, topic: str, rank: int, first: int, timeout: timedelta
) -> _Verdict:
    """The other members' part. The clock for the verdict starts when the first has arrived."""
    steps = (
        (_report_key(first), timeout, "did not report"),
        ("verdict", timeout + _GRACE, "reported but gave no verdict on"),
    )
    for key, limit, what in steps:
        try:
            wait_for(table, [key], limit)
        except (dist.DistNetworkError, PeerFailureError):
            raise  # not a timeout: the caller explains the first one
        except RuntimeError as error:
            raise AgreementError(
                f"rank {first} {what} {topic!r} within {seconds(limit)}, so rank {rank} can't compare "
                f"with the others. Rank {first} failed before this call, hangs, or never makes it: "
                f"look at its output first."
            ) from error
    return _Verdict(**json.loads(table.get("verdict")))


def _leave(table: dist.Store, rank: int, members: Sequence[int], readers: int) -> None:
    """Rank 0 may host the store and be about to raise and exit: it waits until all have read.

    What nobody reads any more is deleted, as checks may be repeated in each step. A rank that is late
    still finds that it is, and why.
    """
    first = members[0]
    # From here on the verdict is known, and a store that is gone or a rank that died since has
    # nothing to add to it.
    with suppress(RuntimeError):
        if rank != first:
            table.delete_key(_report_key(rank))  # rank 0 has read it
        if table.add("readers", 1) == readers:
            table.set("all read", "")
        if rank == first:
            table.wait(["all read"], _GRACE)
            for key in (_report_key(rank), "verdict", "readers", "all read"):
                if readers == len(members):
                    table.delete_key(key)


def _compare(
    topic: str, reports: Mapping[int, _Report], explain: _Explain
) -> tuple[str | None, str | None]:
    """(error, warning) about the settings in which the reports differ."""
    tolerated = {name for report in reports.values() for name in report.warn_only}
    names = {name: None for report in reports.values() for name in report.value}  # in order
    errors: dict[str, dict[str, list[int]]] = {}
    notices: dict[str, dict[str, list[int]]] = {}
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, report in reports.items():
            ranks_of.setdefault(report.value.get(name, _UNSET), []).append(rank)
        if len(ranks_of) > 1:
            (notices if name in tolerated else errors)[name] = ranks_of
    error = warning = None
    if errors:
        error = (
            f"The ranks disagree about {topic!r}: {describe(errors, len(reports))}\n"
            f"Start every rank with the same program, arguments and libraries."
        )
        (name, ranks_of), *others = errors.items()
        said = explain[name](ranks_of) if not others and name in explain else ""
        error = f"{topic}: {said}." if said else error
    if notices:
        warning = (
            f"The ranks differ in {topic!r}, which may be intended: "
            f"{describe(notices, len(reports))}"
        )
    return error, warning
