"""StoreGroup: ranks gather and broadcast values through the store, before there is a process group.

Every wait has a limit, after which the missing ranks are named.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from parallel3d.errors import MeshError
from parallel3d.mesh.exchange import StoreExchange
from parallel3d.mesh.store import Late, fresh_store, outlives_ranks, wait_for
from parallel3d.tools.doctor.facts import RankPlace, try_store

_ROUNDS = 5


class StoreGroup:
    """Exchanges values between ranks through ``store``. All ranks call the same methods in the same order,
    and wait for each other for ``seconds`` at most."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.seconds = seconds
        self._expected = list(range(world_size))  # on rank 0: ranks that have not been late

    def put(self, key: str, text: str = "") -> None:
        """Sets a key of the store; raises MeshError if the store doesn't answer any more."""
        try:
            self.store.set(key, text)
        except RuntimeError as error:
            raise MeshError(f"rank 0 has gone: {str(error).splitlines()[0]}") from error

    def gather(self, topic: str, value: Any) -> dict[int, Any]:
        """Returns on rank 0: rank -> its value (JSON), for the ranks that came in time; elsewhere ``{}``."""
        self.put(f"{topic}/{self.rank}", json.dumps(value))
        if self.rank:
            return {}
        limit = timedelta(seconds=self.seconds)
        found = StoreExchange(self.store, self.rank, self._expected, limit, topic).collect()
        self._expected = list(found)  # a late rank is waited for only once
        return found

    def broadcast(self, topic: str, value: Any = None) -> Any:
        """Returns rank 0's value on all ranks; raises MeshError if it does not come in time."""
        if self.rank == 0:
            self.put(topic, json.dumps(value))
            return value
        limit = 3 * self.seconds  # rank 0 waits for others more than once
        try:
            wait_for(self.store, [topic], timedelta(seconds=limit))
            return json.loads(self.store.get(topic))
        except Late as error:
            raise MeshError(f"rank 0 has not said {topic!r} within {limit:.0f} s") from error
        except RuntimeError as error:
            raise MeshError(f"rank 0 has gone: {str(error).splitlines()[0]}") from error

    def finish(self) -> None:
        """Must be the last call: rank 0, which may host the store, waits for the others."""
        self.seconds = 5
        with suppress(RuntimeError):
            self.gather("gone", None)

    def wait(self, key: str) -> bool:
        """Waits for ``key``, without polling; returns whether it was set in time."""
        try:
            self.store.wait([key], timedelta(seconds=self.seconds))
        except RuntimeError:
            return False
        return True


def connect(place: RankPlace, environ: Mapping[str, str], seconds: float) -> StoreGroup:
    """Connects to the other ranks of the job; if that fails, raises a MeshError with the reason."""
    address, number = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not number.isdigit():
        raise MeshError(f"MASTER_ADDR is {address!r} and MASTER_PORT {number!r}")
    port = int(number)
    timeout, hosted = timedelta(seconds=seconds), outlives_ranks()
    is_host = place.rank == 0 and not hosted
    if is_host:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError as error:
                why = f"port {port} (MASTER_PORT), on which rank 0 is to host the store"
                raise MeshError(f"{why}: {error.strerror}") from error
    else:
        end = time.monotonic() + seconds
        while why := try_store(address, port, min(5.0, seconds)):
            if time.monotonic() > end:
                raise MeshError(why)
            time.sleep(0.2)
    try:
        store: dist.Store = dist.TCPStore(
            address, port, None, is_master=is_host, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise MeshError(f"{address}:{port}: {str(error).splitlines()[0]}") from error
    if hosted:
        store = fresh_store(store, place.rank, place.world_size, timeout)
    return StoreGroup(dist.PrefixStore("doctor", store), place.rank, place.world_size, seconds)


def clock_offset(
    group: StoreGroup, nodes: Sequence[int], now: Callable[[], float] = time.time
) -> tuple[float | None, float]:
    """Returns (seconds that this rank's clock is ahead of rank 0's, the largest error of that).

    The ranks in ``nodes``, one of each node except rank 0's, ask rank 0 several times for the time ``now()``;
    the fastest answer counts. All other ranks get (None, 0).
    """
    if group.rank == 0:
        for rank in nodes:
            for turn in range(_ROUNDS):
                if not group.wait(f"ask/{rank}/{turn}"):
                    break
                group.put(f"time/{rank}/{turn}", repr(now()))
        return 0.0, 0.0
    if group.rank not in nodes:
        return None, 0.0
    answers: list[tuple[float, float]] = []  # (largest error, offset)
    for turn in range(_ROUNDS):
        group.put(f"ask/{group.rank}/{turn}")
        begin = now()
        if not group.wait(f"time/{group.rank}/{turn}"):
            break
        end = now()
        theirs = float(group.store.get(f"time/{group.rank}/{turn}"))
        if turn:  # in the first turn rank 0 may have been busy with other ranks
            answers.append(((end - begin) / 2, (begin + end) / 2 - theirs))
    if not answers:
        return None, 0.0
    error, offset = min(answers)
    return offset, error
