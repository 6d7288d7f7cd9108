"""Board: what ranks tell each other through the store when something has gone wrong.

A list of notes that only grows, numbered in the order in which they were posted: clocks of several machines
would not tell who failed first, the store's counter does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import distributed as dist

__all__ = ["Board", "Note"]

_GAP = 1.0  # seconds a number may be taken without its note being there


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


class Board:
    """One rank's view of the notes and the answers to roll calls.

    Args:
        table: the part of the store that these ranks share. Not used by any other thread.
    """

    def __init__(self, table: dist.Store) -> None:
        self._table = table
        self._next = 1
        self._gap: float | None = None

    def post(self, note: Note) -> None:
        """Adds ``note`` to the list."""
        number = self._table.add("notes", 1)
        self._table.set(f"note/{number}", json.dumps(asdict(note)))

    def read(self) -> list[Note]:
        """Those posted since the last call."""
        notes = []
        while True:
            if self._table.check([f"note/{self._next}"]):
                notes.append(Note(**json.loads(self._table.get(f"note/{self._next}"))))
            elif not self._is_gap():
                return notes
            self._next += 1
            self._gap = None

    def _is_gap(self) -> bool:
        """Whether the next note will never be there: who took its number has died before posting it."""
        if not self._table.check([f"note/{self._next + 1}"]):
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
        return {rank: self._table.get(f"host/{rank}").decode() for rank in known}

    def answer(self, rank: int, state: dict[str, Any]) -> None:
        """To a roll call: this rank's process lives, and this is what it does."""
        self._table.set(f"answer/{rank}", json.dumps(state))

    def answers(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """Those of ``ranks`` that have answered one."""
        return {
            rank: json.loads(self._table.get(f"answer/{rank}"))
            for rank in ranks
            if self._table.check([f"answer/{rank}"])
        }
