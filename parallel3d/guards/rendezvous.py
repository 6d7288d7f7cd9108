"""Rendezvous: ranks that are about to do something together compare it in the store first.

Every rank posts what it is about to do, and waits until all ranks of the group have come to the same place
of their sequence. Two kinds of divergence end that: they come with different things, or they wait for each
other in a circle, each at another place (another group, a step that the rest does not make yet). A rank that
only takes long is neither.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NoReturn

from torch import distributed as dist

from parallel3d._compat_groups import set_keys
from parallel3d.errors import AgreementError, PeerFailureError
from parallel3d.guards.events import Event, Journal, describe_places, is_end
from parallel3d.mesh.naming import name_ranks, seconds
from parallel3d.mesh.store import wait_for, while_waiting

__all__ = ["Rendezvous", "first_difference"]

_SLICE = timedelta(seconds=0.25)
_SETTLE = (
    1.0  # seconds that ranks are given to come to where they wait, before it is told who is where
)


class Rendezvous:
    """One rank's part.

    Args:
        table: the part of the store that the ranks share.
        scope: the ranks that run the same program, to be compared with each other.
        keep: how many events of each rank the store holds.
        timeout: how long a rank waits for another that does not come.
    """

    def __init__(
        self,
        table: dist.Store,
        rank: int,
        scope: Sequence[int],
        journal: Journal,
        keep: int,
        timeout: timedelta,
    ) -> None:
        self._table = table
        self.rank = rank
        self.scope = list(scope)
        self._journal = journal
        self._keep = keep
        self._timeout = timeout

    # -- what a rank says ----------------------------------------------------------------------------

    def note(self, event: Event) -> None:
        """This rank is about to do ``event``; nobody is waited for."""
        self._say(event)

    def _say(self, event: Event, *more: str) -> None:
        """Puts ``event`` into the journal and the store, there under the keys ``more`` too."""
        self._journal.note(event)
        text = event.to_json()
        keys = [f"log/{self.rank}/{event.number % self._keep}", f"at/{self.rank}", *more]
        set_keys(self._table, keys, text)

    def meet(self, event: Event) -> None:
        """This rank is about to do ``event`` together with ``event.ranks``; returns when all are.

        Raises:
            AgreementError: one of them does something else, or does not come; the same on all ranks.
            PeerFailureError: one of them has failed.
        """
        if len(event.ranks) < 2:
            self._say(event)
            return
        keys = [self._place(event, rank) for rank in event.ranks]
        self._say(event, self._place(event, self.rank))
        self._wait(event, keys)
        for text in self._table.multi_get(keys):
            if not event.agrees_with(Event.from_json(text)):
                self._part(event)
        if event.place > 1:  # which all have read who have come here
            self._table.delete_key(self._place(event, self.rank, event.place - 1))

    def leave(self, event: Event) -> None:
        """This rank goes, for the reason that ``event`` gives."""
        with suppress(RuntimeError):  # the store may be gone
            self.note(event)

    # -- what it hears -------------------------------------------------------------------------------

    def at(self, rank: int) -> Event | None:
        """Where ``rank`` is."""
        if not self._table.check([f"at/{rank}"]):
            return None
        return Event.from_json(self._table.get(f"at/{rank}"))

    def log(self, rank: int) -> list[Event]:
        """The last events of ``rank``."""
        last = self.at(rank)
        if last is None:
            return []
        first = max(last.number - self._keep, 0) + 1
        keys = [f"log/{rank}/{number % self._keep}" for number in range(first, last.number + 1)]
        events = [Event.from_json(self._table.get(key)) for key in keys if self._table.check([key])]
        return [event for event in events if event.number <= last.number]

    # -- waiting -------------------------------------------------------------------------------------

    def _place(self, event: Event, rank: int, place: int | None = None) -> str:
        return f"{event.key}/{event.place if place is None else place}/{rank}"

    def _wait(self, event: Event, keys: Sequence[str]) -> None:
        end = time.monotonic() + self._timeout.total_seconds()
        circle: object = None
        while not self._have_come(event, keys):
            self._look(event)
            before, circle = circle, self._find_circle(event)
            if circle is not None and circle == before:  # still the same: nobody was on the way
                self._part(event)
            if time.monotonic() > end:
                self._give_up(event)

    def _have_come(self, event: Event, keys: Sequence[str]) -> bool:
        """Whether all have, or do in a short while."""
        look = partial(self._raise_verdict, event)
        while_waiting.insert(
            0, look
        )  # before one that would say that those who raise it have failed
        try:
            wait_for(self._table, keys, _SLICE)
            return True
        except PeerFailureError:
            raise
        except dist.DistNetworkError as error:
            raise PeerFailureError(
                "the process that hosts the store has ended: rank 0, or the launcher on its machine. "
                f"Rank {self.rank} was about to issue {event}."
            ) from error
        except RuntimeError:  # not yet
            return False
        finally:
            while_waiting.remove(look)

    def _look(self, event: Event) -> None:
        """Raises what ends the wait, if anything has happened."""
        self._raise_verdict(event)
        for look in while_waiting:
            look()

    def _missing(self, event: Event) -> list[int]:
        """Who has not come to where ``event`` is."""
        return [r for r in event.ranks if not self._table.check([self._place(event, r)])]

    def _find_circle(self, event: Event) -> tuple[tuple[int, int], ...] | None:
        """(rank, number of its event) of ranks that wait for each other, or for one that has gone."""
        path: list[tuple[int, int]] = []
        done: set[int] = set()

        def search(rank: int, event: Event) -> bool:
            path.append((rank, event.number))
            for other in self._missing(event):
                where = self.at(other)
                if where is None or other in done or other == rank:
                    continue
                seen = (other, where.number)
                if seen in path or is_end(where):
                    path.append(seen)
                    return True
                if len(where.ranks) > 1 and search(other, where):
                    return True
            path.pop()
            done.add(rank)
            return False

        return tuple(path) if search(self.rank, event) else None

    # -- what is wrong -------------------------------------------------------------------------------

    def _part(self, event: Event) -> NoReturn:
        """Says, with all that wait, who is where."""
        time.sleep(_SETTLE)
        self._look(event)
        now = {rank: str(self.at(rank) or "nothing yet") for rank in self.scope}
        logs = {rank: self.log(rank) for rank in self.scope}
        first, odd = first_difference(logs)
        if first and 2 * len(odd) < len(first):
            differ = "differs" if len(odd) == 1 else "differ"
            head = f"{name_ranks(odd)} {differ} from the majority, about to issue:{describe_places(first)}"
        else:
            head = f"no majority does the same, about to issue:{describe_places(first or now)}"
        before = "".join(_before(rank, logs[rank]) for rank in odd[:2])
        self._conclude(
            event, f"The ranks part: {head}\nNow they are at:{describe_places(now)}{before}"
        )

    def _give_up(self, event: Event) -> NoReturn:
        missing = sorted(self._to_blame(event, set()))
        texts = {rank: str(self.at(rank) or "nothing yet") for rank in missing}
        self._conclude(
            event,
            f"{name_ranks(missing)} did not come to where others wait within {seconds(self._timeout)}: "
            f"killed, hung, or slower than that. Last known:{describe_places(texts)}",
        )

    def _to_blame(self, event: Event, seen: set[int]) -> set[int]:
        """Those that the ranks at ``event`` wait for, and that wait for nobody themselves."""
        found: set[int] = set()
        for rank in self._missing(event):
            if rank in seen:
                continue
            seen.add(rank)
            where = self.at(rank)
            waits = where is not None and len(where.ranks) > 1 and self._missing(where)
            found |= self._to_blame(where, seen) if where is not None and waits else {rank}
        return found

    def _conclude(self, event: Event, text: str) -> NoReturn:
        """Makes ``text`` the verdict, unless another rank was first, and raises it."""
        if self._table.add("verdicts", 1) == 1:
            self._table.set("verdict", text)
        with suppress(RuntimeError):  # the first has died in between
            wait_for(self._table, ["verdict"], _SLICE * 8)
        self._raise_verdict(event)
        raise AgreementError(text)

    def _raise_verdict(self, event: Event) -> None:
        if self._table.check(["verdict"]):
            verdict = self._table.get("verdict").decode()
            raise AgreementError(f"{verdict}\nRank {self.rank} was about to issue {event}.")


def first_difference(
    logs: Mapping[int, Sequence[Event]],
) -> tuple[dict[int, str], list[int]]:
    """(what each rank did, the odd ranks) where the sequences of ranks with one program first differ.

    Sends and receives don't count: of these ranks do different numbers.
    """
    by_position: dict[int, dict[int, Event]] = {}
    for rank, log in logs.items():
        for event in log:
            if not event.is_message:
                by_position.setdefault(event.position, {})[rank] = event
    for _, events in sorted(by_position.items()):
        same: list[list[int]] = []
        for rank, event in events.items():
            known = next((ranks for ranks in same if events[ranks[0]].agrees_with(event)), None)
            known.append(rank) if known is not None else same.append([rank])
        if len(same) > 1:
            common = max(same, key=len)
            odd = [rank for ranks in same if ranks is not common for rank in ranks]
            return {rank: str(event) for rank, event in events.items()}, sorted(odd)
    return {}, []


def _before(rank: int, log: Sequence[Event]) -> str:
    done = "; ".join(str(event) for event in log[-4:-1])
    return f"\nBefore that rank {rank} issued: {done}" if done else ""
