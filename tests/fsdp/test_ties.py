"""Parameters tied across units, and what may not be."""

import copy

import pytest
import torch
from _support.fsdp.wrapped import at_rest, cpu_mesh
from _support.models import Block
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d.fsdp import MixedPrecisionPolicy, fully_shard
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import local_world

parity = pytest.mark.parity
TIED = "fault n: tied parameters across units"


class TiedLm(nn.Module):
    """Embedding and head share a weight; blocks between them; odd sizes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedModule(nn.Module):
    """One Linear stands in two blocks."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(nn.Sequential(shared, nn.Linear(12, 12)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def train(model, batches, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses, grads = [], {}
    for batch in batches[:steps]:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
        grads = {n: whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
    return losses, grads, {n: whole(p) for n, p in model.named_parameters()}


def whole(tensor):
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def assert_equal_training(model, plain, batches):
    losses, grads, weights = train(model, batches)
    expected = train(plain, batches)
    for loss, want in zip(losses, expected[0], strict=True):
        torch.testing.assert_close(loss, want.to(loss.dtype), rtol=1e-9, atol=1e-12)
    for got, want in ((grads, expected[1]), (weights, expected[2])):
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-7, atol=1e-10)


IDS = [torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(i)) for i in range(3)]
FLOATS = [
    torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
    for i in range(3)
]


def doubles(build):
    torch.manual_seed(0)
    return build().double()


@parity(TIED)
@pytest.mark.parametrize(
    "units", ["embed head", "embed root", "blocks embed head root", "head embed"]
)
def test_tied_embedding_and_head(units):
    """torch raises a ValueError at the first forward: fully_shard([embed, head]) must be written."""
    plain = doubles(TiedLm)
    with local_world(3):
        mesh = cpu_mesh(1, 3)
        model = doubles(TiedLm)
        for name in units.split():
            if name == "root":
                fully_shard(model, mesh=mesh)
            elif name == "blocks":
                for block in model.blocks:
                    fully_shard(block, mesh=mesh)
            else:
                fully_shard(getattr(model, name), mesh=mesh)
        assert model.embed.weight is model.head.weight
        assert isinstance(model.head.weight, DTensor)
        assert len(list(model.parameters())) == len(list(plain.parameters()))
        assert_equal_training(model, plain, IDS)
        assert all(isinstance(p, DTensor) for p in unit_of(model.embed).modules[0].parameters())


@parity(TIED)
def test_a_module_that_stands_in_two_units():
    plain = doubles(SharedModule)
    with local_world(2):
        mesh = cpu_mesh()
        model = doubles(SharedModule)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert unit_of(model.blocks[0]) is unit_of(model.blocks[1]) is not unit_of(model)
        assert_equal_training(model, plain, FLOATS)
        assert at_rest(model)
        twin = copy.deepcopy(model)
        assert twin.blocks[0][0] is twin.blocks[1][0]
        twin(FLOATS[0]).sum().backward()
        assert at_rest(twin)


@parity(TIED)
def test_submodule_of_tied_units_alone():
    """The embedding alone gathers and frees what the two share."""
    plain = doubles(TiedLm)
    with local_world(2):
        mesh = cpu_mesh()
        model = doubles(TiedLm)
        weight = model.embed.weight.detach().clone()
        fully_shard(model.embed, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(model.embed(IDS[0]), weight[IDS[0]])
        assert_equal_training(model, plain, IDS)


class Nested(nn.Module):
    """The root's own weight is that of a unit inside a unit."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 12, bias=False), nn.Linear(12, 12))
        self.last = nn.Linear(12, 12)
        self.last.weight = self.block[0].weight

    def forward(self, x):
        return self.last(torch.tanh(self.block(x)))


@parity(TIED)
def test_a_unit_between_tied_ones_runs_first():
    """It is no root: the unit that has one of its modules is also around it."""
    plain = doubles(Nested)
    with local_world(2):
        mesh = cpu_mesh()
        model = doubles(Nested)
        for module in (model.block[0], model.block, model):
            fully_shard(module, mesh=mesh)
        assert unit_of(model.block[0]) is unit_of(model) is not unit_of(model.block)
        model.block.unshard()
        model.block.reshard()
        assert unit_of(model).is_root and not unit_of(model.block).is_root
        assert_equal_training(model, plain, FLOATS)
        assert at_rest(model)


def test_policies_must_agree():
    with local_world(2):
        mesh = cpu_mesh()
        model = TiedLm()
        fully_shard(model.embed, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        with pytest.raises(ValueError, match="policies differ"):
            fully_shard(model.head, mesh=mesh)
        assert isinstance(model.head, nn.Linear) and unit_of(model.head) is None


def test_after_the_first_forward_it_is_too_late():
    with local_world(2):
        mesh = cpu_mesh()
        model = TiedLm()
        fully_shard(model.embed, mesh=mesh)
        model.embed(IDS[0])
        with pytest.raises(ValueError, match="has run already"):
            fully_shard(model.head, mesh=mesh)
