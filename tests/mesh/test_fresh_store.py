"""Ranks that are started again meet each other, not what their dead predecessors have left in the store."""

import json
import random
import threading
import time
from datetime import timedelta

import pytest
from torch import distributed as dist

from parallel3d.mesh.store import fresh_store

MINUTE = timedelta(minutes=1)


def start(
    store: dist.Store, delays: list[float | None], timeout: timedelta = MINUTE
) -> list[dist.Store]:
    """Starts a rank after each delay (None: it never comes); the parts that they get."""
    parts: list[dist.Store] = []

    def run(rank: int, delay: float) -> None:
        time.sleep(delay)
        parts.append(fresh_store(store, rank, len(delays), timeout))

    threads = [
        threading.Thread(target=run, args=(rank, delay))
        for rank, delay in enumerate(delays)
        if delay is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return parts


def is_new_for_all(parts: list[dist.Store]) -> bool:
    """Whether what one of the ranks says is heard by all, and nobody has said anything there before."""
    if any(part.check(["said"]) for part in parts):
        return False
    parts[-1].set("said", "")
    return all(part.check(["said"]) for part in parts)


def test_all_ranks_get_one_part_and_each_start_another() -> None:
    store, rng = dist.HashStore(), random.Random(0)
    for _ in range(10):
        assert is_new_for_all(start(store, [rng.choice([0, 0.02, 0.1]) for _ in range(4)]))


@pytest.mark.parametrize("dead", range(4))
def test_a_start_that_ended_before_all_had_met(dead: int) -> None:
    """A rank died on the way; those that came waited for it until they were ended too."""
    store = dist.HashStore()
    start(store, [None if rank == dead else 0 for rank in range(4)], timedelta(seconds=0.3))
    assert is_new_for_all(start(store, [0.1 * (rank == dead) for rank in range(4)]))
    assert is_new_for_all(start(store, [0.1 * (rank != dead) for rank in range(4)]))


def test_rank_0_comes_first_and_finds_the_dead() -> None:
    store = dist.HashStore()
    start(store, [0, 0, 0])
    before = json.loads(dist.PrefixStore("parallel3d/starts", store).get("start"))
    assert is_new_for_all(start(store, [0, 0.3, 0.2]))
    after = json.loads(dist.PrefixStore("parallel3d/starts", store).get("start"))
    assert not set(before[1]) & set(after[1])


def test_other_numbers_of_ranks() -> None:
    store = dist.HashStore()
    for size in (4, 1, 2, 4):
        assert is_new_for_all(start(store, [0.05 * (rank % 2) for rank in range(size)]))
