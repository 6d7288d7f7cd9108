"""Ranks that call save or load with other arguments, something else, late or not at all: an error on all."""

import os
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.launch import launch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

import parallel3d as p3d
from parallel3d import MeshLayout, checkpoint, guards
from parallel3d._torch.groups import group_timeout, set_group_timeout
from parallel3d.checkpoint import latest, load, save
from parallel3d.checkpoint.ranks import ranks_of
from parallel3d.errors import CheckpointError, PeerFailureError
from parallel3d.testing import GlooPool


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    mesh = p3d.build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    return p3d.parallelize(model, mesh)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def different_arguments(path: str) -> None:
    rank = dist.get_rank()
    model, run = build(), f"{path}/run"
    optimizer = adamw(model)
    save(run, model, optimizer, step=1)
    with pytest.raises(
        CheckpointError, match=r"save: step differs: 2 on rank 0, 3 on rank 1; give"
    ):
        save(run, model, step=2 + rank)
    with pytest.raises(CheckpointError, match=r"save: only differs"):
        save(run, model, step=2, only="trainable" if rank else None)
    with pytest.raises(
        CheckpointError, match=r"save: optimizers differs: 1 on rank 0, 0 on rank 1"
    ):
        save(run, model, None if rank else optimizer, step=2)
    with pytest.raises(CheckpointError, match=r"save: step differs"):
        save(run, model, step=2 + rank, async_=True).result()
    other = build(1)
    before = [p.detach().to_local().clone() for p in other.parameters()]
    fresh = adamw(other)
    with pytest.raises(
        CheckpointError, match=r"load: optimizers differs: 1 on rank 0, 0 on rank 1"
    ):
        load(run, other, None if rank else fresh)
    after = [p.detach().to_local() for p in other.parameters()]
    assert all(map(torch.equal, before, after))
    assert not fresh.state
    assert os.listdir(run) == ["step-00000001"]


@pytest.mark.smoke
def test_different_arguments(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(different_arguments, str(tmp_path), world_size=2)


def group_destroyed(path: str) -> None:
    model, run = build(), f"{path}/run"
    save(run, model, step=1, keep=1)
    under_way = save(run, model, step=2, keep=1, async_=True)
    dist.destroy_process_group()
    saved = under_way.exception(60) is None  # it was faster than that
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/again", rank=int(os.environ["RANK"]), world_size=2
    )
    told = [False, False]
    dist.all_gather_object(told, saved)
    step = load(run, model).step
    assert step == 2 or (step == 1 and not any(told))
    found = latest(run)
    assert found is not None
    assert found.name == f"step-0000000{step}"


def test_group_destroyed_during_a_save(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """What is there stays, and nobody is told that the new one was written."""
    gloo_pool.run(group_destroyed, str(tmp_path), world_size=2)


def group_destroyed_on_one_rank_before_it_plans(path: str) -> tuple[str, float]:
    model, run, destroyed = build(), f"{path}/run", threading.Event()
    save(run, model, step=1)
    plain = dcp.save

    def later(*args: Any, **kwargs: Any) -> Any:
        destroyed.wait(30)
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(dcp, "save", later)
        begun = time.monotonic()
        under_way = save(run, model, step=2, async_=True)
        if dist.get_rank():
            dist.destroy_process_group()
            destroyed.set()
        error = under_way.exception(60)
        taken = time.monotonic() - begun
    ended = Path(path, "rank 0 has ended")
    if dist.is_initialized():
        ended.touch()
        dist.destroy_process_group()
    while not ended.exists():  # the end of this process would wake the other one too
        time.sleep(0.01)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{path}/again", rank=rank, world_size=2)
    assert (
        load(run, build()).step == 1
    )  # the ranks have different errors, and one doesn't ask for the other's
    return str(error), taken


@pytest.mark.xdist_group("gloo")
@pytest.mark.slow(every=True)
def test_group_destroyed_on_one_rank_before_it_plans(tmp_path: Path) -> None:
    """DCP then takes that rank for a process of its own; the other one must not wait for it."""
    ran = launch(after_init, group_destroyed_on_one_rank_before_it_plans, str(tmp_path), ranks=2)
    (waits, waited), (destroyed, _) = (result for result, _ in ran)
    assert waited < 30
    assert "1 rank took part: the process group was destroyed meanwhile" in destroyed
    assert "closed" in waits.lower() or "reset" in waits.lower()
    assert [each.name for each in (tmp_path / "run").glob("step-*")] == ["step-00000001"]


def after_init(function: Any, *args: Any) -> Any:
    dist.init_process_group("gloo")
    return function(*args)


def outcome(function: Any) -> tuple[str, str, float]:
    """(type, text, seconds) of what it raises."""
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def fails_before_the_first_save(path: str, saves: int) -> tuple[str, str, float]:
    dist.init_process_group("gloo")
    model = nn.Linear(2, 2)

    def run() -> None:
        with guards.watch(grace=timedelta(seconds=1)):
            for step in range(saves):
                checkpoint.save(path, model, step=step)
            if dist.get_rank() == 1:
                raise LookupError("no more samples")
            checkpoint.save(path, model, step=9)

    return outcome(run)


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("saves", [0, 1])
def test_one_fails_before_it(tmp_path: Path, saves: int) -> None:
    """Rank 0 waits for it in its first save, or in its second."""
    found = launch(fails_before_the_first_save, str(tmp_path), saves, ranks=2, timeout=30)
    (waits, text, seconds), (fails, _, _) = (result for result, _ in found)
    assert fails == "LookupError"
    assert waits == PeerFailureError.__name__ and seconds < 15
    assert "rank 1 failed first" in text and "no more samples" in text


def comes_too_late(path: str, with_watch: bool) -> tuple[str, str, float]:
    model = nn.Linear(2, 2)
    limit = timedelta(seconds=1)
    timeouts = guards.Timeouts(save=limit)

    def run() -> None:
        with guards.watch(timeouts=timeouts) if with_watch else nullcontext():
            checkpoint.save(path, model, step=1)

    assert dist.group.WORLD is not None
    before = group_timeout()
    if not with_watch:
        set_group_timeout(dist.group.WORLD, limit)
    if dist.get_rank() == 1:
        time.sleep(3)
    found = outcome(run)
    set_group_timeout(dist.group.WORLD, before)
    dist.barrier()
    checkpoint.save(path, model, step=1)  # both have come
    group = ranks_of(model, "save").group
    assert group is not None and group_timeout(group) == timedelta(hours=2)
    return found


@pytest.mark.slow
def test_one_comes_too_late(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """It is waited for as long as ``Timeouts(save=)`` says, or else as the default group waits."""
    for with_watch in (True, False):
        path = str(tmp_path / str(with_watch))
        found = gloo_pool.run(comes_too_late, path, with_watch, world_size=2, timeout=40)
        for error, text, seconds in found:
            told = [CheckpointError.__name__]
            if with_watch:  # the late one hears of it in the store or by the watch
                told.append(PeerFailureError.__name__)
            assert error in told and seconds < 8
            assert "rank 1 of 2 did not report 'checkpoint' within 1 s" in text


CALLS = {
    "save": lambda path, model: checkpoint.save(path + "/a", model, step=2),
    "async save": lambda path, model: checkpoint.save(  # type: ignore[union-attr]
        path + "/a", model, step=2, async_=True
    ).result(),
    "load": lambda path, model: checkpoint.load(path + "/a", model),
    "latest": lambda path, model: checkpoint.latest(path + "/a"),
    "save_hf": lambda path, model: checkpoint.save_hf(path + "/hf", model),
    "load_hf": lambda path, model: checkpoint.load_hf(path + "/hf", model),
    "save_dcp": lambda path, model: checkpoint.save_dcp(path + "/dcp", model),
    "load_dcp": lambda path, model: checkpoint.load_dcp(path + "/dcp", model),
    "save_torch": lambda path, model: checkpoint.save_torch(path + "/t.pt", model),
    "load_torch": lambda path, model: checkpoint.load_torch(path + "/t.pt", model),
}


def other_calls(path: str) -> list[tuple[str, str, str]]:
    """(call of rank 0, of rank 1, error) of calls that don't belong together."""
    model = nn.Linear(2, 2)
    found = []
    names = list(CALLS)
    for one, two in zip(names, names[2:] + names[:2], strict=True):
        mine = one if dist.get_rank() == 0 else two
        error, text, _ = outcome(lambda mine=mine: CALLS[mine](path, model))
        assert error == CheckpointError.__name__, (one, two, error, text)
        found.append((one, two, text))
    checkpoint.save(path + "/a", model, step=1)
    checkpoint.load(path + "/a", model)
    return found


def test_other_calls(gloo_pool: GlooPool, tmp_path: Path) -> None:
    first, second = gloo_pool.run(other_calls, str(tmp_path), world_size=2, timeout=40)
    assert first == second
    for one, two, text in first:
        one, two = (name.removeprefix("async ") for name in (one, two))
        assert f"{one} on rank 0" in text and f"{two} on rank 1" in text, text
