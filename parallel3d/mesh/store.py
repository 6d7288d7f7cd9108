"""The c10d store as a place where ranks meet: who else is there, numbered calls, waiting for keys."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import distributed as dist

from parallel3d import _compat, _compat_simulated

__all__ = ["next_table", "others", "ranks_are_played", "wait_for", "while_waiting"]

_ONE_PROCESS = ("fake", "emulated")  # backends of ``parallel3d.testing`` without other ranks
_SHORTEST, _LONGEST = 0.0005, 0.1  # seconds between two looks into the store

while_waiting: list[Callable[[], None]] = []
"""Called now and then by a rank that waits; one that raises ends the wait. See ``guards.watch``."""


def ranks_are_played() -> bool:
    """Whether all ranks are simulated in this process: they can't differ, nor wait for each other."""
    return _compat_simulated.ranks_are_simulated()


def others() -> tuple[dist.Store, int, int] | None:
    """(store, rank, world size) of the default process group; None where it has no other real rank."""
    if ranks_are_played() or not dist.is_initialized():
        return None
    if any(name in dist.get_backend_config() for name in _ONE_PROCESS) or dist.get_world_size() < 2:
        return None
    return _compat.default_store(), dist.get_rank(), dist.get_world_size()


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
