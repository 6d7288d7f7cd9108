"""Silence: a rank, or the store, of which nothing is heard any more though no connection has been closed.

A host that loses its network, or freezes, closes nothing: gloo and the store wait for it as long as their
timeouts say, half an hour. So each rank's watching thread counts up a number in the store, and looks whether
that of the next rank still rises; and a second thread looks whether the store still answers the first.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from torch import distributed as dist

__all__ = ["Pulse", "Sentinel"]

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
