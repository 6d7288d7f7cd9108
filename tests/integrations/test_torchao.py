"""torchao's tensors and optimizers on our units: NF4 (QLoRA), float8 training, low-bit optimizers.

What runs is torchao's own code, beside a plain model or torch's ``fully_shard``.
"""

import copy
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from parallel3d import CheckpointError, MeshLayout, Parallel3dError, build_mesh, checkpoint
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world

DIM = 512  # what NF4 cuts into blocks of 64 x 256


class Lora(nn.Module):
    """A quantised weight, and a trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = to_nf4(torch.randn(DIM, DIM) / 20)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.lora = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_nf4(input=x, weight=self.weight) + self.lora(x)


def parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that an NF4 one consists of."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def mesh_of(ranks: int):
    return build_mesh(MeshLayout(shard=ranks), device_type="cpu")


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_nf4_shards_are_bit_for_bit_the_values_given(rank, ranks) -> None:
    given = parts(Lora().weight.data)
    with fake_world(rank, ranks):
        model = fully_shard(Lora(), mesh=mesh_of(ranks))
        for each in (model, copy.deepcopy(model)):
            for name, mine in parts(each.weight.to_local()).items():
                want = given[name]
                if name in ("quantized_data", "quantized_scalers", "quantization_factor"):
                    want = want.chunk(ranks)[rank]
                assert torch.equal(mine, want), name


@pytest.mark.parametrize("rank", range(3))
def test_nf4_that_can_not_be_cut_is_an_error_on_every_rank(rank) -> None:
    with fake_world(rank, 3):
        model = Lora()
        with pytest.raises(Parallel3dError, match=r"weight of unit Lora, a NF4Tensor .*3 shards"):
            fully_shard(model, mesh=mesh_of(3))
        assert type(model) is Lora


def qlora() -> None:
    plain, model = Lora(), Lora()
    fully_shard(model)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        out = [each(x) for each in (plain, model)]
        assert torch.equal(out[0], out[1])
        for each in out:
            each.square().mean().backward()
        got = model.lora.weight.grad.full_tensor()
        torch.testing.assert_close(got, plain.lora.weight.grad)


def test_qlora_trains_as_the_plain_model(gloo_pool) -> None:
    gloo_pool.run(qlora, world_size=2)


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))


def _shard(engine, model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in model:
        engine(layer, mesh=mesh)
    return engine(model, mesh=mesh)


def _trained(engine, model: nn.Module, optimizer_class, *, scales: bool = False) -> list:
    _shard(engine, model)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(16, 256, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scales:
            precompute_float8_dynamic_scale_for_fsdp(model)
    locals_ = [p.detach().to_local() for p in model.parameters()]
    return [getattr(local, "_tensor", local).clone() for local in locals_]


def float8(gathers: bool, scales: bool) -> None:
    # gloo gathers no float8 for torch's engine: there the weights are gathered first and cast then.
    results = []
    for engine, small in ((torch_fully_shard, False), (fully_shard, gathers)):
        config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=small)
        model = convert_to_float8_training(_stack(), config=config)
        scaled = scales and engine is fully_shard
        results.append(_trained(engine, model, torch.optim.SGD, scales=scaled))
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize(("gathers", "scales"), [(False, False), (True, False), (True, True)])
def test_float8_training_is_that_of_torchs_engine(gloo_pool, gathers, scales) -> None:
    gloo_pool.run(float8, gathers, scales, world_size=2)


def low_bit(optimizer_class) -> None:
    with mock.patch.object(torch, "compile", lambda f, **_: f):  # it compiles each step
        results = [
            _trained(engine, _stack(), optimizer_class)
            for engine in (torch_fully_shard, fully_shard)
        ]
    start = [p.detach().chunk(2)[dist.get_rank()] for p in _stack().parameters()]
    for theirs, ours, before in zip(*results, start, strict=True):
        assert torch.equal(theirs, ours) and not torch.equal(ours, before)


@pytest.mark.parametrize("optimizer_class", [AdamW8bit, AdamW4bit, AdamWFp8])
def test_low_bit_optimizers_step_as_on_torchs_engine(gloo_pool, optimizer_class) -> None:
    gloo_pool.run(low_bit, optimizer_class, world_size=2)


def float8_checkpoint(folder) -> None:
    def model() -> nn.Module:
        config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
        return _shard(fully_shard, convert_to_float8_training(_stack(), config=config))

    saved, fresh = model(), model()
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    precompute_float8_dynamic_scale_for_fsdp(saved)
    checkpoint.save(folder, saved, step=1)
    checkpoint.load(folder, fresh)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    assert torch.equal(fresh(x), saved(x)) and fresh(x).any()
    with pytest.raises(CheckpointError, match=r"0\.weight holds .*precomputed scale"):
        checkpoint.load(folder, saved)


def test_float8_weights_in_a_checkpoint(gloo_pool, tmp_path) -> None:
    gloo_pool.run(float8_checkpoint, tmp_path, world_size=2)


def test_nf4_weights_are_in_no_checkpoint_but_adapters_are(tmp_path) -> None:
    with fake_world(0, 1):
        model = fully_shard(Lora(), mesh=mesh_of(1))
        with pytest.raises(CheckpointError, match=r"weight is a NF4Tensor, .*only=\"trainable\""):
            checkpoint.save(tmp_path / "whole", model, step=1)
        checkpoint.save(tmp_path / "lora", model, step=1, only="trainable")
        before = model.lora.weight.to_local().clone()
        with torch.no_grad():
            model.lora.weight.zero_()
        checkpoint.load(tmp_path / "lora", model)
        assert torch.equal(model.lora.weight.to_local(), before)
