"""The collectives of ``cp`` against plain autograd over all ranks' tensors, second derivatives too."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.cp import CpAxis, Sequence
from parallel3d.cp.collectives import HeadLayout, Rotation, gather_positions, to_heads, to_positions
from parallel3d.cp.shares import share_heads
from parallel3d.testing import GlooPool
from parallel3d.testing.worlds import local_world

HEADS, KV_HEADS, LENGTH = 5, 5, 12


def sample(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def axis_of(cp: int) -> CpAxis:
    return CpAxis(init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",)))


def layout(cp: int, heads: int, kv_heads: int, sequence: Sequence) -> HeadLayout:
    shares = share_heads(heads, kv_heads, cp)
    q = tuple((share.first, share.number) for share in shares)
    kv = tuple((share.kv_first, share.kv_number) for share in shares)
    return HeadLayout(sequence, (q, kv), (heads, kv_heads))


def cubes(tensors: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
    """A loss with a second derivative."""
    return sum(((x**3) * w).sum() for x, w in zip(tensors, weights, strict=True))  # type: ignore[return-value]


def gradients(loss: Tensor, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """First derivatives, and the derivatives of the sum of their squares."""
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)  # type: ignore[arg-type]
    return [g.detach() for g in first], list(second)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("cp", "heads", "kv_heads"), [(2, 4, 4), (4, 8, 2), (3, 5, 5), (4, 6, 2)])
def test_there_and_back(cp: int, heads: int, kv_heads: int, balanced: bool) -> None:
    sequence = Sequence(LENGTH * 2, cp, balanced)
    wholes = [sample(2, heads, 24, 3, seed=1), sample(2, kv_heads, 24, 2, seed=2)]
    how = layout(cp, heads, kv_heads, sequence)
    weights = [
        [
            sample(2, heads[r][1], 24, d, seed=10 * r + d)
            for d, heads in zip((3, 2), how.heads, strict=True)
        ]
        for r in range(cp)
    ]
    leaves = [x.clone().requires_grad_() for x in wholes]
    loss = sum(
        cubes(
            tuple(x.narrow(1, *h[r]) for x, h in zip(leaves, how.heads, strict=True)),
            tuple(weights[r]),
        )
        for r in range(cp)
    )
    first, second = gradients(loss, leaves)  # type: ignore[arg-type]
    with local_world(cp) as world:
        axis = axis_of(cp)
        parts = [
            sequence.cut(world.map(lambda r, x=x: x), 2, axis).detach().requires_grad_()
            for x in wholes
        ]
        mine = to_heads((parts[0], parts[1]), how, axis)
        for number, x in enumerate(mine):
            for r, got in enumerate(world.per_rank(x.detach())):
                assert torch.equal(got, wholes[number].narrow(1, *how.heads[number][r]))
        back = to_positions(mine, how, axis)
        if sum(n for _, n in how.heads[1]) == kv_heads:
            for x, part in zip(back, parts, strict=True):
                for a, b in zip(
                    world.per_rank(x.detach()), world.per_rank(part.detach()), strict=True
                ):
                    assert torch.equal(a, b)
        own = tuple(world.map(lambda r, n=n: weights[r][n]) for n in range(2))
        got_first, got_second = gradients(cubes(mine, own), parts)
        cuts = [world.per_rank(x) for x in (*got_first, *got_second)]
    for got, wanted in zip(cuts, (*first, *second), strict=True):
        rows = torch.cat(got, 2)[:, :, sequence.inverse()]
        torch.testing.assert_close(rows, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("cp", [2, 3])
def test_gather(cp: int, balanced: bool) -> None:
    sequence = Sequence(LENGTH, cp, balanced)
    wholes = [sample(2, 2, LENGTH, 3, seed=1), sample(2, 2, LENGTH, 2, seed=2)]
    weights = [[sample(*x.shape, seed=5 * r + n) for n, x in enumerate(wholes)] for r in range(cp)]
    leaves = [x.clone().requires_grad_() for x in wholes]
    loss = sum(cubes((leaves[0], leaves[1]), tuple(w)) for w in weights)
    first, second = gradients(loss, leaves)  # type: ignore[arg-type]
    with local_world(cp) as world:
        axis = axis_of(cp)
        parts = [
            sequence.cut(world.map(lambda r, x=x: x), 2, axis).detach().requires_grad_()
            for x in wholes
        ]
        gathered = gather_positions((parts[0], parts[1]), sequence, axis)
        for x, whole in zip(gathered, wholes, strict=True):
            assert all(torch.equal(got, whole) for got in world.per_rank(x.detach()))
        own = tuple(world.map(lambda r, n=n: weights[r][n]) for n in range(2))
        got_first, got_second = gradients(cubes(gathered, own), parts)
        cuts = [world.per_rank(x) for x in (*got_first, *got_second)]
    for got, wanted in zip(cuts, (*first, *second), strict=True):
        rows = torch.cat(got, 2)[:, :, sequence.inverse()]
        torch.testing.assert_close(rows, wanted, rtol=1e-10, atol=1e-10)


def check_ring(world: Any, cp: int) -> None:
    axis = axis_of(cp)
    x = world.map(lambda r: torch.full((3,), float(r)))
    first, second = Rotation(x, axis), Rotation(x * 10, axis)  # both under way
    for number, message in ((1, first), (10, second)):
        for r, got in enumerate(world.per_rank(message.wait())):
            assert got.tolist() == [number * ((r - 1) % cp)] * 3


def check_ring_on_processes(cp: int) -> None:
    from _support.cp.reference import RealWorld

    check_ring(RealWorld(), cp)


@pytest.mark.parametrize("cp", [2, 3])
def test_ring(cp: int, gloo_pool: GlooPool) -> None:
    with local_world(cp) as world:
        check_ring(world, cp)
    gloo_pool.run(check_ring_on_processes, cp, world_size=cp)
