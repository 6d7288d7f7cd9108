"""Ranks that wait for each other at different places say where, without guards.watch."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _support.launch import free_ports
from torch import distributed as dist

import parallel3d as p3d
from parallel3d._util.trace import issuing
from parallel3d.guards import stalls
from parallel3d.guards.stalls import Stall

MINUTE = stalls.AFTER.total_seconds()


@pytest.fixture
def said(monkeypatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(stalls, "say", texts.append)
    return texts


def full_tensor(go_on: threading.Event) -> None:
    go_on.wait()


def train_step(go_on: threading.Event) -> None:
    go_on.wait()


@contextmanager
def ranks(*calls: Callable[[threading.Event], None]) -> Iterator[list[Stall]]:
    """A rank for each call, in a thread that is within it."""
    store, go_on = dist.HashStore(), threading.Event()
    threads = [threading.Thread(target=call, args=(go_on,)) for call in calls]
    try:
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        yield [Stall(store, i, len(calls), each.ident) for i, each in enumerate(threads)]
    finally:
        go_on.set()


def look(watching: list[Stall], minutes: float) -> None:
    for now in (0.0, 0.6 * MINUTE, minutes * MINUTE):
        for each in watching:
            each.look(now)


def test_places_are_said_once_by_the_first_that_waits(said: list[str]) -> None:
    with ranks(full_tensor, train_step, train_step) as watching:
        look(watching, 1.1)
        look(watching, 2.0)
    (text,) = said
    assert text.startswith("rank 0 has been at one place for 60 s")
    assert "\n  rank 0: test_stalls.py:" in text and "full_tensor" in text
    assert "\n  ranks 1-2: test_stalls.py:" in text and "train_step" in text


def test_nothing_is_said_before(said: list[str]) -> None:
    with ranks(full_tensor, train_step) as watching:
        look(watching, 0.9)
    assert said == []


def test_ranks_at_one_place_are_slow_together(said: list[str]) -> None:
    """A compilation, a long step, a network that hangs: no rank is elsewhere."""
    with ranks(train_step, train_step) as watching:
        look(watching, 5)
    assert said == []


def test_ranks_that_go_on_are_not_waiting(said: list[str], monkeypatch) -> None:
    with ranks(full_tensor, train_step) as watching:
        for step in range(5):
            monkeypatch.setattr(issuing, "runs", step)
            for each in watching:
                each.look(step * MINUTE)
    assert said == []


def test_a_rank_that_computes_says_where_it_is(said: list[str], monkeypatch) -> None:
    """One rank waits for a rank that works alone, such as one that writes an export."""
    with ranks(train_step, full_tensor) as (waits, works):
        for step in range(4):
            waits.look(0.4 * step * MINUTE)
            monkeypatch.setattr(works, "_at", None)  # it moves
            works.look(0.4 * step * MINUTE)
    (text,) = said
    assert "rank 0: " in text and "train_step" in text and "rank 1: " in text


def test_a_rank_that_does_not_answer(said: list[str]) -> None:
    with ranks(train_step, full_tensor) as (waits, _):
        look([waits], 1.1)
    assert "rank 1: unknown: it does not answer" in said[0]


def test_numbers_of_forwards_tell_ranks_apart(said: list[str], monkeypatch) -> None:
    """Accumulation over three micro-batches here and two there, in the same lines."""
    monkeypatch.setattr(issuing, "runs", 0)
    monkeypatch.setattr(issuing, "forwards", 0)
    with ranks(train_step, train_step) as watching:
        for now in (0.0, 0.6 * MINUTE, 1.1 * MINUTE):
            for each, number in zip(watching, (3, 2), strict=True):
                monkeypatch.setattr(issuing, "runs", number)
                monkeypatch.setattr(issuing, "forwards", number)
                each.look(now)
    assert "(3 forwards begun)" in said[0] and "(2 forwards begun)" in said[0]


def test_who_goes_on_takes_its_note_back(monkeypatch) -> None:
    with ranks(train_step, full_tensor) as watching:
        look(watching, 0.9)
        table = watching[0]._table
        assert table.check(["0", "1", "any"])
        monkeypatch.setattr(issuing, "runs", issuing.runs + 1)
        for each in watching:
            each.look(MINUTE)
        assert not table.check(["any"]) and not table.check(["0"])


def test_a_single_process_and_fake_ranks_start_no_thread() -> None:
    before = {
        id(thread) for thread in threading.enumerate()
    }  # another test's may not have ended yet
    with p3d.testing.fake_world(0, 4):
        stalls.say_where_ranks_wait()
    started = [thread.name for thread in threading.enumerate() if id(thread) not in before]
    assert "parallel3d-stalls" not in started


PROGRAM = """
import sys
from datetime import timedelta
import torch
from torch import distributed as dist, nn
import parallel3d as p3d
from parallel3d.guards import stalls

mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
torch.manual_seed(0)
model = p3d.parallelize(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), mesh)
rank = dist.get_rank()
model(torch.ones(4, 8)).sum().backward()
stalls.AFTER = timedelta(seconds=3)
if sys.argv[1] == "save" and rank == 0:
    p3d.checkpoint.save("run", model, None, step=1)
if sys.argv[1] == "evaluation":
    with torch.no_grad():
        for _ in range(3 - rank):
            model(torch.ones(4, 8))
    dist.barrier()
model(torch.ones(4, 8)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("save", ["in save (1 forward begun)", "in forward (2 forwards begun)"]),
        ("evaluation", ["(1 forward begun, 3 without gradients)", "in barrier"]),
    ],
)
def test_processes(tmp_path: Path, kind: str, texts: list[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    (port,) = free_ports(1)
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    where["PYTHONPATH"] = str(Path(p3d.__file__).parents[1])
    with (tmp_path / "said").open("w+") as said:
        started = [
            subprocess.Popen(
                [sys.executable, str(program), kind],
                env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=tmp_path,
                stderr=said,
            )
            for rank in range(2)
        ]
        try:
            end = time.monotonic() + 90
            text = ""
            while "guards.debug stops" not in text and time.monotonic() < end:
                time.sleep(0.2)
                text = (tmp_path / "said").read_text()
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert text.count("has been at one place for 3 s") == 1, text
    assert all(each in text for each in texts), text
