"""diagnose: what each rank did last, who failed, and where the ranks part."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel3d.errors import Parallel3dError
from parallel3d.guards.debugging import KEEP, last_debugger
from parallel3d.guards.rendezvous import (
    Event,
    describe_places,
    first_difference,
    is_end,
    read_journals,
)
from parallel3d.mesh.agreement import name_ranks

_SHOWN = 5  # events of each rank in the report


@dataclass(frozen=True)
class Diagnosis:
    """``str()`` is a report.

    Attributes:
        events: the last ones of each rank, the latest last.
        failures: error by rank, of those that ended with one.
        divergence: where the sequences first differ, in words; "" if they don't. Sends and receives are in
            ``events`` alone.
    """

    events: Mapping[int, Sequence[Event]]
    failures: Mapping[int, str]
    divergence: str

    def __str__(self) -> str:
        parts = [f"{len(self.events)} ranks; {self.divergence or 'their sequences do not differ.'}"]
        if self.failures:
            parts.append("Errors:" + describe_places(dict(self.failures)))
        done = [rank for rank, events in self.events.items() if events and not is_end(events[-1])]
        if done:
            parts.append(f"{name_ranks(done)} neither left debug mode nor ended with an error.")
        for rank, events in self.events.items():
            lines = "".join(f"\n  {event.number}: {event}" for event in events[-_SHOWN:])
            parts.append(f"rank {rank}, last:{lines or ' nothing'}")
        return "\n".join(parts)


def diagnose(folder: str | os.PathLike[str] | None = None, *, keep: int = KEEP) -> Diagnosis:
    """What ranks in ``guards.debug`` did last; print it.

    Args:
        folder: where ``guards.debug(folder=)`` wrote: then from any process, also after a crash. By
            default what is in the store of the job that this process is a rank of.
        keep: how many of each rank's last events are read.

    Raises:
        Parallel3dError: there is nothing to read.
    """
    if folder is not None:
        events = read_journals(folder, keep)
    else:
        events = _from_store()
    failures = {
        rank: each[-1].what.removeprefix("left: ")
        for rank, each in events.items()
        if each and each[-1].what.startswith("left: ")
    }
    return Diagnosis(events, failures, find_divergence(events))


def _from_store() -> dict[int, list[Event]]:
    debugger = last_debugger()
    if debugger is None:
        raise Parallel3dError(
            "diagnose: this process was in no guards.debug(); give the folder that debug(folder=) wrote into"
        )
    rendezvous = debugger.rendezvous
    if rendezvous is None:
        return {debugger.rank: list(debugger.journal.events)}
    try:
        return {rank: rendezvous.log(rank) for rank in rendezvous.scope}
    except RuntimeError as error:
        raise Parallel3dError(
            "diagnose: the store is gone, as the process that hosted it has ended; give the folder that "
            "debug(folder=) wrote into"
        ) from error


def find_divergence(events: Mapping[int, Sequence[Event]]) -> str:
    """Where the sequences first differ, in words; those of ranks that stopped are not longer than that."""
    done = {rank: [e for e in each if not is_end(e)] for rank, each in events.items()}
    first, odd = first_difference(done)
    if first:
        if 2 * len(odd) < len(first):
            head = f"{name_ranks(odd)} part{'s' if len(odd) == 1 else ''} from the rest with"
        else:
            head = "the ranks part with"
        return f"{head}:{describe_places(first)}"
    last = {rank: each[-1].position if each else 0 for rank, each in done.items()}
    behind = [rank for rank in last if last[rank] == min(last.values())]
    if len(behind) == len(last):
        return ""
    texts = {rank: str(done[rank][-1]) if done[rank] else "nothing" for rank in events}
    return f"{name_ranks(behind)} stopped first; last were:{describe_places(texts)}"
