"""Parameters that torch refuses, or that few models have: they train as in the plain model."""

import functools

import pytest
import torch
from _support.fsdp.wrapped import shard_blocks
from _support.models import Block, Lm, lm_loss, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from parallel3d import MeshLayout
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import assert_parity, fake_world, local_world

LAYOUT = MeshLayout(2, 2, 1)


def floats(index: int) -> torch.Tensor:
    return torch.randn(3, 12, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


def parity(build, batch=floats, layout=LAYOUT, loss=None, apply=None) -> None:
    """In float64 on simulated ranks; the whole model one unit."""

    def one_unit(model, mesh):
        return fully_shard(model, mesh=mesh)

    assert_parity(build, batch, layout, loss=loss, apply=apply or one_unit, steps=1, fp32=False)


def data_mesh(size: int = 2):
    return init_device_mesh("cpu", (size,))


class Extra(nn.Module):
    """A block beside one parameter, which the output is multiplied by."""

    def __init__(self, param: torch.Tensor, requires_grad: bool = True) -> None:
        super().__init__()
        self.block = Block()
        self.extra = nn.Parameter(param, requires_grad=requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * (1 + self.extra.sum())


@pytest.mark.parity("fault n: scalar parameters")
def test_scalar() -> None:
    """torch: "fully_shard doesn't support scalar parameters". Here it is whole on the shard axis."""
    parity(lambda: Extra(torch.tensor(0.3)))
    with fake_world(0, 4):
        model = fully_shard(Extra(torch.tensor(0.3)), mesh=data_mesh(4))
        assert model.extra.placements == (Replicate(),)
        assert model.extra.to_local().shape == ()


@pytest.mark.parity("fault n: scalar parameters")
def test_scalar_alone() -> None:
    """A unit of nothing but scalars gathers nothing."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    def apply(model, mesh):
        fully_shard(model[1], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    parity(lambda: nn.Sequential(Block(), Scale()), apply=apply)


@pytest.mark.parity("fault n: non-contiguous parameters")
def test_channels_last() -> None:
    class Images(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1))
            self.to(memory_format=torch.channels_last)

    def images(index: int) -> torch.Tensor:
        return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(index))

    parity(Images, images)


@pytest.mark.parity("behaviour: empty shards")
def test_fewer_rows_than_ranks() -> None:
    """One and three rows over four ranks: some hold none."""
    parity(lambda: Extra(torch.randn(1)), layout=MeshLayout(1, 4, 1))
    parity(lambda: Extra(torch.randn(3, 2)), layout=MeshLayout(1, 4, 1))
    with local_world(4) as world:
        model = fully_shard(Extra(torch.randn(3, 2)), mesh=data_mesh(4))
        assert [tuple(t.shape) for t in world.per_rank(model.extra)] == [(1, 2)] * 3 + [(0, 2)]
        assert model.extra.shape == (3, 2)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)], ids=str)
@pytest.mark.parity("behaviour: empty shards")
def test_no_elements(shape) -> None:
    """A parameter of no elements, beside others and as a unit of its own."""
    parity(lambda: Extra(torch.zeros(shape)))

    def apply(model, mesh):
        fully_shard(model.inner, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(shape))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.nothing.sum()

    class Outer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Empty()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(super().forward(x))

    parity(Outer, apply=apply)


@pytest.mark.parity("behaviour: shared parameters")
def test_shared_within_a_unit() -> None:
    """One Parameter in two modules, and twice in one, stays one and gets both gradients."""

    class Shares(Lm):
        def __init__(self, **kwargs) -> None:
            super().__init__(**kwargs)
            self.head.weight = self.embed.weight
            for layer in self.layers:
                layer.down.weight = nn.Parameter(layer.norm.weight.detach() * torch.ones(12, 1))
                layer.up = layer.down
                layer.norm.bias = layer.down.bias

    build = functools.partial(Shares, layers=2)
    parity(build, tokens, loss=lm_loss, apply=shard_blocks)
    with fake_world(0, 2):
        model = shard_blocks(build(), data_mesh())
        assert model.head.weight is model.embed.weight
        assert model.layers[1].norm.bias is model.layers[1].up.bias
        assert len(list(model.parameters())) == len(list(build().parameters()))


@pytest.mark.parity("argument: list of modules")
def test_shared_between_modules_of_a_list() -> None:
    """A list is one unit: its modules may share parameters. One inside another is left out, as in torch."""

    def apply(model, mesh):
        fully_shard([model.embed, model.norm, model.head], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    parity(functools.partial(Lm, tied=True), tokens, loss=lm_loss, apply=apply)
    with fake_world(0, 2):
        block = Block()
        fully_shard([block.up, block], mesh=data_mesh())
        assert unit_of(block) is not None and unit_of(block.up) is None


def test_meta_beside_real_values() -> None:
    """Real values are not lost in a buffer on meta; what is on meta gets its values on its own."""
    with fake_world(0, 2):
        model = Block()
        with torch.device("meta"):
            model.up = nn.Linear(12, 20)
        want = model.down.weight.detach().clone()
        fully_shard(model, mesh=data_mesh())
        assert model.up.weight.is_meta and not model.down.weight.is_meta
        assert torch.equal(model.down.weight.to_local(), want[:6])
        model.load_state_dict(
            {k: torch.ones_like(v, device="cpu") for k, v in model.state_dict().items()},
            assign=True,
        )
        assert not model.up.weight.is_meta
        assert model(torch.randn(2, 12)).shape == (2, 12)
