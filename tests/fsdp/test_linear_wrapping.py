"""The work of wrapping a model, and of walking through it later, grows as the number of units does.

Counted in calls, of Python's functions and of C's, not in time: the same on every machine.
"""

import gc
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world

PLAN = {"blocks.*.{up,gate}": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.gate, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 64)


def meta_model(blocks: int) -> Model:
    with torch.device("meta"):
        return Model(blocks)


def calls(action: Callable[[Model], object], model: Model) -> int:
    """How many calls ``action`` makes, at any depth."""
    made = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    gc.disable()  # what it calls is no part of it
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action(model)
    finally:
        sys.setprofile(before)
        gc.enable()
    return made


def check_linear(made: Callable[[int], Model], action: Callable[[Model], object]) -> None:
    """Twice as many units more make twice as many calls more."""
    action(made(2))  # what is done once in a process
    few, some, many = (calls(action, made(blocks)) for blocks in (4, 8, 16))
    assert many - some <= 2.02 * (some - few)


def each_block(model: Model, mesh: DeviceMesh) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model.embedding, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def one_list(model: Model, mesh: DeviceMesh) -> None:
    fully_shard(list(model.blocks), mesh=mesh)
    fully_shard(model, mesh=mesh)


WRAPPINGS = {
    "units": (MeshLayout(shard=64), each_block),
    "hsdp": (MeshLayout(replicate=8, shard=8), each_block),
    "list": (MeshLayout(shard=64), one_list),
    "parallelize": (MeshLayout(shard=64), parallelize),
    "named": (MeshLayout(shard=64), lambda m, mesh: parallelize(m, mesh, units=["blocks.*"])),
    "tp": (MeshLayout(shard=8, tp=8), lambda m, mesh: parallelize(m, mesh, tp_plan=PLAN)),
    "compile": (
        MeshLayout(shard=8, tp=8),
        lambda m, mesh: parallelize(m, mesh, tp_plan=PLAN, compile="eager"),
    ),
}


@pytest.mark.parametrize("way", WRAPPINGS)
def test_wrapping(way: str) -> None:
    layout, wrap = WRAPPINGS[way]
    with fake_world(rank=3, world_size=64):
        mesh = build_mesh(layout.resolve(64), device_type="cpu")
        check_linear(meta_model, lambda model: wrap(model, mesh))


WALKS = {
    "first": lambda model: fully_shard.state(model)._lazy_init(),
    "state_dict": lambda model: model.state_dict(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "zero_grad": lambda model: model.zero_grad(),
    "no_sync": lambda model: model.no_sync().__enter__(),
    "sync": lambda model: model.set_requires_gradient_sync(True),
}


@pytest.mark.parametrize("walk", WALKS)
def test_walking(walk: str) -> None:
    with fake_world(rank=3, world_size=64):
        mesh = build_mesh(MeshLayout(shard=64).resolve(64), device_type="cpu")
        check_linear(lambda blocks: each_block(meta_model(blocks), mesh), WALKS[walk])


def test_units_joined_by_a_tie_do_not_walk_through_each_other() -> None:
    """Each new unit takes the older ones over, so some of it is quadratic; looking at modules is not."""
    looked = []

    def tied(blocks: int) -> Model:
        model = meta_model(blocks)
        for block in model.blocks:
            block.up.weight = model.blocks[0].up.weight
        return model

    with fake_world(rank=3, world_size=64):
        mesh = build_mesh(MeshLayout(shard=64).resolve(64), device_type="cpu")
        for model in map(tied, (4, 8, 16)):
            with pytest.MonkeyPatch.context() as patch:
                seen: list[nn.Module] = []
                named = nn.Module.named_modules

                def counted(self, *args, named=named, seen=seen, **kwargs):
                    seen.append(self)
                    return named(self, *args, **kwargs)

                patch.setattr(nn.Module, "named_modules", counted)
                each_block(model, mesh)
            looked.append(len(seen))
    few, some, many = looked
    assert many - some <= 2.02 * (some - few)


@pytest.mark.parametrize("brought", ["plain", "dtensor"])
def test_a_mesh_is_cut_once_however_many_parameters(monkeypatch, brought: str) -> None:
    """Cutting an axis out of a mesh, or joining two, takes a millisecond."""
    made = []
    init = DeviceMesh.__init__

    def counted(self, *args, **kwargs) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    def model_of(blocks: int, tp: DeviceMesh) -> Model:
        model = meta_model(blocks)
        if brought != "plain":
            for block in model.blocks:
                local = torch.empty(8, 16, device="meta")
                weight = DTensor.from_local(local, tp, [Shard(0)], run_check=False)
                block.up.weight = nn.Parameter(weight)
        return model

    with fake_world(rank=3, world_size=64):
        mesh = build_mesh(MeshLayout(shard=8, tp=8).resolve(64), device_type="cpu")
        data = mesh if brought == "plain" else mesh["shard"]
        few, many = (model_of(blocks, mesh["tp"]) for blocks in (2, 16))
        each_block(few, data)
        monkeypatch.setattr(DeviceMesh, "__init__", counted)
        each_block(many, data)
    assert not made
