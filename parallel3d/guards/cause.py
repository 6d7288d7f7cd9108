"""Why a collective of this rank failed: which rank is to blame, and what it said."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from torch import distributed as dist

from parallel3d._compat_groups import group_timeout
from parallel3d._text import text_of
from parallel3d.errors import Parallel3dError, PeerFailureError
from parallel3d.guards.board import Note
from parallel3d.guards.monitor import Monitor
from parallel3d.mesh.naming import name_ranks, seconds

__all__ = ["find_cause", "is_of_communication", "peer_failure", "short"]

# What errors of backends have in them; gloo's are plain RuntimeErrors.
_MARKS = (
    "gloo",
    "NCCL",
    "ncclSystemError",
    "ProcessGroup",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Application timeout caused pair closure",
    "Timed out waiting",
)
_TIMED_OUT = ("Timed out waiting", "timed out", "Timeout")


def is_of_communication(error: BaseException) -> bool:
    """Whether ``error`` is one that a collective or the store has raised because of somebody else."""
    if isinstance(error, PeerFailureError | dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, Parallel3dError):
        return False
    text = text_of(error)
    return any(mark in text for mark in _MARKS)


def short(error: BaseException, width: int = 2000) -> str:
    """Type and text of an exception; of a long text the beginning."""
    text = text_of(error)
    text = text if len(text) <= width else f"{text[:width]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def peer_failure(note: Note, rank: int) -> PeerFailureError:
    """What rank ``rank`` raises when ``note`` is the first failure."""
    return PeerFailureError(
        f"rank {note.rank} failed first, at {note.where}: {note.error}\nRank {rank} can't go on without it. "
        f"Look at the output of rank {note.rank}.",
        (note.rank,),
    )


def find_cause(
    monitor: Monitor, error: BaseException, where: str, last_known: Callable[[int], str]
) -> PeerFailureError:
    """Asks the others, for up to ``monitor.grace`` seconds, who is to blame for ``error`` of this rank.

    Args:
        where: this rank is.
        last_known: what is known of where another rank was; "" if nothing.
    """
    rank = monitor.rank
    others = [each for each in range(monitor.world_size) if each != rank]
    monitor.post(Note("lost", rank, short(error), where))
    if not any(note.kind == "roll" for note in monitor.notes()):
        monitor.post(Note("roll", rank))

    def all_have_posted() -> bool:
        posted = {note.rank for note in monitor.notes() if note.kind not in ("roll", "end")}
        return monitor.failure() is not None or posted.issuperset(others)

    monitor.wait_until(all_have_posted, monitor.grace)
    failure = monitor.failure()
    if failure is not None:
        return peer_failure(failure, rank)
    own = f"Rank {rank} was at {where}; its collective failed: {short(error, 300)}"
    late = _others_gave_up(monitor)
    if monitor.store_lost and late:
        return PeerFailureError(f"{late}. {own}")
    if monitor.store_silent:
        limit = seconds(timedelta(seconds=monitor.silence or 0))
        where = os.environ.get("MASTER_ADDR", "another machine")
        return PeerFailureError(
            f"the store, on {where}, has not answered for {limit}: this machine, {monitor.host}, has lost "
            f"the network, or that one has, or is frozen. Look at the network between the two. {own}"
        )
    if monitor.store_lost:
        return PeerFailureError(
            "the process that hosts the store has ended: rank 0, or the launcher (torchrun's agent) on its "
            f"machine. Look at its output first. {own}"
        )
    return _blame_the_silent(monitor, others, error, own, last_known)


def _blame_the_silent(
    monitor: Monitor,
    others: list[int],
    error: BaseException,
    own: str,
    last_known: Callable[[int], str],
) -> PeerFailureError:
    notes = [note for note in monitor.notes() if note.kind in ("lost", "left")]
    posted = {note.rank for note in notes}
    silent = [each for each in others if each not in posted]
    answers = monitor.answers(silent)
    lost = [each for each in silent if each not in answers]
    left = [note for note in notes if note.kind == "left" and note.rank != monitor.rank]
    limit = f"did not come within {seconds(group_timeout())}"
    # A rank that was woken before its own time was up says what those say who waited for all of it.
    up = _timed_out(text_of(error)) or any(_timed_out(n.error) for n in notes if n.kind == "lost")
    waited = limit if up else "is not in this collective"
    lines: list[str] = []
    hosts = monitor.hosts(lost)
    for host in dict.fromkeys(hosts.get(each, "") for each in lost):
        lines.append(
            _lost(monitor, host, [r for r in lost if hosts.get(r, "") == host], last_known)
        )
    for each, state in answers.items():
        lines.append(
            f"rank {each} {waited}: its process lives, at {state['where']}, and is in {state['stack']}"
        )
    if not lost and not answers:
        lines += [f"rank {note.rank} has left the watched part, at {note.where}" for note in left]
    if not lines:
        lines.append(_others_gave_up(monitor))
    blamed = lost or list(answers) or [note.rank for note in left]
    head = _head(lost, list(answers)) if len(lines) > 1 else ""
    more = _more_forwards(monitor.forwards())
    return PeerFailureError(f"{head}{'; '.join(lines)}.{more}\n{own}", tuple(blamed))


def _more_forwards(counts: Mapping[int, tuple[int, int]]) -> str:
    """Who has begun more forwards than the rest, by (with a gradient, without one): from an extra one on, a
    rank's collectives are matched with others than it means, and who fails then may be any rank."""
    without = _most({rank: each[1] for rank, each in counts.items()})
    found = without or _most({rank: sum(each) for rank, each in counts.items()})
    if found is None:
        return ""
    most, odd, usual, rest = found
    return (
        f"\nForwards{' without gradients' if without else ''} begun: {most} on {odd}, {usual} on {rest}. "
        f"Unless the latter are only behind, look for a forward that only {odd} makes, an evaluation say; "
        "guards.debug stops at the first collective that differs."
    )


def _most(counts: Mapping[int, int]) -> tuple[int, str, int, str] | None:
    """(the largest, whose, the usual one, whose); None where they are equal."""
    tally = Counter(counts.values())
    if len(tally) < 2:
        return None
    usual, most = min(tally, key=lambda number: (-tally[number], number)), max(tally)
    if most == usual:
        return None
    by_number = {n: name_ranks(r for r in counts if counts[r] == n) for n in (most, usual)}
    return most, by_number[most], usual, by_number[usual]


def _lost(
    monitor: Monitor, host: str, ranks: Sequence[int], last_known: Callable[[int], str]
) -> str:
    """What is said of ``ranks``, all on ``host``, of which nothing is heard."""
    elsewhere = f" on {host}" if host and host != monitor.host else ""
    one = len(ranks) == 1
    text = f"{name_ranks(ranks)}{elsewhere} {'is' if one else 'are'} lost: killed or hung"
    text += ", or the network to there is down" if elsewhere else ""
    text += f"; {'it' if one else 'they'} posted no error and {'does' if one else 'do'} not answer"
    known = {rank: last_known(rank) for rank in ranks}
    found = [text if one else f"rank {rank}: {text}" for rank, text in known.items() if text]
    return f"{text}. Last known: {'; '.join(found)}" if found else text


def _others_gave_up(monitor: Monitor) -> str:
    """Where nobody posted an error of its own, and all that is known is that others lost a collective too."""
    notes = [n for n in monitor.notes() if n.kind == "lost" and n.rank != monitor.rank]
    if not notes:
        return ""
    return (
        f"{name_ranks(note.rank for note in notes)} lost a collective before this rank did, rank "
        f"{notes[0].rank} at {notes[0].where}: {notes[0].error[:200]}. This rank came too late for "
        "it, or the network between the ranks failed"
    )


def _head(lost: Iterable[int], hung: Iterable[int]) -> str:
    ranks = [*lost, *hung]
    return f"{name_ranks(ranks)}: " if len(ranks) > 1 else ""


def _timed_out(text: str) -> bool:
    return any(mark in text for mark in _TIMED_OUT)
