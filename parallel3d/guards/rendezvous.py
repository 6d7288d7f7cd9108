"""Rendezvous: ranks that are about to do something together compare it in the store first.

Every rank posts what it is about to do, and waits until all ranks of the group have come to the same place
of their sequence. Two kinds of divergence end that: they come with different things, or they wait for each
other in a circle, each at another place (another group, a step that the rest does not make yet). A rank that
only takes long is neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torch import distributed as dist

from parallel3d._torch.groups import group_timeout, set_keys
from parallel3d.errors import AgreementError, Parallel3dError, PeerFailureError
from parallel3d.mesh.agreement import check_agreement, name_ranks, seconds
from parallel3d.mesh.store import others, wait_for, while_waiting

# Event: one thing a rank is about to do, and the places where a rank's last ones are kept.

MESSAGES = ("send", "recv")  # their ranks do different things, which aren't compared
_MOST_BYTES = 32 * 2**20  # of a file; the one before it is kept


@dataclass(frozen=True)
class Event:
    """One thing that all of ``ranks`` do, as one of them is about to do it.

    Attributes:
        number: position among the events of this rank, from 1.
        what: a collective's operation; ``optimizer step (AdamW)``; ``left``; or an error's type and text.
        axis: of the mesh, or the name of the group.
        unit: the engine issues it for; "" outside the engine.
        bytes: as the recorder counts them; None where they may differ between ranks.
        step, micro_batch: it belongs to, from 1; a micro-batch is a forward with a gradient.
        ranks: that do it together; those not compared (send, recv) are none.
        place: position among the events of these ranks on this axis, from 1.
        messages: how many sends and receives there are among the events up to it, itself among them.
    """

    number: int
    what: str
    axis: str = ""
    unit: str = ""
    bytes: int | None = None
    step: int = 1
    micro_batch: int = 0
    ranks: tuple[int, ...] = ()
    place: int = 0
    messages: int = 0

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.what in MESSAGES

    @property
    def position(self) -> int:
        """How many events that are compared there are up to it, itself among them."""
        return self.number - self.messages

    @property
    def key(self) -> str:
        """Where those who do it together meet."""
        return (
            f"{self.axis} {self.ranks[0]}-{self.ranks[-1]}/{len(self.ranks)} {hash_of(self.ranks)}"
        )

    def agrees_with(self, other: Event) -> bool:
        """Whether another rank's event is the same thing."""
        if None not in (self.bytes, other.bytes) and self.bytes != other.bytes:
            return False
        names = ("what", "axis", "unit", "step", "micro_batch")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __str__(self) -> str:
        axis = f" on {self.axis}" if self.axis else ""
        unit = f" for unit {self.unit}" if self.unit else ""
        size = f", {self.bytes:,} bytes" if self.bytes else ""
        return f"{self.what}{axis}{unit}{size} (step {self.step}, micro-batch {self.micro_batch})"

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: Any) -> Event:
        """Of str or bytes. Raises ValueError, TypeError or KeyError for a line that is none."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})


def hash_of(ranks: Iterable[int]) -> str:
    """Tells two sets of ranks apart that begin, end and count alike."""
    value = 0
    for rank in ranks:
        value = (value * 1_000_003 + rank + 1) % (1 << 61)
    return f"{value:x}"


class Journal:
    """One rank's last events: in memory, and in a file of a folder, line by line, if there is one.

    What is written survives a SIGKILL, as it is handed to the kernel with each event.
    """

    def __init__(self, rank: int, keep: int, folder: str | os.PathLike[str] | None) -> None:
        self.events: deque[Event] = deque(maxlen=keep)
        self._path = None if folder is None else Path(folder) / f"rank{rank}.jsonl"
        self._file: TextIO | None = None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w", encoding="utf-8")

    def note(self, event: Event) -> None:
        """Adds ``event``."""
        self.events.append(event)
        if self._file is None:
            return
        assert self._path is not None
        self._file.write(event.to_json() + "\n")
        self._file.flush()
        if self._file.tell() > _MOST_BYTES:
            self._file.close()
            os.replace(self._path, self._path.with_suffix(".before.jsonl"))
            self._file = self._path.open("w", encoding="utf-8")

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_journals(folder: str | os.PathLike[str], keep: int) -> dict[int, list[Event]]:
    """The last ``keep`` events by rank, of what journals have written into ``folder``.

    A line that the death of its process has cut short is left out.

    Raises:
        Parallel3dError: the folder has none.
    """
    found: dict[int, list[Event]] = {}
    for path in Path(folder).glob("rank*.jsonl"):
        number = path.name.removeprefix("rank").removesuffix(".jsonl")
        if not number.isdecimal():
            continue
        events: deque[Event] = deque(maxlen=keep)
        for each in (path.with_suffix(".before.jsonl"), path):
            if not each.exists():
                continue
            with each.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    try:
                        events.append(Event.from_json(line))
                    except (ValueError, TypeError, KeyError):
                        continue
        found[int(number)] = list(events)
    if not found:
        raise Parallel3dError(
            f"{str(folder)!r} has no journal (rank0.jsonl, ...): give the folder that guards.debug(folder=) "
            "or PARALLEL3D_DEBUG_DIR was given"
        )
    return dict(sorted(found.items()))


def is_end(event: Event) -> bool:
    """Whether it says that the rank has left debug mode, in whatever way."""
    return event.what.startswith("left")


def describe_places(events: dict[int, str]) -> str:
    """``rank 2: ...`` and ``ranks 0-1, 3: ...``, a line for each text, the rarest first."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in events.items():
        ranks_of.setdefault(text, []).append(rank)
    ordered = sorted(ranks_of.items(), key=lambda item: len(item[1]))
    return "".join(f"\n  {name_ranks(ranks)}: {text}" for text, ranks in ordered)


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


# Ranks compare what they have before it communicates: digests first, and texts only if they
# differ.


def compare_digests(
    topic: str, ranks: Sequence[int], texts: Callable[[], Mapping[str, str]]
) -> None:
    """Checks that all of ``ranks`` have the same ``texts``; each of them must call it.

    One round trip to the store. Ranks may come as late as the process group's timeout allows: one may have
    data to read. Nothing happens where there is no other process.

    Args:
        topic: what is compared, as errors name it.
        ranks: the same list on each of them.
        texts: name -> value of all that must be alike.

    Raises:
        AgreementError: on every rank, with the names that differ, their values and the odd ranks.
        PeerFailureError: within ``guards.watch``: another rank has failed meanwhile.
    """
    if others() is None or len(ranks) < 2:
        return
    values = texts()
    digest = hashlib.sha256()
    for name, text in values.items():
        digest.update(f"{len(name)} {name} {len(text)} {text}".encode())
    check_agreement(
        topic,
        {"digest": digest.hexdigest()},
        ranks=ranks,
        timeout=group_timeout(),
        details=lambda: values,
    )
