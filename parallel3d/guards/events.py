"""Event: one thing a rank is about to do, and the places where a rank's last ones are kept."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from parallel3d.errors import Parallel3dError
from parallel3d.mesh.naming import name_ranks

__all__ = ["MESSAGES", "Event", "Journal", "describe_places", "is_end", "read_journals"]

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
