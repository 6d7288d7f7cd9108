"""StoreExchange: each of some ranks puts a small value into the c10d store, and any of them collects all.

Who is late is waited for, and named once. A rank that has raised instead of coming ends the wait.
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
        topic: said after ``store.NOTICE_AFTER``, with the ranks that are late; "" says nothing.
        whole: where ranks that fail alone post it, the store of all ranks; None: it is not looked at.
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
        """Waits until the ranks in ``keys`` have set them.

        Raises:
            Late: not within ``timeout``.
            FailedAlone: one of them has raised, and will not come.
            PeerFailureError, DistNetworkError: as ``store.wait_for``.
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
