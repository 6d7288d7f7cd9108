"""The c10d store as a place where ranks meet: who else is there, numbered calls, waiting for keys."""

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import distributed as dist

from parallel3d._torch import groups, simulated

_ONE_PROCESS = ("fake", "emulated")  # backends of ``parallel3d.testing`` without other ranks
_SHORTEST, _LONGEST = 0.0005, 0.1  # seconds between two looks into the store

while_waiting: list[Callable[[], None]] = []
"""Called now and then by a rank that waits; one that raises ends the wait. See ``guards.watch``."""


def ranks_are_played() -> bool:
    """Whether all ranks are simulated in this process: they can't differ, nor wait for each other."""
    return simulated.ranks_are_simulated()


def others() -> tuple[dist.Store, int, int] | None:
    """(store, rank, world size) of the default process group; None where it has no other real rank."""
    if ranks_are_played() or not dist.is_initialized():
        return None
    if any(name in dist.get_backend_config() for name in _ONE_PROCESS) or dist.get_world_size() < 2:
        return None
    return groups.default_store(), dist.get_rank(), dist.get_world_size()


def next_table(store: dist.Store, topic: str, rank: int) -> dist.Store:
    """The part of the store that belongs to this rank's next call about ``topic``.

    Calls are counted in the store itself, per rank: a counter in this process would run on when the
    process group is replaced by one with another set of ranks.
    """
    topic_store = dist.PrefixStore(f"parallel3d/{topic}", store)
    call = topic_store.add(f"calls/{rank}", 1)
    return dist.PrefixStore(str(call), topic_store)


def wait_for(store: dist.Store, keys: Sequence[str], timeout: timedelta) -> None:
    """Waits until all ``keys`` are set.

    Raises:
        RuntimeError: not within ``timeout``; a ``DistNetworkError`` if the store is gone.
        PeerFailureError: within ``guards.watch``: another rank has failed.
    """
    end = time.monotonic() + timeout.total_seconds()
    pause = _SHORTEST
    # Not store.wait: on a TCP store it can't be interrupted, and says on stderr that it has ended.
    for look in while_waiting:
        look()
    while not store.check(list(keys)):
        for look in while_waiting:
            look()
        if time.monotonic() > end:
            raise RuntimeError(f"{', '.join(keys)} not set within {timeout}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)


# fresh_store: where ranks meet under a launcher whose store outlives them.
#
# torchrun keeps one store for all restarts of a job. In it are the keys of processes that are
# dead: who reads the address of a peer there may wait for one that is gone. The number of restarts
# doesn't tell starts apart: each node's torchrun counts its own.

_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.05  # seconds between two looks into the store


def outlives_ranks() -> bool:
    """Whether torchrun holds the store that this process's environment names."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.PrefixStore:
    """The part of ``store`` that belongs to this start of the job; every rank must call it.

    Each rank says that it is there, by a number of its own. Rank 0 names the start and says with which
    numbers; when all ranks have found theirs among them, the start has its name. Until then rank 0 may have
    read the number of a rank's dead predecessor: it looks again.

    If ranks don't come within ``timeout`` the others go on, each with what it has: the first comparison
    of settings then says who is missing.
    """
    table = dist.PrefixStore("parallel3d/starts", store)
    mine = secrets.token_hex(8)
    table.set(f"here/{rank}", mine)
    end = time.monotonic() + timeout.total_seconds()
    name = _lead(table, mine, world_size, end) if rank == 0 else _follow(table, mine, rank, end)
    return dist.PrefixStore(f"parallel3d/start/{name}", store)


def _lead(table: dist.Store, mine: str, world_size: int, end: float) -> str:
    """Rank 0's part: finds out who takes part; the start's name."""
    ranks = range(world_size)
    pause, number, name, known = _Pause(end), 0, mine, [""] * world_size
    while not (all(known) and table.check([f"found/{name}/{rank}" for rank in ranks[1:]])):
        there = [_get(table, f"here/{rank}") for rank in ranks]
        if there != known:
            number, known = number + 1, there
            name = f"{mine}-{number}"
            table.set("start", json.dumps([name, known]))
        if not pause():
            break
    table.set(f"go/{name}", "")
    return name


def _follow(table: dist.Store, mine: str, rank: int, end: float) -> str:
    """The other ranks' part."""
    pause, found = _Pause(end), ""
    while not (found and table.check([f"go/{found}"])):
        name, known = json.loads(_get(table, "start") or '["", []]')
        if name != found and rank < len(known) and known[rank] == mine:
            found = name
            table.set(f"found/{name}/{rank}", "")
        if not pause():
            return found or mine
    return found


def _get(table: dist.Store, key: str) -> str:
    return table.get(key).decode() if table.check([key]) else ""


class _Pause:
    """Waits a moment, longer each time; False if it is too late."""

    def __init__(self, end: float) -> None:
        self._end, self._seconds = end, _FIRST_PAUSE

    def __call__(self) -> bool:
        for look in while_waiting:
            look()
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _LAST_PAUSE)
        return time.monotonic() < self._end
