"""The collectives of ``cp`` against plain autograd over all ranks' tensors, second derivatives too."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from _support.cp.reference import axis_of, sample
from _support.tp.tp_world import RealWorld
from torch import Tensor

from parallel3d.cp import CpAxis, Sequence
from parallel3d.cp.choose import share_heads
from parallel3d.cp.collectives import HeadLayout, Rotation, gather_positions, to_heads, to_positions
from parallel3d.testing import GlooPool
from parallel3d.testing.worlds import local_world

LENGTH = 12


def layout(cp: int, heads: int, kv_heads: int, sequence: Sequence) -> HeadLayout:
    shares = share_heads(heads, kv_heads, cp)
    q = tuple((share.first, share.number) for share in shares)
    kv = tuple((share.kv_first, share.kv_number) for share in shares)
    return HeadLayout(sequence, (q, kv))


def cubes(tensors: Iterable[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """A loss with a second derivative."""
    return sum(((x**3) * w).sum() for x, w in zip(tensors, weights, strict=True))  # type: ignore[return-value]


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """First derivatives, and the derivatives of the sum of their squares."""
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)  # type: ignore[arg-type]
    return [g.detach() for g in (*first, *second)]


def check_gradients(
    cp: int, sequence: Sequence, wholes: list[Tensor], of_rank: Any, collective: Any
) -> None:
    """Compares results and derivatives of a collective of parts with those of the whole tensors.

    Args:
        of_rank: (whole, its number, rank) -> what the rank has of it afterwards.
        collective: (parts, axis, world) -> the rank's results.
    """
    numbered = list(enumerate(wholes))
    weights = [
        [sample(*of_rank(x, n, r).shape, seed=10 * r + n) for n, x in numbered] for r in range(cp)
    ]
    leaves = [x.clone().requires_grad_() for x in wholes]
    loss = sum(
        cubes([of_rank(x, n, r) for n, x in enumerate(leaves)], weights[r]) for r in range(cp)
    )
    expected = gradients(loss, leaves)  # type: ignore[arg-type]
    with local_world(cp) as world:
        axis = axis_of(cp)
        wide = [world.map(lambda r, x=x: x) for x in wholes]
        parts = [sequence.cut(x, 2, axis).detach().requires_grad_() for x in wide]
        mine = collective(tuple(parts), axis, world)
        for n, x in enumerate(mine):
            for r, got in enumerate(world.per_rank(x.detach())):
                assert torch.equal(got, of_rank(wholes[n], n, r))
        own = [world.map(lambda r, n=n: weights[r][n]) for n in range(len(wholes))]
        cuts = [world.per_rank(x) for x in gradients(cubes(mine, own), parts)]
    rows = [torch.cat(got, 2)[:, :, sequence.inverse()] for got in cuts]
    torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("cp", "heads", "kv_heads"), [(2, 4, 4), (4, 8, 2), (3, 5, 5), (4, 6, 2)])
def test_there_and_back(cp: int, heads: int, kv_heads: int, balanced: bool) -> None:
    sequence = Sequence(LENGTH * 2, cp, balanced)
    wholes = [sample(2, heads, 24, 3, seed=1), sample(2, kv_heads, 24, 2, seed=2)]
    how = layout(cp, heads, kv_heads, sequence)

    def collective(parts: tuple[Tensor, ...], axis: CpAxis, world: Any) -> tuple[Tensor, ...]:
        mine = to_heads(parts, how, axis)
        if sum(n for _, n in how.heads[1]) == kv_heads:  # no two ranks share one
            for back, part in zip(to_positions(mine, how, axis), parts, strict=True):
                pairs = zip(*(world.per_rank(x.detach()) for x in (back, part)), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
        return mine

    def of_rank(x: Tensor, n: int, r: int) -> Tensor:
        return x.narrow(1, *how.heads[n][r])

    check_gradients(cp, sequence, wholes, of_rank, collective)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("cp", [2, 3])
def test_gather(cp: int, balanced: bool) -> None:
    sequence = Sequence(LENGTH, cp, balanced)
    wholes = [sample(2, 2, LENGTH, 3, seed=1), sample(2, 2, LENGTH, 2, seed=2)]

    def collective(parts: tuple[Tensor, ...], axis: CpAxis, world: Any) -> tuple[Tensor, ...]:
        return gather_positions(parts, sequence, axis)

    check_gradients(cp, sequence, wholes, lambda x, n, r: x, collective)


def check_ring(world: Any, cp: int) -> None:
    axis = axis_of(cp)
    x = world.map(lambda r: torch.full((3,), float(r)))
    first, second = Rotation(x, axis), Rotation(x * 10, axis)  # both under way
    for number, message in ((1, first), (10, second)):
        for r, got in enumerate(world.per_rank(message.wait())):
            assert got.tolist() == [number * ((r - 1) % cp)] * 3


def check_ring_on_processes(cp: int) -> None:
    check_ring(RealWorld(), cp)


@pytest.mark.parametrize("cp", [2, 3])
def test_ring(cp: int, gloo_pool: GlooPool) -> None:
    with local_world(cp) as world:
        check_ring(world, cp)
    gloo_pool.run(check_ring_on_processes, cp, world_size=cp)
