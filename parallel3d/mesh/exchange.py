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
    """One exchange of JSON values through the store between the ranks ``members``, seen from ``rank``."""

    table: dist.Store  # a part of it in which nobody else uses keys that begin with ``name``
    rank: int
    members: Sequence[int]
    timeout: timedelta  # of ``collect``
    name: str = "value"
    topic: str = (
        ""  # printed with the late ranks after ``store.NOTICE_AFTER``; "": nothing is printed
    )
    whole: dist.Store | None = (
        None  # in which failed ranks of all post their errors; None: not read
    )

    def key(self, rank: int) -> str:
        return f"{self.name}/{rank}"

    def put(self, value: Any) -> None:
        self.table.set(self.key(self.rank), json.dumps(value))

    def has(self, rank: int) -> bool:
        return self.table.check([self.key(rank)])

    def collect(self) -> dict[int, Any]:
        """Returns {rank: value} of the members whose value comes within ``timeout``; raises as ``wait``."""
        with suppress(Late):
            self.wait({rank: self.key(rank) for rank in self.members})
        here = filter(self.has, self.members)
        return {rank: json.loads(self.table.get(self.key(rank))) for rank in here}

    def wait(self, keys: Mapping[int, str]) -> None:
        """Waits until all ``keys``, {rank: the key that it sets}, are set.

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
