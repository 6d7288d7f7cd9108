"""Meeting: the ranks of a job exchange what they have found, through the store, without a process group.

Nothing in here waits for ever: who does not come in time is named.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from parallel3d.doctor.collecting.network import try_store
from parallel3d.doctor.facts import Place
from parallel3d.errors import MeshError
from parallel3d.mesh.fresh_store import fresh_store, outlives_ranks

__all__ = ["Meeting", "clock_offset", "meet"]

_PAUSE = 0.02
_ROUNDS = 5


class Meeting:
    """One rank's part of it. All ranks call the same methods in the same order.

    Args:
        store: nobody else uses.
        seconds: how long others are waited for.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, seconds: float) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.seconds = seconds
        self._waited_for = set(range(world_size))  # on rank 0: who has always come so far

    def gather(self, topic: str, value: Any) -> dict[int, Any]:
        """On rank 0: rank -> its value (JSON), of those that came in time; elsewhere empty."""
        self.store.set(f"{topic}/{self.rank}", json.dumps(value))
        found: dict[int, Any] = {}
        if self.rank:
            return found
        end = time.monotonic() + self.seconds
        while late := self._waited_for - set(found):
            for rank in late:
                if self.store.check([f"{topic}/{rank}"]):
                    found[rank] = json.loads(self.store.get(f"{topic}/{rank}"))
            if time.monotonic() > end:
                self._waited_for = set(found)  # once is enough
                break
            time.sleep(_PAUSE)
        return dict(sorted(found.items()))

    def tell(self, topic: str, value: Any = None) -> Any:
        """Rank 0's value, on all ranks.

        Raises:
            MeshError: rank 0 has not told it in time.
        """
        if self.rank == 0:
            self.store.set(topic, json.dumps(value))
            return value
        end = time.monotonic() + 3 * self.seconds  # rank 0 waits for others, more than once
        try:
            while not self.store.check([topic]):
                if time.monotonic() > end:
                    raise MeshError(
                        f"rank 0 has not said {topic!r} within {3 * self.seconds:.0f} s"
                    )
                time.sleep(_PAUSE)
            return json.loads(self.store.get(topic))
        except RuntimeError as error:  # the store's host has gone
            raise MeshError(f"rank 0 has gone: {str(error).splitlines()[0]}") from error

    def part(self) -> None:
        """The end: rank 0, which may host the store, stays until the others have read what they need."""
        self.store.set(f"gone/{self.rank}", "")
        end = time.monotonic() + 5
        others = [f"gone/{rank}" for rank in self._waited_for]
        while self.rank == 0 and not self.store.check(others) and time.monotonic() < end:
            time.sleep(_PAUSE)


def meet(place: Place, address: str, port: int, seconds: float) -> Meeting:
    """Joins the other ranks of the job.

    Raises:
        MeshError: the store can't be reached within ``seconds``, or its port is taken.
    """
    hosted = outlives_ranks()
    hosts_it = place.rank == 0 and not hosted
    if hosts_it:
        _check_port(port)
    else:
        _wait_for_store(address, port, seconds)
    try:
        store: dist.Store = dist.TCPStore(
            address,
            port,
            None,
            is_master=hosts_it,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise MeshError(f"{address}:{port}: {str(error).splitlines()[0]}") from error
    if hosted:
        store = fresh_store(store, place.rank, place.world_size, timedelta(seconds=seconds))
    return Meeting(dist.PrefixStore("doctor", store), place.rank, place.world_size, seconds)


def _check_port(port: int) -> None:
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("", port))
        except OSError as error:
            raise MeshError(
                f"port {port} (MASTER_PORT), where rank 0 is to host the store: {error.strerror}"
            ) from error


def _wait_for_store(address: str, port: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while why := try_store(address, port, min(5.0, seconds)):
        if time.monotonic() > end:
            raise MeshError(why)
        time.sleep(0.2)


def clock_offset(
    meeting: Meeting, nodes: Sequence[int], now: Callable[[], float] = time.time
) -> tuple[float | None, float]:
    """(seconds this rank's clock is ahead of rank 0's, how sure that is); rank 0 is asked several times, and
    the quickest answer counts. (None, 0) on ranks that are not in ``nodes``.

    Args:
        nodes: one rank of each node, without rank 0's; the same on all ranks.
        now: the clock.
    """
    store = meeting.store
    if meeting.rank == 0:
        for rank in nodes:
            for turn in range(_ROUNDS):
                if not _wait(meeting, f"ask/{rank}/{turn}"):
                    break
                store.set(f"time/{rank}/{turn}", repr(now()))
        return 0.0, 0.0
    if meeting.rank not in nodes:
        return None, 0.0
    best: tuple[float, float] | None = None
    for turn in range(_ROUNDS):
        store.set(f"ask/{meeting.rank}/{turn}", "")
        begin = now()
        if not _wait(meeting, f"time/{meeting.rank}/{turn}"):
            break
        end = now()
        there = float(store.get(f"time/{meeting.rank}/{turn}"))
        sure = (end - begin) / 2
        if turn and (
            best is None or sure < best[1]
        ):  # rank 0 may have been busy with others before
            best = (begin + end) / 2 - there, sure
    return (None, 0.0) if best is None else best


def _wait(meeting: Meeting, key: str) -> bool:
    """Whether it came in time; it blocks at the store, so that it is told at once."""
    try:
        meeting.store.wait([key], timedelta(seconds=meeting.seconds))
    except RuntimeError:
        return False
    return True
