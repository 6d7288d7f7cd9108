"""Board: what ranks tell each other through the store when something has gone wrong.

A list of notes that only grows, numbered in the order in which they were posted: clocks of several machines
would not tell who failed first, the store's counter does.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import distributed as dist

_GAP = 1.0  # seconds a number may be taken without its note being there
_MOST = 10_000  # notes that one rank hasn't read; characters of one
_KINDS = ("failed", "lost", "left", "roll", "end")


@dataclass(frozen=True)
class Note:
    """What one rank posts.

    Attributes:
        kind: ``failed``: an error of its own; ``lost``: a collective of its failed; ``left``: it is done;
            ``roll``: it asks who is still there; ``end``: it knows what it wants to know.
        rank: who posts it.
        error: type and text of the exception.
        where: step, phase and unit it was at, in words.
        step: the same as a number.
    """

    kind: str
    rank: int
    error: str = ""
    where: str = ""
    step: int = 0


def _read_note(text: bytes, world_size: int | None) -> Note:
    """Raises ValueError or TypeError where ``text`` is none."""
    if len(text) > _MOST:
        raise ValueError(f"{len(text)} bytes")
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise TypeError("no object")
    note = Note(**fields)
    texts = isinstance(note.error, str) and isinstance(note.where, str)
    if note.kind not in _KINDS or not texts or type(note.step) is not int:
        raise ValueError("another value than a note has")
    if type(note.rank) is not int or not 0 <= note.rank < (world_size or note.rank + 1):
        raise ValueError(f"no rank {note.rank}")
    return note


class Board:
    """One rank's view of the notes and the answers to roll calls.

    The store has no lock, and any process that reaches it can write there: what isn't what a rank writes is
    left out, with one warning.

    Args:
        table: the part of the store that these ranks share. Not used by any other thread.
        world_size: how many they are; None: any number.
    """

    def __init__(self, table: dist.Store, world_size: int | None = None) -> None:
        self._table = table
        self._world_size = world_size
        self._next = 1
        self._gap: float | None = None
        self._told = False

    def post(self, note: Note) -> None:
        """Adds ``note`` to the list."""
        if (
            self._count() is None
        ):  # somebody has spoilt it, and adding to it would end this connection
            number = self._next
            while self._table.check([f"note/{number}"]):
                number += 1
            self._table.set("notes", str(number - 1))
        number = self._table.add("notes", 1)
        self._table.set(f"note/{number}", json.dumps(asdict(note)))

    def read(self) -> list[Note]:
        """Those posted since the last call."""
        notes = []
        while True:
            note = self._note(f"note/{self._next}")
            if note is not None:
                notes.append(note)
            elif not self._is_gap():
                return notes
            self._next += 1
            self._gap = None

    def _note(self, key: str) -> Note | None:
        if not self._table.check([key]):
            return None
        text = self._table.get(key)
        try:
            return _read_note(text, self._world_size)
        except (ValueError, TypeError, RecursionError) as error:
            self._foreign(key, text, error)
            return None

    def _foreign(self, key: str, text: bytes, why: object) -> None:
        if not self._told:
            self._told = True
            with suppress(
                UserWarning
            ):  # where warnings are errors; this may be the watching thread
                warnings.warn(
                    f"guards.watch: {key} in the job's store is {text[:80]!r}, which no rank of this job has "
                    f"written ({why}); it is ignored. Another process writes into this store",
                    stacklevel=2,
                )

    def _count(self) -> int | None:
        """How many numbers have been taken; None: that isn't known, for what is there is no such number."""
        if not self._table.check(["notes"]):
            return 0
        text = self._table.get("notes")
        try:
            count = int(text)
            if self._next - 1 <= count < self._next + _MOST:
                return count
        except ValueError:
            pass
        self._foreign("notes", text, "no count of notes")
        return None

    def _is_gap(self) -> bool:
        """Whether the next note will never be there: who took its number has died before posting it."""
        count = self._count()
        if not (count > self._next if count else self._table.check([f"note/{self._next + 1}"])):
            return False
        if self._gap is None:
            self._gap = time.monotonic()
        return time.monotonic() - self._gap > _GAP

    def settle(self, rank: int, host: str) -> None:
        """This rank is on machine ``host``."""
        self._table.set(f"host/{rank}", host)

    def hosts(self, ranks: Sequence[int]) -> dict[int, str]:
        """The machines of those of ``ranks`` that have said where they are."""
        known = [rank for rank in ranks if self._table.check([f"host/{rank}"])]
        texts = {rank: self._table.get(f"host/{rank}").decode(errors="replace") for rank in known}
        return {rank: text[:200] for rank, text in texts.items() if text.isprintable()}

    def ran(self, rank: int, forwards: tuple[int, int]) -> None:
        """This rank has begun so many forwards, with a gradient and without."""
        self._table.set(f"forwards/{rank}", json.dumps(forwards))

    def forwards(self, ranks: Sequence[int]) -> dict[int, tuple[int, int]]:
        """How many those of ``ranks`` that have said so have begun, when they last did."""
        found = {}
        for rank in ranks:
            key = f"forwards/{rank}"
            if not self._table.check([key]):
                continue
            text = self._table.get(key)
            try:
                counts = json.loads(text)
                if [type(each) for each in counts] != [int, int]:
                    raise ValueError("not two numbers")
                found[rank] = (counts[0], counts[1])
            except (ValueError, TypeError, RecursionError) as error:
                self._foreign(key, text, error)
        return found

    def answer(self, rank: int, state: dict[str, Any]) -> None:
        """To a roll call: this rank's process lives, and this is what it does."""
        self._table.set(f"answer/{rank}", json.dumps(state))

    def answers(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """Those of ``ranks`` that have answered one."""
        found = {}
        for rank in ranks:
            key = f"answer/{rank}"
            if not self._table.check([key]):
                continue
            text = self._table.get(key)
            try:
                state = json.loads(text)
                found[rank] = {"where": str(state["where"]), "stack": str(state["stack"])}
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                self._foreign(key, text, error)
        return found


# Silence: a rank, or the store, of which nothing is heard any more though no connection has been
# closed.
#
# A host that loses its network, or freezes, closes nothing: gloo and the store wait for it as long
# as their timeouts say, half an hour. So each rank's watching thread counts up a number in the
# store, and looks whether that of the next rank still rises; and a second thread looks whether the
# store still answers the first.

_ENDED = b"ended"


class Pulse:
    """This rank's sign of life, and what it has seen of the next rank's.

    Three round trips to the store, six times within ``silence``. No clock of one machine is compared with
    another's: a rank is silent when its number has not changed for that long on the clock of who looks.

    Args:
        table: the part of the store that these ranks share.
        silence: seconds.
    """

    def __init__(self, table: dist.Store, rank: int, world_size: int, silence: float) -> None:
        self.next = (rank + 1) % world_size
        self.silence = silence
        self._table = table
        self._own = f"pulse/{rank}"
        self._count = 0
        self._due = 0.0
        self._heard = (b"", time.monotonic())  # the next rank's number, and since when it is that

    def beat(self) -> bool:
        """Once per look at the store. Whether the next rank has fallen silent."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self.silence / 6
        self._count += 1
        self._table.set(self._own, str(self._count))
        key = f"pulse/{self.next}"
        if not self._table.check([key]):  # it has not come into the watched part yet
            return False
        number = self._table.get(key)
        if number != self._heard[0]:
            self._heard = (number, now)
        return number != _ENDED and now - self._heard[1] > self.silence

    def end(self) -> None:
        """This rank leaves: nobody need wonder that its number does not rise any more."""
        self._table.set(self._own, _ENDED.decode())


class Asker(Protocol):
    """What a Sentinel looks after: a Monitor."""

    def waits_since(self) -> float | None: ...
    def store_is_silent(self, seconds: float) -> None: ...


class Sentinel(threading.Thread):
    """Tells ``asker`` if the store has not answered it for ``silence`` seconds: the thread that asked waits
    in the kernel, and will for many minutes."""

    def __init__(self, asker: Asker, silence: float, closed: threading.Event) -> None:
        super().__init__(name="parallel3d-guards-silence", daemon=True)
        self._asker, self._silence, self._closed = asker, silence, closed

    def run(self) -> None:
        while not self._closed.wait(min(1.0, self._silence / 6)):
            since = self._asker.waits_since()
            if since is not None and time.monotonic() - since > self._silence:
                self._asker.store_is_silent(self._silence)
                return
