"""diagnose: what each rank did last, who failed, and where the ranks part."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel3d.errors import Parallel3dError
from parallel3d.guards.debugging import KEEP, last_debugger
from parallel3d.guards.events import Event, describe_places, read_journals
from parallel3d.mesh.naming import name_ranks

__all__ = ["Diagnosis", "diagnose"]

_SHOWN = 5  # events of each rank in the report


@dataclass(frozen=True)
class Diagnosis:
    """``str()`` is a report.

    Attributes:
        events: the last ones of each rank, the latest last.
        failures: error by rank, of those that ended with one.
        divergence: where the sequences first differ, in words; "" if they don't.
    """

    events: Mapping[int, Sequence[Event]]
    failures: Mapping[int, str]
    divergence: str

    def __str__(self) -> str:
        parts = [f"{len(self.events)} ranks; {self.divergence or 'their sequences do not differ.'}"]
        if self.failures:
            parts.append("Errors:" + describe_places(dict(self.failures)))
        done = [rank for rank, events in self.events.items() if events and not _is_end(events[-1])]
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
        return {rank: rendezvous.log(rank) for rank in range(rendezvous.world_size)}
    except RuntimeError as error:
        raise Parallel3dError(
            "diagnose: the store is gone, as the process that hosted it has ended; give the folder that "
            "debug(folder=) wrote into"
        ) from error


def find_divergence(events: Mapping[int, Sequence[Event]]) -> str:
    """Where ranks that meet first bring different things, or the last that some do without the others."""
    met: dict[tuple[str, int], dict[int, Event]] = {}
    oldest: dict[int, int] = {rank: each[0].number for rank, each in events.items() if each}
    for rank, each in events.items():
        for event in each:
            if len(event.ranks) > 1:
                met.setdefault((event.key, event.place), {})[rank] = event
    differing, lonely = [], []
    for members in met.values():
        first = next(iter(members.values()))
        number = min(event.number for event in members.values())
        if not all(first.agrees_with(event) for event in members.values()):
            differing.append((number, members))
        elif any(rank not in members and rank in oldest for rank in first.ranks):
            latest = all(_is_last(events[rank], event) for rank, event in members.items())
            if latest:
                lonely.append((number, members))
    if differing:
        _, members = min(differing, key=lambda item: item[0])
        texts = {rank: str(event) for rank, event in members.items()}
        return f"the ranks part where they were about to issue:{describe_places(texts)}"
    if lonely:
        texts = {
            rank: str(_last_done(events[rank])) if events[rank] else "nothing" for rank in events
        }
        return f"the ranks part, each waiting at another place:{describe_places(texts)}"
    return ""


def _is_end(event: Event) -> bool:
    return event.what.startswith("left")


def _last_done(events: Sequence[Event]) -> Event:
    done = [event for event in events if not _is_end(event)]
    return done[-1] if done else events[-1]


def _is_last(events: Sequence[Event], event: Event) -> bool:
    return _last_done(events).number == event.number
