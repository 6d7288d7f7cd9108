"""Random right configurations, none of which is blamed."""

import random
from typing import Any

import pytest
import torch
from _support.audit.models import PLAN, VOCABULARY, WIDTH, Block, Net, loss_of
from torch import nn

import parallel3d as p3d
from parallel3d import MeshLayout, PlanError
from parallel3d.testing import GlooPool

LAYOUTS = [
    MeshLayout(replicate, shard, cp=cp, tp=tp)
    for replicate in (1, 2, 4)
    for shard in (1, 2, 4)
    for cp in (1, 2, 4)
    for tp in (1, 2, 4)
    if replicate * shard * cp * tp == 4
]


class Scaled(Net):
    """Tied, with a buffer, a parameter that it holds itself, and blocks of two widths."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.head.weight = self.tok.weight
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("offset", torch.linspace(-1, 1, WIDTH))

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        return super().trunk(x * self.gain + self.offset) / 2


class Recurrent(Net):
    """Its first block runs twice."""

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        return super().trunk(self.layers[0](x))


class Partly(Net):
    """Its first block is frozen, and its last is not reached by the loss."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.layers[0].requires_grad_(False)

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        self.layers[2](x)
        return x


MODELS = [Net, Scaled, Recurrent, Partly, lambda: Net(lambda: Block(0.3), 3)]


def options_of(draw: random.Random, layout: MeshLayout) -> dict[str, Any]:
    options: dict[str, Any] = {
        "activation_checkpointing": draw.choice([False, False, True, "selective", "offload"]),
        "compile": draw.random() < 0.1 and "aot_eager",
        "reshard_after_forward": draw.choice([None, True, False]),
        "mp_policy": draw.choice(
            [None, None, p3d.MixedPrecisionPolicy(torch.bfloat16, torch.float32)]
        ),
    }
    if layout.tp > 1:
        options["tp_plan"] = draw.choice([PLAN, "auto"])
    if layout.cp > 1:
        options["context_parallel"] = draw.choice(["auto", "ulysses", "gather", "ring"])
    if layout.replicate > 1 and layout.shard > 1:
        options["shard_optimizer_over_replicate"] = draw.random() < 0.5
    return options


def train(seed: int) -> None:
    draw = random.Random(seed)
    layout = draw.choice(LAYOUTS)
    options, build = options_of(draw, layout), draw.choice(MODELS)
    dtype = draw.choice([torch.float32, torch.float64])
    rows, length, micro_batches = draw.randint(1, 3), draw.randint(9, 40), draw.randint(1, 2)
    mesh = p3d.build_mesh(layout, device_type="cpu")
    rank = layout.data_rank(torch.distributed.get_rank())
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    said = f"seed {seed}: {layout}, {options}, {build}, {dtype}, {rows} x {length}, {micro_batches}"
    try:
        torch.manual_seed(seed)
        model = p3d.parallelize(build().to(dtype), mesh, checks=p3d.Checks(audit=True), **options)
        for micro in range(micro_batches):
            if layout.data_size * layout.cp > 1:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            whole = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
            batch = p3d.cp.shard_batch((whole[:, :-1], whole[:, 1:]), mesh, pad=(0, -100))
            loss_of(model, batch).backward()
    except Exception as error:
        selects = options["activation_checkpointing"] == "selective" and options["compile"]
        if isinstance(error, PlanError) and selects and min(layout.cp, layout.tp) > 1:
            return  # refused
        raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error
    report = p3d.audit.report(model)
    assert report is not None and sum(report.compared.values()) > 10, said


def train_all(seeds: list[int]) -> None:
    for seed in seeds:
        train(seed)


FEW, ALL = range(6), range(6, 300, 14)


@pytest.mark.parametrize("seed", FEW)
def test_few(gloo_pool: GlooPool, seed: int) -> None:
    gloo_pool.run(train, seed, world_size=4)


@pytest.mark.full
@pytest.mark.parametrize("first", ALL)
def test_all(gloo_pool: GlooPool, first: int) -> None:
    gloo_pool.run(train_all, list(range(first, min(first + 14, 300))), world_size=4, timeout=300.0)
