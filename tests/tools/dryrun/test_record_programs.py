"""Whole programs in a dry run: this package's and torch's, and what programs do beside training."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _support.models import lm_loss
from _support.tools.dryrun.programs import (
    WORLD,
    at_rest,
    batch,
    by_axis,
    cuda_mesh,
    own,
    own_mesh,
    tied_lm,
    torchs,
)
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset

import parallel3d as p3d
from parallel3d.errors import DryRunError
from parallel3d.tools.dryrun.record import record
from parallel3d.tools.dryrun.result import DryRun
from parallel3d.tools.dryrun.warnings import all_warnings

RANK = 3


def run(program: Callable[[], object], **options) -> DryRun:
    return record(program, WORLD, RANK, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        lm_loss(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(make: Callable[[], nn.Module]) -> DryRun:
    def program() -> None:
        model = make()
        train(model, torch.optim.AdamW(model.parameters()))

    return run(program)


@pytest.fixture(scope="module")
def plain() -> DryRun:
    """Two steps of this package's engine."""
    return trained(own)


@pytest.mark.slow
def test_nccl_and_a_mesh_on_cuda_are_played(plain: DryRun) -> None:
    found = trained(lambda: own(mesh=cuda_mesh()))
    assert found.mesh == {"replicate": 2, "shard": 2, "tp": 2}
    assert found.axis_ranks == {"replicate": (3, 7), "shard": (1, 3), "tp": (2, 3)}
    assert found.collectives == plain.collectives


def test_dropout_under_tp() -> None:
    """Whose ranks compare their generators' states, which they do not know here."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.drop(self.up(x)))

    def program() -> None:
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=2, tp=2))
        model = p3d.parallelize(Dropped(), mesh, {"up": "colwise", "down": "rowwise"})
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()

    assert record(program, 4).steps == 2


@pytest.mark.slow
def test_torchs_own_engine_has_axes_and_the_same_memory_at_rest(plain: DryRun) -> None:
    found = trained(lambda: torchs(cuda_mesh()))
    assert at_rest(found).by_kind == at_rest(plain).by_kind
    assert {p.name: p.local_shape for p in found.parameters} == {
        p.name: p.local_shape for p in plain.parameters
    }
    steps = [call for call in found.collectives if call.op not in ("scatter", "broadcast")]
    assert {(c.op, c.axis) for c in steps} == {(c.op, c.axis) for c in plain.collectives}
    reduced = by_axis(found, "reduce_scatter")
    assert len(reduced["shard"]) == 2 * 3  # steps x (blocks and the root)


class Rows(Dataset):
    """Tokens, and floats that decide how the program goes on."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((6,), index), torch.full((3,), float(index))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_reads_real_data(workers: int) -> None:
    seen: list[float] = []

    def program() -> None:
        model = own()
        optimizer = torch.optim.SGD(model.parameters())
        for tokens, floats in DataLoader(Rows(), batch_size=4, num_workers=workers):
            assert int(tokens[1, 0]) == int(floats[1, 0])
            seen.append(float(floats.sum()))
            (model(tokens).mean() * floats.mean()).backward()
            optimizer.step()

    assert run(program).steps == 2
    assert seen == [3.0 * (0 + 1 + 2 + 3), 3.0 * (4 + 5 + 6 + 7)]


def test_objects_are_exchanged() -> None:
    def program() -> None:
        own_mesh()
        mine = {"rank": dist.get_rank()}
        everyones = [None] * WORLD
        dist.all_gather_object(everyones, mine)
        assert everyones == [mine] * WORLD
        dist.gather_object(mine, None, dst=0)
        shared = [mine, 2]
        dist.broadcast_object_list(shared, src=0)
        assert shared == [mine, 2]
        dist.scatter_object_list([None], None, src=0)
        dist.barrier(device_ids=[0])

    assert [call.op for call in run(program).collectives] == ["barrier"]


def test_every_handle_can_be_waited_for() -> None:
    """Also twice, late, or after another's: what c10d returns must not wait for ever."""

    def program() -> None:
        own_mesh()
        data, whole = torch.randn(4), torch.randn(4 * WORLD)
        parts = [torch.empty(4) for _ in range(WORLD)]
        dist.scatter(data, None, src=0)
        dist.broadcast(data, 0)
        dist.all_gather(parts, data)
        works = [
            dist.all_reduce(data, async_op=True),
            dist.all_reduce(torch.tensor([3]), async_op=True),
            dist.all_gather_into_tensor(whole, data, async_op=True),
            dist.reduce_scatter_tensor(data, whole, async_op=True),
            dist.all_to_all_single(whole, whole.clone(), async_op=True),
            dist.isend(data, 1),
            dist.irecv(data, 1),
        ]
        for work in [*reversed(works), *works]:
            assert work.wait() and work.is_completed()
        works[2].get_future().wait()

    found = run(program)
    waits = [op.name for op in found.operations if op.kind == "wait"]
    assert waits[:3] == ["scatter", "broadcast", "all_gather"]
    assert waits[3:5] == ["recv", "send"] and len(waits) == 3 + 7


def test_functional_collectives_and_redistribution() -> None:
    def program() -> None:
        mesh = init_device_mesh("cuda", (WORLD,), mesh_dim_names=("all",))
        data = torch.randn(WORLD, 16)
        placed = distribute_tensor(data, mesh, [Shard(0)])
        assert placed.redistribute(placements=[Replicate()]).to_local().shape == data.shape
        assert placed.redistribute(placements=[Shard(1)]).to_local().shape == (WORLD, 2)
        assert placed.full_tensor().shape == data.shape
        assert placed.sum().full_tensor().shape == ()
        functional.all_reduce(data, "sum", mesh).add(1)
        assert functional.reduce_scatter_tensor(data, "sum", 0, mesh).shape == (1, 16)

    found = run(program)
    assert {call.axis for call in found.collectives} == {"all"}
    ops = [call.op for call in found.collectives]
    assert ops[:2] == ["scatter", "all_gather"] and ops[-2:] == ["all_reduce", "reduce_scatter"]


def test_checkpoints_are_neither_found_nor_written(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()

    def program() -> None:
        model = own()
        optimizer = torch.optim.AdamW(model.parameters())
        assert p3d.checkpoint.latest(tmp_path) is None
        with p3d.guards.watch(), p3d.checkpoint.StopSignal() as stop:
            train(model, optimizer, 1)
            p3d.checkpoint.save(tmp_path, model, optimizer, step=2)
            p3d.checkpoint.save(tmp_path, model, optimizer, step=3, async_=True).result()
            assert not stop.requested and not stop.on_any_rank()
        with pytest.raises(DryRunError, match="latest"):
            p3d.checkpoint.load(tmp_path, model, optimizer)

    assert run(program).collectives[-1].op == "all_reduce"  # of on_any_rank
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_ema_takes_one_more_set_of_shards(plain: DryRun) -> None:
    def program() -> None:
        model = own()
        optimizer = torch.optim.AdamW(model.parameters())
        average = p3d.optim.EMA(model, 0.9)
        for _ in range(2):
            train(model, optimizer, 1)
            average.update()
        with average.swapped():
            model(batch())

    assert run(program).collectives[: len(plain.collectives)] == plain.collectives


@pytest.mark.slow
@pytest.mark.parametrize("kind", [p3d.optim.GradScaler, torch.amp.GradScaler])
def test_a_scaler_steps(kind: type[torch.amp.GradScaler]) -> None:
    def program() -> None:
        model = own()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = kind("cpu")
        for _ in range(2):
            scaler.scale(lm_loss(model, batch())).backward()
            scaler.unscale_(optimizer)
            p3d.optim.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert run(program).steps == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
def test_local_optimizers(kind: type[torch.optim.Optimizer], plain: DryRun) -> None:
    """Their trial of the class is done with values."""

    def program() -> None:
        model = own()
        train(model, p3d.optim.local(kind, [p for p in model.parameters() if p.ndim == 2], lr=1e-3))

    found = run(program)
    assert found.steps == 2
    exchanged = [call for call in found.collectives if call.op == "all_to_all"]
    assert bool(exchanged) == (kind is torch.optim.Muon)


@pytest.mark.slow
def test_steps_in_backward_and_accumulation() -> None:
    def in_backward() -> None:
        model = own()
        p3d.optim.step_in_backward(model, torch.optim.AdamW, lr=1e-3)
        lm_loss(model, batch()).backward()

    def accumulated() -> None:
        model = own()
        optimizer = torch.optim.AdamW(model.parameters())
        for tokens in p3d.optim.accumulate(model, [batch(), batch()]):
            lm_loss(model, tokens).backward()
        optimizer.step()

    assert "optimizer state" in at_rest(run(in_backward)).by_kind
    assert len(by_axis(run(accumulated), "all_reduce")["replicate"]) == 4  # once for both


def test_compiled_programs_run_eagerly(plain: DryRun) -> None:
    found = trained(lambda: own(compile=True))
    assert found.collectives == plain.collectives and found.operations == plain.operations


def test_checkpointing_recomputes_in_backward(plain: DryRun) -> None:
    found = trained(lambda: own(activation_checkpointing=True))
    assert at_rest(found).by_kind == at_rest(plain).by_kind

    def products(of: DryRun) -> int:
        return sum(o.kind == "matmul" and o.phase == "backward" for o in of.operations)

    assert products(found) == products(plain) + 2 * 2  # steps x blocks: their first product


def test_tied_embeddings_are_held_once(plain: DryRun) -> None:
    found = trained(lambda: own(tied_lm()))
    names = {p.name for p in found.parameters}
    assert "embed.weight" in names and "head.weight" not in names
    assert at_rest(found).by_kind["parameters"] < at_rest(plain).by_kind["parameters"]


@pytest.mark.ci
def test_a_hugging_face_llama_with_its_own_plan() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )

    def program() -> None:
        mesh = own_mesh()
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        p3d.parallelize(model, mesh, "auto")
        p3d.materialize(model, device=mesh.device_type, seed=0)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(0, 64, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    found = run(program)
    kinds = at_rest(found).by_kind
    assert kinds["parameters"] == kinds["gradients"]
    assert sum(p.bytes for p in found.parameters) <= kinds["parameters"]
    assert {call.axis for call in found.collectives} == {"replicate", "shard", "tp"}


@pytest.mark.parametrize("policy", [CPUOffloadPolicy(), OffloadPolicy()])
def test_offload_that_is_not_timed_is_a_warning(policy):
    def program():
        model = nn.Linear(8, 8)
        p3d.fully_shard(model, mesh=own_mesh(1, 8, 1)["shard"], offload_policy=policy)
        model(torch.randn(2, 8)).sum().backward()

    found = all_warnings(run(program))
    kinds = [each.kind for each in found]
    assert ("optimizer not timed" in kinds) == isinstance(policy, CPUOffloadPolicy)
