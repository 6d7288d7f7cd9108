"""Ranks that wait for another in the store: a slow one is waited for, one that has raised is not. Ranks that
are started again meet each other, not what their dead predecessors have left in the store."""

import contextlib
import io
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d.errors import AgreementError, PeerFailureError
from parallel3d.mesh import check_agreement
from parallel3d.mesh import store as store_module
from parallel3d.mesh.failures import post_failure, tells_others
from parallel3d.mesh.store import fresh_store
from parallel3d.testing import GlooPool

MINUTE = timedelta(minutes=1)


@pytest.fixture
def notices(monkeypatch) -> Iterator[list[str]]:
    """What is said, from 0.3 s on."""
    said: list[str] = []
    monkeypatch.setattr(store_module, "NOTICE_AFTER", timedelta(seconds=0.3))
    monkeypatch.setattr(store_module, "say", said.append)
    yield said


def together(call: Callable[[int], object], ranks: int, late: int, delay: float) -> dict[int, str]:
    """Calls ``call(rank)`` in a thread per rank, on ``late`` after ``delay`` seconds; returns the errors."""
    errors: dict[int, str] = {}

    def run(rank: int) -> None:
        time.sleep(delay if rank == late else 0)
        try:
            call(rank)
        except (AgreementError, PeerFailureError) as error:
            errors[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


def compare(store: dist.Store, ranks: int, **options: object) -> Callable[[int], None]:
    return lambda rank: check_agreement(
        "plan",
        {"a": "1"},
        store=store,
        rank=rank,
        world_size=ranks,
        **{"timeout": MINUTE} | options,
    )


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_slow_rank_is_waited_for_and_named_once(notices: list[str], late: int) -> None:
    assert together(compare(dist.HashStore(), 3), 3, late, 0.9) == {}
    assert notices == [
        f"rank {late} of 3 has not come to 'plan' after 0.3 s; the others wait, 60 s at most"
    ]


@pytest.mark.parametrize("late", [0, 2])
def test_so_it_is_at_the_start_of_a_job(notices: list[str], late: int) -> None:
    store = dist.HashStore()
    assert together(lambda rank: fresh_store(store, rank, 3, MINUTE), 3, late, 0.9) == {}
    assert len(notices) == 1 and f"rank {late} of 3 has not come to the start" in notices[0]


def test_ranks_in_time_are_not_mentioned(notices: list[str]) -> None:
    assert together(compare(dist.HashStore(), 3), 3, 0, 0.0) == {}
    assert notices == []


@pytest.mark.parametrize("failed", [0, 2])
@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_has_raised_is_not_waited_for(failed: int, ends: bool) -> None:
    store = dist.HashStore()
    begin = time.monotonic()

    def call(rank: int) -> None:
        if rank == failed:
            post_failure(store, rank, LookupError("no file"), ends=ends)
        else:
            compare(store, 3)(rank)

    errors = together(call, 3, failed, 0.4)
    assert set(errors) == {0, 1, 2} - {failed}
    for text in errors.values():
        assert text.startswith(f"PeerFailureError: rank {failed} failed first")
        assert "LookupError: no file" in text
    assert time.monotonic() - begin < 10


def test_what_all_ranks_have_raised_ends_no_wait() -> None:
    store = dist.HashStore()

    def call(rank: int) -> None:
        post_failure(store, rank, LookupError("no file"), ends=False)
        compare(store, 3)(rank)

    assert together(call, 3, 1, 0.5) == {}


@tells_others
def load(rank: int) -> None:
    if rank == 1:
        raise LookupError("no file")


class Uneven(nn.Module):
    """Whose parameter one rank can't shard."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def placement(param: nn.Parameter) -> None:
    if dist.get_rank() == 1:
        raise LookupError("no file")


def raises_alone(how: str) -> str:
    """The errors are caught, as a program may that looks at them."""
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
    model = Uneven()
    try:
        if how == "another call":
            load(dist.get_rank())
        else:
            p3d.fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    except LookupError as error:
        return str(error)
    with pytest.raises(PeerFailureError) as caught:
        if how == "fully_shard, then save":
            p3d.checkpoint.save("nowhere", model, None, step=1)
        else:
            model(torch.ones(2, 4)) if how == "fully_shard" else p3d.parallelize(model, mesh)
    return str(caught.value)


@pytest.mark.parametrize("how", ["fully_shard", "fully_shard, then save", "another call"])
def test_an_error_on_one_rank_reaches_the_others(gloo_pool: GlooPool, how: str) -> None:
    waits, raised = gloo_pool.run(raises_alone, how, world_size=2)
    assert raised == "no file"
    assert waits.startswith("rank 1 failed first") and "LookupError: no file" in waits


def comes_late(what: str) -> str:
    """Rank 1 is later than rank 0 says nothing."""
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    if what not in ("build_mesh", "parallelize"):
        p3d.parallelize(model, mesh)
    calls: dict[str, Callable[[], object]] = {
        "build_mesh": lambda: p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu"),
        "parallelize": lambda: p3d.parallelize(model, mesh),
        "first forward": lambda: model(torch.ones(1, 4)),
        "latest": lambda: p3d.checkpoint.latest("nowhere", model),
        "Metrics": lambda: p3d.observability.Metrics(mesh, tokens_per_step=1, every=2),
    }
    before, store_module.NOTICE_AFTER = store_module.NOTICE_AFTER, timedelta(seconds=0.2)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            time.sleep(0.8 * dist.get_rank())
            calls[what]()
    finally:
        store_module.NOTICE_AFTER = before
    return said.getvalue()


@pytest.mark.parametrize("what", ["parallelize", "build_mesh", "first forward", "Metrics"])
def test_every_comparison_waits_as_long_as_the_group(gloo_pool: GlooPool, what: str) -> None:
    said, nothing = gloo_pool.run(comes_late, what, world_size=2)
    assert said.count("\n") == 1 and "rank 1 of 2 has not come to" in said
    assert "wait, 30 s" not in said
    assert nothing == ""


def given_timeout(seconds: float) -> str:
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(AgreementError) as caught:
        p3d.parallelize(nn.Linear(4, 4), mesh, timeout=timedelta(seconds=seconds))
    return str(caught.value)


def test_parallelize_takes_a_timeout(gloo_pool: GlooPool) -> None:
    said, _ = gloo_pool.run(given_timeout, 0.3, world_size=2)
    assert "rank 1 of 2 did not report 'parallelize' within 0.3 s" in said
    assert "give a longer timeout" in said


@pytest.mark.parametrize("timeout", [30, timedelta(0)])
def test_a_timeout_is_a_positive_timedelta(timeout: object) -> None:
    with p3d.testing.fake_world(0, 2):
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
        with pytest.raises(p3d.Parallel3dError, match=r"timeout is .* positive datetime.timedelta"):
            p3d.parallelize(nn.Linear(2, 2), mesh, timeout=timeout)  # type: ignore[arg-type]


# An exception that nobody catches


def printed(kind: str) -> str:
    """What the program of each rank prints at its end; rank 1's raises first."""
    p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
    try:
        if dist.get_rank() == 1:
            raise LookupError("no more samples\nbut another line")
        time.sleep(0.2)
        if kind == "gloo":
            try:
                raise RuntimeError("[/gloo/pair.cc:5] Connection closed by peer [127.0.0.1]:1")
            except RuntimeError as error:
                raise RuntimeError("gloo: a reduction failed") from error
        if kind == "store":
            check_agreement("plan", {})
        raise ValueError("of its own")
    except Exception as error:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            sys.excepthook(type(error), error, error.__traceback__)
        return text.getvalue()


@pytest.mark.parametrize("kind", ["gloo", "store", "its own"])
def test_others_print_one_line(gloo_pool: GlooPool, kind: str) -> None:
    other, failed = gloo_pool.run(printed, kind, world_size=2)
    assert "Traceback" in failed and "LookupError: no more samples" in failed
    if kind == "its own":
        assert "Traceback" in other and "ValueError: of its own" in other
        return
    assert "LookupError: no more samples" in other and "rank 1" in other
    assert "Traceback" not in other and other.count("\n") <= 3


# A fresh store at each start


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
