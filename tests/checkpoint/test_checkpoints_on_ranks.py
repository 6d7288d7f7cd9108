"""Saves and loads of several ranks: errors of one are errors of all, the background, random numbers."""

import json
import os
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.bounded import no_space
from _support.checkpoint.dcp_models import check_equal, everything
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import parallel3d as p3d
from parallel3d import MeshLayout
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.checkpoint import latest, load, save
from parallel3d.errors import CheckpointError
from parallel3d.testing import GlooPool

Sizes = tuple[int, int, int]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def build(sizes: Sizes, seed: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    mesh = p3d.build_mesh(MeshLayout(*sizes), device_type="cpu")
    model = p3d.parallelize(Net(), mesh, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 12).reshape(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def alike(value: Any) -> Any:
    """``value``, if it is the same on all ranks."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(each == found[0] for each in found), found
    return found[0]


def names(path: str) -> list[str]:
    dist.barrier()
    return sorted(os.listdir(path))


# -- errors


def one_cannot_write(path: str) -> None:
    model, optimizer = build((1, 2, 1), 1)
    train(model, optimizer)
    want = everything(model, optimizer)
    save(path, model, optimizer, step=1)
    train(model, optimizer)
    for rank in (0, 1):
        for async_ in (False, True):
            with no_space(dist.get_rank() == rank), pytest.raises(CheckpointError) as caught:
                save(path, model, optimizer, step=2, async_=async_).result()  # type: ignore[union-attr]
            text = alike(str(caught.value))
            assert f"on rank {rank}: " in text
            assert "No space left" in text
            assert names(path) == ["step-00000001"]
    # One rank alone has something that can't be kept; each has something else.
    bad = {"x": object()} if dist.get_rank() == 1 else {}
    for async_ in (False, True):
        with pytest.raises(CheckpointError, match=r"on rank 1: extra\['x'\] is a builtins.object"):
            save(path, model, optimizer, step=2, extra=bad, async_=async_).result()  # type: ignore[union-attr]
    bad = {f"x{dist.get_rank()}": object()}
    with pytest.raises(CheckpointError) as caught:
        save(path, model, optimizer, step=2, extra=bad)
    text = alike(str(caught.value))
    assert "on rank 0: extra['x0']" in text and "on rank 1: extra['x1']" in text
    assert names(path) == ["step-00000001"]
    load(path, model, optimizer)
    check_equal(everything(model, optimizer), want)


def test_one_rank_cannot_write(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(one_cannot_write, str(tmp_path), world_size=2, timeout=60)


def other_working_directories(path: str) -> None:
    """A relative path is the first rank's; and so is what is wrong with it."""
    rank, here = dist.get_rank(), os.getcwd()
    model, optimizer = build((1, 2, 1), 1)
    os.makedirs(f"{path}/{rank}")
    os.chdir(f"{path}/{rank}")
    try:
        for async_ in (False, True):
            saved: Any = save("run", model, optimizer, step=1, async_=async_)
            want = Path(path, "0", "run", "step-00000001")
            assert (saved.result() if async_ else saved) == want
        assert load("run", model, optimizer).path == latest("run") == want
        with pytest.raises(CheckpointError, match="path is b'run'"):
            load(b"run" if rank else "run", model)  # type: ignore[arg-type]
    finally:
        os.chdir(here)
    assert names(f"{path}/1") == []


def test_other_working_directories(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(other_working_directories, str(tmp_path), world_size=2, timeout=60)


def one_cannot_load(path: str) -> None:
    model, optimizer = build((1, 2, 1), 1)
    train(model, optimizer)
    save(path, model, optimizer, step=1)
    other, another = build((1, 2, 1), 2)
    train(other, another)
    want = everything(other, another)
    rank = dist.get_rank()
    for wrong in (3, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)):
        with pytest.raises(CheckpointError, match="on rank 1: "):
            load(path, other, wrong if rank == 1 else another)  # type: ignore[arg-type]
        check_equal(everything(other, another), want)
    with pytest.raises(CheckpointError, match=r"on rank 0: .*has no tensor extra"):
        load(path, other, another, extra={"x": torch.ones(2)} if rank == 0 else None)
    check_equal(everything(other, another), want)
    load(path, other, another)
    check_equal(everything(other, another), everything(model, optimizer))


def test_one_rank_cannot_load(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(one_cannot_load, str(tmp_path), world_size=2, timeout=60)


class Stateful(nn.Linear):
    """On rank 1 its state can't be set."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]
        if dist.get_rank() == 1 and self.count == 13:
            raise RuntimeError("no thirteen")


def extra_state_of_one(path: str) -> None:
    model = Stateful(2, 2)
    model.count = 13
    save(path, model, step=1)
    model.count = 4
    with torch.no_grad():
        model.weight.fill_(3.0)
    with pytest.raises(CheckpointError, match="on rank 1: RuntimeError: no thirteen"):
        load(path, model)
    assert model.count == 4 and bool((model.weight == 3.0).all())
    model.count = 12
    save(path, model, step=2)
    model.count = 1
    load(path, model)
    assert model.count == 12


def test_extra_state_is_taken_back(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(extra_state_of_one, str(tmp_path), world_size=2, timeout=60)


# -- in the background


def background(path: str) -> None:
    model, optimizer = build((1, 2, 1), 1)
    train(model, optimizer)
    extra = {"list": [1], "tensor": torch.ones(3)}
    want = everything(model, optimizer)
    future = save(path, model, optimizer, step=1, extra=extra, async_=True)
    assert not future.cancel()  # type: ignore[union-attr]
    for _ in range(5):  # training goes on
        train(model, optimizer)
    extra["list"].append(2)  # type: ignore[union-attr]
    extra["tensor"].fill_(7.0)  # type: ignore[union-attr]
    later = everything(model, optimizer)
    second = save(path, model, optimizer, step=6, async_=True)  # waits for the first
    assert future.done() and not isinstance(future, Path)  # type: ignore[union-attr]
    train(model, optimizer)
    assert latest(path) == second.result()  # type: ignore[union-attr]
    load(path, model, optimizer)
    check_equal(everything(model, optimizer), later)
    info = load(future.result(), model, optimizer)  # type: ignore[union-attr]
    check_equal(everything(model, optimizer), want)
    assert info.extra["list"] == [1] and torch.equal(info.extra["tensor"], torch.ones(3))
    # Errors nobody has asked for come at the next call; on all ranks, also where one has asked.
    for call in (
        lambda: save(path, model, step=9),
        lambda: load(path, model),
        lambda: latest(path),
    ):
        with no_space(dist.get_rank() == 1):
            failed = save(path, model, optimizer, step=8, async_=True)
            if dist.get_rank() == 0:
                assert failed.exception() is not None  # type: ignore[union-attr]
            else:
                while not failed.done():  # type: ignore[union-attr]
                    pass
        with pytest.raises(CheckpointError, match="No space left"):
            call()
        call()
    with no_space():
        failed = save(path, model, optimizer, step=8, async_=True)
        with pytest.raises(CheckpointError, match="No space left"):
            failed.result()  # type: ignore[union-attr]
    call()  # all have been told


def test_background(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(background, str(tmp_path), world_size=2, timeout=60)


def described_while_gathered(path: str) -> None:
    """What checkpoint.json says is of the time of the call, not of when it is written."""
    model, optimizer = build((1, 2, 1), 1)
    go = threading.Event()
    original = os.write

    def wait(*args: Any) -> int:
        assert go.wait(30)
        return original(*args)

    os.write = wait  # type: ignore[assignment]
    try:
        future = save(path, model, optimizer, step=1, async_=True)
        model.unshard()  # shows plain parameters
        go.set()
        folder = future.result()  # type: ignore[union-attr]
    finally:
        os.write = original
    info = json.loads((folder / "checkpoint.json").read_text())
    assert info["mesh"] == {"replicate": 1, "shard": 2, "tp": 1} and "a.weight" in info["plan"]
    assert load(path, model, optimizer).rng == "restored"


def test_described_while_gathered(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(described_while_gathered, str(tmp_path), world_size=2, timeout=60)


# -- sharded values beside the model


def sharded_extra(path: str) -> None:
    model, optimizer = build((1, 2, 1), 1)
    mesh = p3d.build_mesh(MeshLayout(1, 2, 1), device_type="cpu")["shard"]
    whole = torch.arange(15.0).reshape(5, 3)
    ema = p3d.optim.EMA(model, 0.5)
    train(model, optimizer)
    ema.update()
    average = {n: t.full_tensor().clone() for n, t in ema.state_dict()["average"].items()}
    extra = {"table": distribute_tensor(whole, mesh, [Shard(0)]), "ema": ema.state_dict()}
    save(path, model, optimizer, step=1, extra=extra)

    other, another = build((1, 2, 1), 2)
    again = p3d.optim.EMA(other, 0.5)
    target = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)])
    info = load(path, other, another, extra={"table": target, "ema": again.state_dict()})
    assert torch.equal(target.full_tensor(), whole)
    assert info.extra["table"].placements == (Shard(1),)
    again.load_state_dict(info.extra["ema"])
    assert again.updates == 1
    for name, value in again.state_dict()["average"].items():
        assert torch.equal(value.full_tensor(), average[name])
    # Whole, where nothing is given to read into.
    info = load(path, other, another)
    assert torch.equal(info.extra["table"], whole) and not isinstance(info.extra["table"], DTensor)
    third = p3d.optim.EMA(other, 0.5)
    third.load_state_dict(info.extra["ema"])
    for name, value in third.state_dict()["average"].items():
        assert torch.equal(value.full_tensor(), average[name])
    one = distribute_tensor(torch.zeros(5, 3), mesh, [Replicate()])
    load(path, other, another, extra={"table": one})
    assert torch.equal(get_local_tensor(one), whole)


def test_sharded_extra(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(sharded_extra, str(tmp_path), world_size=2, timeout=60)


# -- gathered copies


def gathered_copies(path: str, options: dict[str, Any]) -> None:
    """What units have gathered and kept is gathered again after load."""
    x = torch.ones(2, 6)
    model, optimizer = build((1, 2, 1), 1, **options)
    train(model, optimizer)
    with torch.no_grad():
        want = model(x)
    save(path, model, optimizer, step=1)
    other, another = build((1, 2, 1), 2, **options)
    for mode in (other.eval, other.train):
        mode()
        with torch.no_grad():
            other(x)
            load(path, other, another)
            assert torch.equal(other(x), want)
            train_grad = torch.enable_grad()
            with train_grad:
                train(other, another)
            load(path, other, another)
            assert torch.equal(other(x), want)
        with torch.inference_mode():
            other(x)
            load(path, other, another)
            assert torch.equal(other(x), want)
        with torch.enable_grad():
            train(other, another)


@pytest.mark.parametrize("kept", [True, False])
def test_gathered_copies(gloo_pool: GlooPool, tmp_path: Path, kept: bool) -> None:
    options = {"reshard_after_forward": not kept}
    gloo_pool.run(gathered_copies, str(tmp_path), options, world_size=2, timeout=60)


# -- random numbers


def draws() -> list[float]:
    return [*torch.rand(2).tolist(), random.random(), torch.rand(1).item()]


def random_states(path: str) -> None:
    model, optimizer = build((1, 2, 1), 1)
    torch.manual_seed(100 + dist.get_rank())
    random.seed(200 + dist.get_rank())
    save(path, model, optimizer, step=1)
    want = draws()
    assert load(path, model, optimizer).rng == "restored"
    assert draws() == want  # each its own
    # On another mesh nothing is known of them, but from the integers of seed_step.
    replicated, its = build((2, 1, 1), 1)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert load(path, replicated, its).rng == "left"
    assert torch.equal(torch.get_rng_state(), before)
    mesh = p3d.build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
    p3d.seed_step(mesh, seed=5, step=3)
    save(path, model, optimizer, step=3)
    torch.rand(5)
    assert load(path, replicated, its).rng == "reseeded"
    found = torch.rand(3)
    p3d.seed_step(p3d.build_mesh(MeshLayout(2, 1, 1), device_type="cpu"), seed=5, step=3)
    assert torch.equal(torch.rand(3), found)


def test_random_states(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(random_states, str(tmp_path), world_size=2, timeout=60)


# -- buffers


def buffers_that_differ(path: str) -> None:
    """Those of the first rank are stored, and it says so; where they are equal, nobody says anything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model.register_buffer("mine", torch.full((2,), float(dist.get_rank())), persistent=False)
    p3d.parallelize(model, p3d.build_mesh(MeshLayout(1, 2, 1), device_type="cpu"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step, async_ in enumerate((False, False, True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saved = save(path, model, step=step, async_=async_)
            if async_:
                saved.result()  # type: ignore[union-attr]
        said = [str(each.message) for each in caught if "differ between ranks" in str(each.message)]
        assert len(said) == (step > 0 and dist.get_rank() == 0), said
        assert all("buffers 1.running_mean, 1.running_var differ" in text for text in said)
        model(torch.randn(4, 6, generator=generator))


def test_buffers_that_differ(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(buffers_that_differ, str(tmp_path), world_size=2)
