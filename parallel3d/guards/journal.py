"""Journal: records the events that ranks share, such as collectives, in memory, in a file and in the store.

A rank posts an event before it begins, and waits until all ranks of the group have posted the one at the same
position of their sequence. The wait ends with an error if these events differ, or if ranks wait for each
other in a cycle, each at another position (another group, or a step that the others do not make). A slow rank
causes no error.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torch import distributed as dist

from parallel3d._torch.groups import set_keys
from parallel3d.errors import AgreementError, Parallel3dError, PeerFailureError
from parallel3d.mesh.agreement import name_ranks, ranks_by_value, seconds
from parallel3d.mesh.store import Late, next_table, others, wait_for, while_waiting

MESSAGES = ("send", "recv")  # not compared: their two ranks do different things
_MOST_BYTES = 32 * 2**20  # of a file of events; the one before it is kept


@dataclass(frozen=True)
class RankEvent:
    """An event that all of ``ranks`` take part in, such as a collective, as recorded by one of them.

    ``what`` is a collective's operation, ``optimizer step (AdamW)``, ``left debug mode``, or ``left: `` and
    an error.
    """

    number: int  # among the events of this rank, from 1
    what: str
    axis: str = ""  # of the mesh, or the name of the group
    unit: str = ""  # that the engine issues it for; "" outside the engine
    bytes: int | None = None  # as the recorder counts them; None if they may differ between ranks
    step: int = 1
    micro_batch: int = 0  # from 1; it is a forward with a gradient
    ranks: tuple[int, ...] = ()  # that do it together; none of what is not compared (send, recv)
    place: int = 0  # among the events of these ranks on this axis, from 1
    messages: int = 0  # sends and receives among this rank's events up to this one, including it

    @property
    def position(self) -> int:
        """Its number among this rank's events that are compared (all but sends and receives), from 1."""
        return self.number - self.messages

    @property
    def is_end(self) -> bool:
        """Whether the rank has left debug mode, with or without an error."""
        return self.what.startswith("left")

    @property
    def key(self) -> str:
        """The key of its axis and ranks in the store."""
        ranks = hashlib.sha256(repr(self.ranks).encode()).hexdigest()
        return f"{self.axis} {ranks[:16]}"

    def agrees_with(self, other: RankEvent) -> bool:
        """Whether ``other``, another rank's event, is the same operation."""
        if None not in (self.bytes, other.bytes) and self.bytes != other.bytes:
            return False
        names = ("what", "axis", "unit", "step", "micro_batch")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __str__(self) -> str:
        axis = f" on {self.axis}" if self.axis else ""
        unit = f" for unit {self.unit}" if self.unit else ""
        size = f", {self.bytes:,} bytes" if self.bytes else ""
        return f"{self.what}{axis}{unit}{size} (step {self.step}, micro-batch {self.micro_batch})"

    @classmethod
    def from_json(cls, text: Any) -> RankEvent:
        """Returns the event that a journal wrote as ``text``; ValueError, TypeError or KeyError if it is
        none."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})


_SLICE = timedelta(seconds=0.25)
_SETTLE = 1.0  # seconds that ranks get to come to their next wait before an error lists them


class Journal:
    """This rank's last ``keep`` events: in memory and, once there are other ranks, in the store.

    Args:
        folder: gets a file with all events, each written at once, so that it survives a SIGKILL.
        scope: the ranks that run the same program and are compared with each other; by default all.
        timeout: how long ranks wait for one that does not come.
    """

    def __init__(
        self,
        rank: int,
        keep: int,
        folder: str | os.PathLike[str] | None = None,
        scope: Sequence[int] = (),
        timeout: timedelta = timedelta(seconds=25),
    ) -> None:
        self.rank, self.scope = rank, list(scope)
        self.events: deque[RankEvent] = deque(maxlen=keep)
        self._keep, self._timeout = keep, timeout
        self._table: dist.Store  # once it is shared
        self.is_shared = False  # with other ranks, as ``open`` found
        self._file: TextIO | None = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = (Path(folder) / f"rank{rank}.jsonl").open("w", encoding="utf-8")

    def open(self) -> bool:
        """Connects the journal to the store if there are other ranks; returns whether it is connected."""
        if not self.is_shared and (peers := others()) is not None:
            store, self.rank, world_size = peers
            self._table = next_table(store, "guards/debug", self.rank)
            self.scope = self.scope or list(range(world_size))
            self.is_shared = True
        return self.is_shared

    def note(self, event: RankEvent, *more: str) -> None:
        """Records ``event``; in the store also under the keys ``more``."""
        self.events.append(event)
        text = json.dumps(asdict(event))
        if self._file is not None:
            self._file.write(text + "\n")
            self._file.flush()
            if self._file.tell() > _MOST_BYTES:
                self._file.close()
                path = Path(self._file.name)
                path.replace(path.with_suffix(".before.jsonl"))
                self._file = path.open("w", encoding="utf-8")
        if self.is_shared:
            keys = [f"log/{self.rank}/{event.number % self._keep}", f"at/{self.rank}", *more]
            set_keys(self._table, keys, text)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def meet(self, event: RankEvent) -> None:
        """Posts ``event``, and returns when all of ``event.ranks`` have posted an equal one.

        Raises:
            AgreementError: the same on all ranks: one of them has posted another event, or none within
                ``timeout``.
            PeerFailureError: one of them has failed.
        """
        if len(event.ranks) < 2 or not self.is_shared:
            self.note(event)
            return
        keys = [self._place(event, rank) for rank in event.ranks]
        self.note(event, self._place(event, self.rank))
        self._wait(event, keys)
        for text in self._table.multi_get(keys):
            if not event.agrees_with(RankEvent.from_json(text)):
                self._fail_apart(event)
        if event.place > 1:  # all ranks that have come here have read the previous place
            self._table.delete_key(self._place(event, self.rank, event.place - 1))

    def at(self, rank: int) -> RankEvent | None:
        """Returns the last event of ``rank`` in the store; None if there is none."""
        if not self._table.check([f"at/{rank}"]):
            return None
        return RankEvent.from_json(self._table.get(f"at/{rank}"))

    def log(self, rank: int) -> list[RankEvent]:
        """Returns the last ``keep`` events of ``rank`` in the store."""
        last = self.at(rank)
        if last is None:
            return []
        first = max(last.number - self._keep, 0) + 1
        keys = [f"log/{rank}/{number % self._keep}" for number in range(first, last.number + 1)]
        events = [
            RankEvent.from_json(self._table.get(key)) for key in keys if self._table.check([key])
        ]
        return [event for event in events if event.number <= last.number]

    # -- waiting -------------------------------------------------------------------------------------

    def _place(self, event: RankEvent, rank: int, place: int | None = None) -> str:
        return f"{event.key}/{event.place if place is None else place}/{rank}"

    def _wait(self, event: RankEvent, keys: Sequence[str]) -> None:
        end = time.monotonic() + self._timeout.total_seconds()
        circle: object = None
        while not self._have_come(event, keys):
            before, circle = circle, self._find_circle(event)
            if circle is not None and circle == before:  # unchanged: no rank was on the way
                self._fail_apart(event)
            if time.monotonic() > end:
                self._fail_late(event)

    def _have_come(self, event: RankEvent, keys: Sequence[str]) -> bool:
        """Waits up to a quarter of a second until all of ``keys`` are set; returns whether they are."""
        look = partial(self._raise_verdict, event)
        while_waiting.insert(0, look)  # first: ranks that raise the verdict count as failed then
        try:
            wait_for(self._table, keys, _SLICE)
            return True
        except dist.DistNetworkError as error:
            raise PeerFailureError(
                "the process that hosts the store has ended: rank 0, or the launcher on its machine. "
                f"Rank {self.rank} was about to issue {event}."
            ) from error
        except Late:
            return False
        finally:
            while_waiting.remove(look)

    def _missing(self, event: RankEvent) -> list[int]:
        """Returns the ranks that have not posted this ``event`` yet."""
        return [r for r in event.ranks if not self._table.check([self._place(event, r)])]

    def _find_circle(self, event: RankEvent) -> tuple[tuple[int, int], ...] | None:
        """Returns ranks that wait for each other in a cycle, or for a rank that has left, as (rank, number of
        its event); None if there are none."""
        path: list[tuple[int, int]] = []
        done: set[int] = set()

        def search(rank: int, event: RankEvent) -> bool:
            path.append((rank, event.number))
            for other in self._missing(event):
                where = self.at(other)
                if where is None or other in done or other == rank:
                    continue
                seen = (other, where.number)
                if seen in path or where.is_end:
                    path.append(seen)
                    return True
                if len(where.ranks) > 1 and search(other, where):
                    return True
            path.pop()
            done.add(rank)
            return False

        return tuple(path) if search(self.rank, event) else None

    # -- errors --------------------------------------------------------------------------------------

    def _fail_apart(self, event: RankEvent) -> NoReturn:
        """Raises the error for ranks that do different things: it says where they first differ, and where
        each is now. All ranks that wait raise it."""
        time.sleep(_SETTLE)
        self._raise_verdict(event)
        for look in while_waiting:  # another rank may have failed
            look()
        now = {rank: str(self.at(rank) or "nothing yet") for rank in self.scope}
        logs = {rank: self.log(rank) for rank in self.scope}
        where, odd = first_difference(logs)
        where = where or "they wait for each other"
        text = f"The ranks diverge: {where}\nNow they are at:{describe_places(now)}"
        for rank in odd[:2]:
            done = "; ".join(str(event) for event in logs[rank][-4:-1])
            text += f"\nBefore that rank {rank} issued: {done}" if done else ""
        self._conclude(event, text)

    def _fail_late(self, event: RankEvent) -> NoReturn:
        missing = sorted(self._to_blame(event, set()))
        texts = {rank: str(self.at(rank) or "nothing yet") for rank in missing}
        self._conclude(
            event,
            f"{name_ranks(missing)} did not reach the collective at which others wait within "
            f"{seconds(self._timeout)}: killed, hung, or slower. Last known:{describe_places(texts)}",
        )

    def _to_blame(self, event: RankEvent, seen: set[int]) -> set[int]:
        """Returns the ranks that those at ``event`` wait for, directly or through others, and that wait for
        no rank themselves."""
        blamed: set[int] = set()
        for rank in self._missing(event):
            if rank in seen:
                continue
            seen.add(rank)
            where = self.at(rank)
            waits = where is not None and len(where.ranks) > 1 and self._missing(where)
            blamed |= self._to_blame(where, seen) if where is not None and waits else {rank}
        return blamed

    def _conclude(self, event: RankEvent, text: str) -> NoReturn:
        """Raises AgreementError with ``text`` as the verdict that all ranks raise; if another rank has posted
        a verdict first, with that."""
        if self._table.add("verdicts", 1) == 1:
            self._table.set("verdict", text)
        with suppress(RuntimeError):  # the first rank may have died before it set the verdict
            wait_for(self._table, ["verdict"], _SLICE * 8)
        self._raise_verdict(event)
        raise AgreementError(text)

    def _raise_verdict(self, event: RankEvent) -> None:
        if self._table.check(["verdict"]):
            verdict = self._table.get("verdict").decode()
            raise AgreementError(f"{verdict}\nRank {self.rank} was about to issue {event}.")


def read_journals(folder: str | os.PathLike[str], keep: int) -> dict[int, list[RankEvent]]:
    """Returns the last ``keep`` events of each rank, from the files that journals wrote into ``folder``.

    A line that was cut when its process died is ignored.

    Raises:
        Parallel3dError: the folder has no such files.
    """
    journals: dict[int, list[RankEvent]] = {}
    for path in Path(folder).glob("rank*.jsonl"):
        number = path.name.removeprefix("rank").removesuffix(".jsonl")
        if not number.isdecimal():
            continue
        events: deque[RankEvent] = deque(maxlen=keep)
        for file in filter(Path.exists, (path.with_suffix(".before.jsonl"), path)):
            with file.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    with suppress(ValueError, TypeError, KeyError):
                        events.append(RankEvent.from_json(line))
        journals[int(number)] = list(events)
    if not journals:
        raise Parallel3dError(
            f"{str(folder)!r} has no journal (rank0.jsonl, ...): give the folder that guards.debug(folder=) "
            "or PARALLEL3D_DEBUG_DIR was given"
        )
    return dict(sorted(journals.items()))


def describe_places(events: Mapping[int, str]) -> str:
    """Returns lines such as ``ranks 0-1, 3: ...``, one for each text of ``events``, fewest ranks first."""
    ordered = sorted(ranks_by_value(events).items(), key=lambda item: len(item[1]))
    return "".join(f"\n  {name_ranks(ranks)}: {text}" for text, ranks in ordered)


def first_difference(logs: Mapping[int, Sequence[RankEvent]]) -> tuple[str, list[int]]:
    """Returns (text that says where the ranks' events first differ, the ranks that differ from most); ("",
    []) if they don't.

    Sends and receives are not compared: ranks have different numbers of them.
    """
    by_position: dict[int, dict[int, RankEvent]] = {}
    for rank, log in logs.items():
        for event in log:
            if event.what not in MESSAGES:
                by_position.setdefault(event.position, {})[rank] = event
    for _, events in sorted(by_position.items()):
        same: list[list[int]] = []
        for rank, event in events.items():
            known = next((ranks for ranks in same if events[ranks[0]].agrees_with(event)), None)
            known.append(rank) if known is not None else same.append([rank])
        if len(same) > 1:
            common = max(same, key=len)
            odd = [rank for ranks in same if ranks is not common for rank in ranks]
            head = "no majority does the same"
            if 2 * len(odd) < len(events):
                head = f"{name_ranks(odd)} differ{'s' * (len(odd) == 1)} from the majority"
            places = describe_places({rank: str(event) for rank, event in events.items()})
            return f"{head}, about to issue:{places}", sorted(odd)
    return "", []
