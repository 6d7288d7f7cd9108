"""StoreExchange: each of some ranks puts a small value into the c10d store, and any of them collects all.

``collect`` waits for late ranks and prints their names once. A rank that has raised an exception instead ends
the wait.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from parallel3d.mesh.failures import raise_failed_alone
from parallel3d.mesh.store import Late, say_late, wait_for


@dataclass(frozen=True)
class StoreExchange:
    """One exchange of values (of JSON) between ``members``, on the member ``rank``.

    Attributes:
        table: a part of the store in which nobody else uses keys that begin with ``name``.
        timeout: how long ``collect`` waits.
        topic: printed with the late ranks after ``store.NOTICE_AFTER``; "": nothing is printed.
        whole: the store of all ranks, in which failed ranks post their errors; None: it is not read.
    """

    table: dist.Store
    rank: int
    members: Sequence[int]
    timeout: timedelta
    name: str = "value"
    topic: str = ""
    whole: dist.Store | None = None

    def key(self, rank: int) -> str:
        return f"{self.name}/{rank}"

    def put(self, value: Any) -> None:
        self.table.set(self.key(self.rank), json.dumps(value))

    def has(self, rank: int) -> bool:
        """Whether ``rank`` has put its value."""
        return self.table.check([self.key(rank)])

    def collect(self) -> dict[int, Any]:
        """Returns rank -> value of the members that come within ``timeout``; raises as ``wait``."""
        with suppress(Late):
            self.wait({rank: self.key(rank) for rank in self.members})
        here = filter(self.has, self.members)
        return {rank: json.loads(self.table.get(self.key(rank))) for rank in here}

    def wait(self, keys: Mapping[int, str]) -> None:
        """Waits until each rank in ``keys``, rank -> key, has set its key.

        Raises:
            Late: a key was not set within ``timeout``.
            FailedAlone: one of the ranks has raised an error, so that it will not set its key.
            PeerFailureError, DistNetworkError: see ``store.wait_for``.
        """

        def missing() -> list[int]:
            return [rank for rank, key in keys.items() if not self.table.check([key])]

        def notice() -> None:
            if self.topic and self.table.add("noticed", 1) == 1:
                say_late(missing(), len(self.members), repr(self.topic), self.timeout)

        def look() -> None:
            if self.whole is not None:
                raise_failed_alone(self.whole, self.rank, missing)

        wait_for(self.table, list(keys.values()), self.timeout, notice=notice, look=look)
