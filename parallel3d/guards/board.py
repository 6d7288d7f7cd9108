"""Board: the notes that ranks exchange through the store after something has failed.

Notes are numbered by a counter in the store, which shows who failed first; clocks of several machines would
not.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch import distributed as dist

_GAP = 1.0  # seconds that a number may be taken without its note in the store
_MOST = 10_000  # most notes that one rank has not read; most bytes of a value
_KINDS = ("failed", "lost", "left", "roll", "end")


@dataclass(frozen=True)
class Note:
    """A message that one rank posts to all ranks.

    The kinds are ``failed``: the rank raised an error that is not a collective's; ``lost``: one of its
    collectives failed; ``left``: it left the watched block; ``roll``: it asks all live ranks to answer;
    ``end``: it has found out why its collective failed.
    """

    kind: str
    rank: int
    error: str = ""  # type and text of the exception
    where: str = ""  # the step, phase and unit that ``rank`` was in, in words
    step: int = 0


# Each raises ValueError, TypeError or KeyError if its argument is not what a rank posts.


def _as_note(fields: Any, world_size: int | None) -> Note:
    note = Note(**fields)
    texts = isinstance(note.error, str) and isinstance(note.where, str)
    if note.kind not in _KINDS or not texts or type(note.step) is not int:
        raise ValueError("another value than a note has")
    if type(note.rank) is not int or not 0 <= note.rank < (world_size or note.rank + 1):
        raise ValueError(f"no rank {note.rank}")
    return note


def _as_host(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable():
        raise ValueError("no name of a machine")
    return name[:200]


def _as_forwards(counts: Any) -> tuple[int, int]:
    if [type(count) for count in counts] != [int, int]:
        raise ValueError("not two numbers")
    return counts[0], counts[1]


def _as_answer(state: Any) -> dict[str, str]:
    return {"where": str(state["where"]), "stack": str(state["stack"])}


_AS = {"host": _as_host, "forwards": _as_forwards, "answer": _as_answer}


class Board:
    """One rank's access to the job's notes in the store, and to the facts that each rank posts about itself.

    The topics of these facts are ``host``, the name of its machine; ``forwards``, the numbers of forwards
    that it has begun, with a gradient and without; and ``answer``, its answer to a note ``roll``: ``where``
    it is and its ``stack``. No other thread may use the connection ``table``.

    The store has no lock, and any process that reaches it can write to it: values that no rank can have
    written are ignored, with one warning.
    """

    def __init__(self, table: dist.Store, world_size: int | None = None) -> None:
        self._table = table
        self._world_size = world_size
        self._next = 1
        self._gap: float | None = None
        self._warned = False

    def post(self, note: Note) -> None:
        if self._count() is None:  # not a number: adding to it would end this connection
            number = self._next
            while self._table.check([f"note/{number}"]):
                number += 1
            self._table.set("notes", str(number - 1))
        number = self._table.add("notes", 1)
        self._table.set(f"note/{number}", json.dumps(asdict(note)))

    def read(self) -> list[Note]:
        """Returns the notes that ranks have posted since the last call."""
        notes = []
        while True:
            note = self._read(f"note/{self._next}", lambda value: _as_note(value, self._world_size))
            if note is not None:
                notes.append(note)
            elif not self._is_gap():
                return notes
            self._next += 1
            self._gap = None

    def post_fact(self, topic: str, rank: int, value: object) -> None:
        """Posts ``value`` as this rank's fact ``topic``."""
        self._table.set(f"{topic}/{rank}", json.dumps(value))

    def facts(self, topic: str, ranks: Sequence[int]) -> dict[int, Any]:
        """Returns rank -> its fact ``topic``, for those of ``ranks`` that have posted one."""
        values = {rank: self._read(f"{topic}/{rank}", _AS[topic]) for rank in ranks}
        return {rank: value for rank, value in values.items() if value is not None}

    def _read(self, key: str, check: Callable[[Any], Any]) -> Any:
        """Returns the value of ``key``, converted by ``check``; None if there is none or it is not valid."""
        if not self._table.check([key]):
            return None
        text = self._table.get(key)
        try:
            if len(text) > _MOST:
                raise ValueError(f"{len(text)} bytes")
            return check(json.loads(text))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._warn(key, text, error)
            return None

    def _warn(self, key: str, text: bytes, why: object) -> None:
        if not self._warned:
            self._warned = True
            with suppress(UserWarning):  # if warnings are errors; this may be the watching thread
                warnings.warn(
                    f"guards.watch: {key} in the job's store is {text[:80]!r}, which no rank of this job has "
                    f"written ({why}); it is ignored. Another process writes into this store",
                    stacklevel=2,
                )

    def _count(self) -> int | None:
        """Returns the number of the latest note; None if the store's counter is not valid."""
        if not self._table.check(["notes"]):
            return 0
        text = self._table.get("notes")
        with suppress(ValueError):
            count = int(text)
            if self._next - 1 <= count < self._next + _MOST:
                return count
        self._warn("notes", text, "no count of notes")
        return None

    def _is_gap(self) -> bool:
        """Whether the next note will never come: the rank that took its number died before it posted."""
        count = self._count()
        if not (count > self._next if count else self._table.check([f"note/{self._next + 1}"])):
            return False
        if self._gap is None:
            self._gap = time.monotonic()
        return time.monotonic() - self._gap > _GAP


_ENDED = b"ended"


class Pulse:
    """The heartbeat of this rank, a number in the store that it increments, and a look at the next rank's.

    A host that loses its network, or freezes, closes no connection: gloo and the store would wait for it
    until their timeouts, half an hour. A rank counts as silent when its number has not changed for
    ``silence`` seconds on the clock of the rank that reads it. The heartbeat costs three round trips to the
    store, six times within ``silence``.
    """

    def __init__(self, table: dist.Store, rank: int, world_size: int, silence: float) -> None:
        self.next = (rank + 1) % world_size
        self.silence = silence
        self._table = table
        self._own = f"pulse/{rank}"
        self._count = 0
        self._due = 0.0
        self._heard = (b"", time.monotonic())  # the next rank's number, and since when it has it

    def beat(self) -> bool:
        """Increments this rank's number if that is due. Returns whether the next rank is silent."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self.silence / 6
        self._count += 1
        self._table.set(self._own, str(self._count))
        key = f"pulse/{self.next}"
        if not self._table.check([key]):  # it has not entered its watch yet
            return False
        number = self._table.get(key)
        if number != self._heard[0]:
            self._heard = (number, now)
        return number != _ENDED and now - self._heard[1] > self.silence

    def end(self) -> None:
        """Posts that this rank leaves, so that it doesn't count as silent."""
        self._table.set(self._own, _ENDED.decode())
