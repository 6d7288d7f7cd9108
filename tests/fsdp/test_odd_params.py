"""Parameters that torch refuses, or that few models have: they train as in the plain model."""

import functools

import pytest
import torch
from _support.fsdp.wrapped import shard_blocks
from _support.models import Block, Lm, lm_loss, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from parallel3d import MeshLayout, MixedPrecisionPolicy
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
def test_non_contiguous() -> None:
    """torch: "FSDP does not support non-contiguous parameters yet"."""

    def build() -> nn.Module:
        model = Block()
        model.up.weight = nn.Parameter(torch.randn(12, 20).t())
        model.down.bias = nn.Parameter(torch.randn(24)[::2])
        assert not model.up.weight.is_contiguous() and not model.down.bias.is_contiguous()
        return model

    parity(build)


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


CODES = {
    torch.uint8: lambda: torch.arange(35, dtype=torch.uint8).view(7, 5),
    torch.int64: lambda: torch.arange(35).view(7, 5) - 9,
    torch.bool: lambda: torch.arange(35).view(7, 5) % 3 == 0,
}


class Quantized(nn.Module):
    """A frozen table of codes, that forward turns into weights."""

    def __init__(self, codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.block = Block()
        self.codes = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.codes.dtype.is_floating_point
        return self.block(x) * self.codes.to(x.dtype).mean()


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parity("behaviour: non-float parameters")
def test_non_float(dtype) -> None:
    parity(lambda: Quantized(CODES[dtype]()))


def non_float_on_ranks(dtype: torch.dtype) -> None:
    """Also where a policy casts what is floating."""
    torch.manual_seed(0)
    codes = CODES[dtype]()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(Quantized(codes), mesh=data_mesh(), mp_policy=policy)
    model(torch.randn(2, 12)).square().mean().backward()
    assert model.codes.dtype == dtype and model.codes.grad is None
    assert torch.equal(model.codes.full_tensor(), codes)
    assert model.block.up.weight.grad.dtype == torch.float32


@pytest.mark.smoke
@pytest.mark.parity("behaviour: non-float parameters")
def test_non_float_on_real_ranks(gloo_pool) -> None:
    for dtype in CODES:
        gloo_pool.run(non_float_on_ranks, dtype, world_size=2)


class Mixed(nn.Module):
    """A float64 block, a float32 and a bfloat16 linear, all trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block().double()
        self.b = nn.Linear(12, 12)
        self.c = nn.Linear(12, 5).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x.double()).float())
        return self.c(x.bfloat16())


@pytest.mark.parity("fault h: mixed dtypes in one unit")
def test_mixed_dtypes() -> None:
    """torch: "FSDP expects uniform original parameter dtype", an AssertionError at the first forward."""
    torch.manual_seed(0)
    plain = Mixed()
    x = torch.randn(2, 12)
    plain(x).float().square().sum().backward()
    with local_world(2) as world:
        torch.manual_seed(0)
        with world.paused():
            model = Mixed()
        model = fully_shard(model, mesh=data_mesh())
        same = world.map(lambda _: x)
        model(same).float().square().sum().backward()
        for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert got.dtype == got.grad.dtype == want.dtype, name
            for whole in world.per_rank(got.grad.full_tensor()):
                assert torch.allclose(whole, want.grad, rtol=1e-2 if "c." in name else 1e-5), name
        dtypes = [bucket.dtype for bucket in unit_of(model).group.buckets]
        assert dtypes == [torch.float64, torch.float32, torch.bfloat16]


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


@pytest.mark.parity("behaviour: uneven sharding")
@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_uneven_rows(ranks: int) -> None:
    parity(lambda: Block(dim=12, hidden=7), layout=MeshLayout(1, ranks, 1))
    with fake_world(ranks - 1, ranks):
        model = fully_shard(Block(dim=12, hidden=7), mesh=data_mesh(ranks))
        assert model.up.weight.placements == (Shard(0),)
