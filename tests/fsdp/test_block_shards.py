"""fully_shard(block=...): shards are whole blocks of the flattened parameter."""

import functools
import math
from pathlib import Path

import pytest
import torch
from _support.ep.models import Mixture
from _support.ep.models import batch as mixture_batch
from _support.ep.models import loss as mixture_loss
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d import Checks, MeshLayout, Parallel3dError, Sharding, build_mesh, parallelize
from parallel3d._layout.packed import PackedShard
from parallel3d._torch.dtensor import get_local_tensor
from parallel3d.fsdp import fully_shard, gather
from parallel3d.fsdp import layout as layouts
from parallel3d.testing import GlooPool, assert_parity, fake_world, local_world, shards_of

BLOCK = 16
MESHES = [
    {"shard": 4},
    {"replicate": 2, "shard": 3},
    {"shard": 3, "tp": 2},
    {"replicate": 2, "shard": 2, "tp": 2},
    {"shard": 3, "tp": 4},
]
LARGE = {  # hidden, of keys and values, of the MLP, vocabulary: see docs/optimizers.md
    "Llama 3 8B": (4096, 1024, 14336, 128256),
    "Llama 3 70B": (8192, 1024, 28672, 128256),
    "Qwen 3 32B": (5120, 1024, 25600, 151936),
    "Gemma 2 9B": (3584, 2048, 14336, 256000),
    "GPT-2 XL": (1600, 1600, 6400, 50257),
}
build = functools.partial(Lm, dim=12, hidden=32)


@pytest.fixture
def small(monkeypatch) -> None:
    """Small parameters count as large ones."""
    monkeypatch.setattr(layouts, "LEAST_QUANTIZED", 0)
    monkeypatch.setattr(layouts, "MOST_BLOCK_PADDING", 8)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((100, 512), (1, 256)),
        ((100, 768), (1, 256)),
        ((96, 256), (1, 256)),
        ((96, 384), (0, 2)),
        ((64, 1600), (0, 4)),
        ((66, 1600), None),  # 412.5 blocks
        ((4096,), (0, 256)),
        ((4000,), None),
        ((8, 64, 100), (1, 64)),
        ((64, 6, 100), (0, 32)),
        ((), None),
    ],
)
def test_where_blocks_end(shape, found) -> None:
    assert layouts.block_rows(shape, 256) == found
    if found is not None:
        dim, rows = found
        assert rows * math.prod(shape[dim + 1 :]) % 256 == 0


@pytest.mark.parametrize(
    ("shape", "cut", "ranks", "found"),
    [
        ((4096, 4096), (), 64, (0, 1)),
        ((4096,), (), 8, (0, 1)),  # two blocks each
        ((4096,), (), 64, (0, 256)),  # a block each, 48 ranks have none
        ((4096,), (), 1024, (0, 1)),  # would be 64 times as large
        ((768,), (), 4, (0, 1)),  # small
        ((1600, 1600), (), 8, (0, 1)),
        ((1600, 1600), (), 64, (0, 1)),  # 28 rows for 25: too much padding
        ((51200, 1600), (), 96, (0, 4)),  # 536 rows for 534
        ((6, 16, 4096), (), 4, (0, 1)),
        ((11008, 4096), (0,), 8, (0, 1)),
        ((51200, 1600), (0,), 96, (0, 4)),  # a part of the tp ranks
        ((51201, 1600), (0,), 96, (0, 1)),
        ((4096, 11008), (1,), 8, (0, 1)),
        ((51200, 1600), (1,), 96, (0, 1)),  # tp divides the blocks
        ((25601, 256), (), 64, (0, 1)),
    ],
)
def test_which_dim_and_rows(shape, cut, ranks, found) -> None:
    assert layouts.block_dim(shape, shape, range(len(shape)), cut, ranks, 256) == found


@pytest.mark.parametrize("ranks", [2, 3, 8, 24, 64, 100, 256, 1000])
def test_padding_is_at_most_half_a_percent(ranks) -> None:
    """A block of five models, with norms and biases; what is added to what ``torch.chunk`` pads."""
    for d, kv, mlp, vocab in LARGE.values():
        matrices = [(d, d), (kv, d), (kv, d), (d, d), (mlp, d), (mlp, d), (d, mlp)]
        vectors = [(d,), (d,), (d,), (kv,), (mlp,)]
        for shapes in ([*matrices, *vectors], [(vocab, d)]):
            before = after = 0
            for shape in shapes:
                dim, rows = layouts.block_dim(shape, shape, range(len(shape)), (), ranks, 256)
                before += math.prod(layouts.padded_shape(shape, 0, ranks))
                after += math.prod(layouts.padded_shape(shape, dim, ranks, rows))
            assert after <= before + sum(map(math.prod, shapes)) / 200


def test_which_weights_of_large_models_are_divided() -> None:
    """As ``docs/optimizers.md`` says."""
    divided = set()
    for name, (d, kv, mlp, vocab) in LARGE.items():
        weights = {
            "q": (d, d),
            "kv": (kv, d),
            "up": (mlp, d),
            "down": (d, mlp),
            "embed": (vocab, d),
        }
        for weight, shape in weights.items():
            by = 1 if weight == "down" else 0
            for ranks, tp in [(8, 1), (64, 1), (256, 1), (8, 2), (8, 4), (8, 8)]:
                largest = list(shape)
                largest[by] = -(-largest[by] // tp)
                cut = (by,) if tp > 1 else ()
                dim, rows = layouts.block_dim(shape, largest, (0, 1), cut, ranks, 256)
                last, needed = layouts.block_rows(shape, 256) or (2, 1)
                chunk = layouts.padded_shape(largest, dim, ranks, rows)[dim] // ranks
                held = {d: largest[d] for d in cut} | {dim: chunk}
                if last < 2 and any(
                    d > last or (d == last and rows % needed) for d, rows in held.items()
                ):
                    divided.add((name, weight, ranks, tp))
    others = {found for found in divided if found[0] != "GPT-2 XL"}
    assert others == {("Qwen 3 32B", "down", 8, 8)}
    mine = {(weight, ranks) for name, weight, ranks, tp in divided - others if tp == 1}
    assert not any(ranks == 8 for _, ranks in mine)
    assert {weight for weight, ranks in mine if ranks == 64} == {"q", "kv"}


def whole_blocks(model: nn.Module) -> dict[str, bool]:
    """Whether each shard of a parameter is whole blocks, by its elements' numbers in the plain tensor."""
    found = {}
    for name, param in model.named_parameters():
        numbers = torch.arange(param.numel()).view(param.shape)
        found[name] = True
        for _, box, local in shards_of(param):
            held = numbers[box].flatten()
            assert held.shape == local.flatten().shape
            starts = held[::BLOCK]
            runs = starts.view(-1, 1) + torch.arange(BLOCK)
            found[name] &= bool(
                held.numel() % BLOCK == 0
                and torch.equal(runs.flatten(), held)
                and not (starts % BLOCK).any()
            )
    return found


@pytest.mark.parametrize("sizes", [*MESHES, {"shard": 3, "cp": 2}], ids=str)
def test_shards_are_whole_blocks(sizes, small) -> None:
    """Of what has whole blocks: the rest is a weight that tp cuts by columns, and odd sizes."""
    layout = MeshLayout(**sizes)
    with local_world(layout.world_size) as world:
        with world.paused():
            model = build()
        parallelize(
            model,
            build_mesh(layout, device_type="cpu"),
            LM_PLAN if layout.tp > 1 else None,
            fsdp=Sharding(block=BLOCK),
            checks=Checks(audit=False),
        )
        found = whole_blocks(model)
        divided = {name for name, whole in found.items() if not whole}
        odd = {n for n, p in model.named_parameters() if p.numel() % BLOCK}
        by_tp = ("up.bias", "down.weight") if layout.tp == 4 else ()
        assert divided == odd | {f"layers.{n}.{name}" for n in (0, 1) for name in by_tp}
        placed = [each for param in model.parameters() for each in param.placements]
        assert any(isinstance(placement, PackedShard) for placement in placed)
        plain = {name: param.full_tensor() for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            for axis in param.device_mesh.mesh_dim_names:
                again = gather(param, axis)
                for (
                    other
                ) in param.device_mesh.mesh_dim_names:  # torch 2.11 can't, of a strided shard
                    again = gather(again, other)
                assert torch.equal(again.to_local(), plain[name]), (name, axis)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_as_the_plain_model(sizes, small) -> None:
    plan = LM_PLAN if "tp" in sizes else None
    assert_parity(
        build,
        tokens,
        MeshLayout(**sizes),
        loss=lm_loss,
        tp_plan=plan,
        fsdp=Sharding(block=BLOCK),
        checks=Checks(audit=False),
        micro_batches=2,
    )


@pytest.mark.parametrize(
    "sizes", [{"shard": 4, "ep": 2}, {"shard": 2, "tp": 2, "ep": 2}, {"shard": 3}], ids=str
)
def test_experts(sizes, small) -> None:
    layout = MeshLayout(**sizes)
    plan = {"layers.*.shared": "colwise_gather_output"} if layout.tp > 1 else None
    assert_parity(
        Mixture,
        mixture_batch,
        layout,
        loss=mixture_loss,
        tp_plan=plan,
        fsdp=Sharding(block=BLOCK),
        checks=Checks(audit=False),
        steps=2,
        fp32=False,
    )


@pytest.mark.parametrize("block", [0, 3, 8192, True, 256.0, "256"])
def test_other_blocks_are_errors(block) -> None:
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
        for call in (
            lambda: fully_shard(build(), mesh=mesh, block=block),
            lambda: parallelize(build(), mesh, fsdp=Sharding(block=block)),
        ):
            with pytest.raises(Parallel3dError, match=r"block is .*power of two from 2 to 4096"):
                call()
        with pytest.raises(Parallel3dError, match='block=256 is not possible with engine="torch"'):
            parallelize(build(), mesh, fsdp=Sharding(block=256), engine="torch")


def trained(block: int | None, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = build_mesh(MeshLayout(shard=dist.get_world_size()), device_type="cpu")
    model = parallelize(build(), mesh, fsdp=Sharding(block=block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        lm_loss(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    keys = ("exp_avg", "exp_avg_sq")
    states = [optimizer.state[p][key] for p in model.parameters() for key in keys]
    return [t.full_tensor() for t in (*model.parameters(), *states)]


def saved_without_blocks(path: str) -> None:
    """What was saved with blocks is loaded without, and the reverse."""
    layouts.LEAST_QUANTIZED, layouts.MOST_BLOCK_PADDING = 0, 8
    for number, (before, after) in enumerate(((None, BLOCK), (BLOCK, None))):
        model, optimizer = trained(before, 2)
        other, fresh = trained(after, 1)
        locals_ = [[get_local_tensor(p).shape for p in m.parameters()] for m in (model, other)]
        assert locals_[0] != locals_[1] or dist.get_rank() == 1
        p3d.checkpoint.save(f"{path}/{number}", model, optimizer, step=2)
        p3d.checkpoint.load(f"{path}/{number}", other, fresh)
        assert all(map(torch.equal, whole(other, fresh), whole(model, optimizer)))


@pytest.mark.slow
def test_checkpoints_of_other_shards(gloo_pool: GlooPool, tmp_path: Path) -> None:
    gloo_pool.run(saved_without_blocks, str(tmp_path), world_size=3)
