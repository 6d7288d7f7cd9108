"""The c10d store as ranks use it: numbered calls, waiting for keys, a fresh store at each start."""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

from torch import distributed as dist

from parallel3d._torch.groups import default_store
from parallel3d._torch.simulated import ranks_are_simulated as ranks_are_played

_ONE_PROCESS = ("fake", "emulated")  # backends of ``parallel3d.testing`` without other ranks
_SHORTEST, _LONGEST = 0.0005, 0.1  # seconds between two polls of the store

NOTICE_AFTER = timedelta(seconds=30)
"""How long a rank waits before it says, once, for whom: a slow rank is no error, but nobody should wonder."""

while_waiting: list[Callable[[], None]] = []
"""Called at each poll by a rank that waits; an exception ends the wait. See ``guards.watch``."""


class Late(RuntimeError):
    """Raised by ``wait_for`` if a key is not set in time."""


def others() -> tuple[dist.Store, int, int] | None:
    """Returns (store, rank, world size) of the default group; None if there is no other real process."""
    if ranks_are_played() or not dist.is_initialized():
        return None
    if any(name in dist.get_backend_config() for name in _ONE_PROCESS) or dist.get_world_size() < 2:
        return None
    return default_store(), dist.get_rank(), dist.get_world_size()


def next_table(store: dist.Store, topic: str, rank: int) -> dist.Store:
    """Returns the part of ``store`` that the ranks' n-th calls about ``topic`` share, for this rank's next.

    Calls are counted in the store itself, per rank: a counter in this process would go on when the process
    group is replaced by one of other ranks.
    """
    topic_store = dist.PrefixStore(f"parallel3d/{topic}", store)
    call = topic_store.add(f"calls/{rank}", 1)
    return dist.PrefixStore(str(call), topic_store)


def wait_for(
    store: dist.Store,
    keys: Sequence[str],
    timeout: timedelta,
    *,
    notice: Callable[[], None] | None = None,
    look: Callable[[], None] | None = None,
) -> None:
    """Waits until all ``keys`` are set in ``store``, by polling at growing intervals.

    Args:
        notice: called once, after ``NOTICE_AFTER``.
        look: called at each poll when intervals are at their longest; an exception in it ends the wait.

    Raises:
        Late: the keys are not set within ``timeout``.
        DistNetworkError: the store has ended.
        PeerFailureError: within ``guards.watch``: another rank has failed.
    """
    # Not store.wait: on a TCP store it can't be interrupted, and prints to stderr when it times out.
    for _ in _polls(timeout, notice=notice, look=look):
        if store.check(list(keys)):
            return
    raise Late(f"{', '.join(keys)} not set within {timeout}")


def _polls(
    timeout: timedelta,
    longest: float = _LONGEST,
    *,
    notice: Callable[[], None] | None = None,
    look: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Yields at growing intervals, up to ``longest`` seconds, until ``timeout`` is over.

    ``notice`` and ``look``: see ``wait_for``.
    """
    begin, pause = time.monotonic(), _SHORTEST
    late = False
    while not late:
        for each in while_waiting:
            each()
        waited = time.monotonic() - begin
        late = waited > timeout.total_seconds()
        yield
        if notice is not None and waited > NOTICE_AFTER.total_seconds():
            notice()
            notice = None
        if look is not None and pause == longest:
            look()
        time.sleep(0 if late else pause)
        pause = min(2 * pause, longest)


def say(text: str) -> None:
    """Prints ``text`` to standard error, with the prefix "parallel3d: "."""
    with suppress(OSError, ValueError):  # nobody reads it
        print(f"parallel3d: {text}", file=sys.stderr, flush=True)


def say_late(late: Sequence[int], number: int, where: str, timeout: timedelta) -> None:
    """Prints which ranks, ``late`` of ``number``, have not come to ``where``, and how long others wait."""
    names = ", ".join(map(str, late[:16])) + (", ..." if len(late) > 16 else "")
    waited, limit = (each.total_seconds() for each in (NOTICE_AFTER, timeout))
    say(
        f"rank{'s' * (len(late) > 1)} {names} of {number} {'has' if len(late) == 1 else 'have'} not come to "
        f"{where} after {waited:g} s; the others wait, {limit:g} s at most"
    )


def outlives_ranks() -> bool:
    """Whether the store that this process joins is torchrun's, which remains when the job restarts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.PrefixStore:
    """Returns the part of ``store`` that belongs to this start of the job; every rank must call it.

    torchrun keeps one store for all restarts of a job, in which the keys of dead processes remain: a rank
    that reads the address of one of them may wait forever. The restart count doesn't identify a start: each
    node's torchrun counts its own.

    Each rank writes a random number of its own. Rank 0 names the start and publishes the numbers that it
    has read; the start is settled when all ranks have found their own number among them. Until then rank 0
    may have read a number of a rank's dead predecessor, and reads again.

    If ranks don't come within ``timeout`` the others continue, each with what it has: the first comparison
    of settings then names the missing ranks.
    """
    table = dist.PrefixStore("parallel3d/starts", store)
    own = secrets.token_hex(8)
    table.set(f"here/{rank}", own)

    def notice() -> None:
        name, known = json.loads(_get(table, "start") or '["", []]')
        if rank == 0:
            late = [r for r in range(1, world_size) if not table.check([f"found/{name}/{r}"])]
        elif rank < len(known) and known[rank] == own:
            return  # rank 0 is there, and says it
        elif table.add("noticed", 1) > 1:
            return
        else:
            late = [0]
        say_late(late, world_size, "the start of the job", timeout)

    if rank == 0:
        table.delete_key("noticed")  # of a start before
    polls = _polls(timeout, longest=0.05, notice=notice)
    name = _lead(table, own, world_size, polls) if rank == 0 else _follow(table, own, rank, polls)
    return dist.PrefixStore(f"parallel3d/start/{name}", store)


def _lead(table: dist.Store, own: str, world_size: int, polls: Iterator[None]) -> str:
    """On rank 0: finds out which processes take part in this start; returns the start's name."""
    number, name, known = 0, own, [""] * world_size
    for _ in polls:
        present = [_get(table, f"here/{rank}") for rank in range(world_size)]
        if present != known:
            number, known = number + 1, present
            name = f"{own}-{number}"
            table.set("start", json.dumps([name, known]))
        if all(known) and table.check([f"found/{name}/{rank}" for rank in range(1, world_size)]):
            break
    table.set(f"go/{name}", "")
    return name


def _follow(table: dist.Store, own: str, rank: int, polls: Iterator[None]) -> str:
    """On other ranks: waits until rank 0 has settled the start; returns its name."""
    found = ""
    for _ in polls:
        name, known = json.loads(_get(table, "start") or '["", []]')
        if name != found and rank < len(known) and known[rank] == own:
            found = name
            table.set(f"found/{name}/{rank}", "")
        if found and table.check([f"go/{found}"]):
            break
    return found or own


def _get(table: dist.Store, key: str) -> str:
    return table.get(key).decode() if table.check([key]) else ""
