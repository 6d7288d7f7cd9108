"""global_mean: ranks and micro-batches with different numbers of tokens, the plain model's gradients."""

import functools

import pytest
import torch
from _support.models import Lm, tokens
from _support.side_by_side import side_by_side
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d import MeshError, MeshLayout, Parallel3dError, build_mesh, optim
from parallel3d.testing import fake_world, local_world, record_collectives

PAD = 0
MICRO = 2
LENGTHS = [5, 2, 0, 0, 4, 1, 3, 5]
"""Tokens to keep, by data rank and micro-batch; the second has none."""
TINY = functools.partial(Lm, layers=1)


def batch(data_rank: int, micro: int) -> torch.Tensor:
    """(2, 5): ids from 1 on, then padding."""
    ids = tokens(10 * micro + data_rank, vocab=18) + 1
    ids[:, LENGTHS[MICRO * data_rank + micro] :] = PAD
    return ids


def loss_sum(model, ids: torch.Tensor) -> torch.Tensor:
    """Each token is its own target."""
    return F.cross_entropy(
        model(ids).flatten(0, 1), ids.flatten(), ignore_index=PAD, reduction="sum"
    )


def count(data_rank: int) -> int:
    return sum(int((batch(data_rank, micro) != PAD).sum()) for micro in range(MICRO))


def check(sizes: tuple[int, int, int], defer: bool = True) -> None:
    with side_by_side(sizes, TINY) as sides:
        ranks = range(sides.layout.data_size)
        with sides.outside():
            total = sum(map(count, ranks))
            plain = 0.0
            for rank in ranks:
                for micro in range(MICRO):
                    part = loss_sum(sides.plain, batch(rank, micro)) / total
                    part.backward()
                    plain += part.item()
        mine = sides.mine(lambda rank: torch.tensor(count(rank)))
        losses = []
        micros = range(MICRO)
        for micro in optim.accumulate(sides.model, micros) if defer else micros:
            of_rank = functools.partial(batch, micro=micro)
            loss = optim.global_mean(loss_sum(sides.model, sides.mine(of_rank)), mine)
            loss.backward()
            losses.append(loss.detach())
        sides.check(of=lambda p: p.grad)
        if sides.world is not None:
            by_rank = sides.world.per_rank(sum(losses))
            assert abs(float(sum(by_rank) / len(by_rank)) - plain) < 1e-12


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_gradients_of_the_concatenated_batch(sizes) -> None:
    check(sizes)


@pytest.mark.smoke
def test_on_processes(gloo_pool) -> None:
    gloo_pool.run(check, (2, 1, 2), False, world_size=4)


def check_unlike_ranks() -> None:
    """Whole numbers and weights; a wrong number on one rank is an error on all."""
    rank = dist.get_rank()
    loss = optim.global_mean(torch.ones(()), torch.tensor(3.5) if rank else 2)
    assert float(loss) == pytest.approx(2 / 5.5)
    with pytest.raises(Parallel3dError, match=r"n_tokens is .* here; on every rank"):
        optim.global_mean(torch.ones(()), torch.tensor(-1 if rank else 5))


def test_unlike_ranks(gloo_pool) -> None:
    gloo_pool.run(check_unlike_ranks, world_size=2)


def test_one_small_collective() -> None:
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(1, 4, 1), device_type="cpu")
        with record_collectives(mesh) as recorder:
            optim.global_mean(torch.tensor(3.0), 5)
        assert [(c.op, c.bytes, c.group_size) for c in recorder.calls] == [("all_reduce", 8, 4)]


def test_over_the_ranks_of_a_mesh() -> None:
    with local_world(4) as world:
        mesh = build_mesh(MeshLayout(2, 2, 1), device_type="cpu")
        n = world.map(lambda rank: torch.tensor([1, 2, 3, 5][rank]))
        loss = optim.global_mean(torch.ones((), dtype=torch.float64), n, mesh=mesh["shard"])
        assert [float(t) for t in world.per_rank(loss)] == [2 / 3, 2 / 3, 2 / 8, 2 / 8]
        weights = world.map(lambda rank: torch.tensor([0.25, 0.5, 0.0, 0.25][rank]))
        loss = optim.global_mean(torch.ones(1), weights, mesh=mesh)
        assert [float(t) for t in world.per_rank(loss)] == [4.0] * 4


def test_without_ranks() -> None:
    loss = optim.global_mean(torch.tensor(6.0, dtype=torch.float16), 4)
    assert loss == 1.5 and loss.dtype == torch.float16


def test_many_tokens_in_float16() -> None:
    """1 / 3e6 has three bits in float16; with a loss scale nothing else is that small."""
    loss_sum = torch.tensor(60000.0, dtype=torch.float16, requires_grad=True)
    loss = optim.global_mean(loss_sum, 3_000_000)
    (loss * 2**15).backward()
    assert float(loss.detach()) == pytest.approx(0.02, rel=1e-3)
    assert float(loss_sum.grad) == pytest.approx(2**15 / 3e6, rel=1e-3)


@pytest.mark.parametrize(
    ("loss", "n", "match"),
    [
        (torch.ones(2), 4, r"loss_sum is torch.float32 \(2,\)"),
        (torch.tensor(3), 4, r"loss_sum is torch.int64 \(\)"),
        (1.0, 4, "loss_sum is 1.0"),
        (torch.ones(()), -1, "n_tokens is -1"),
        (torch.ones(()), True, "n_tokens is True"),
        (torch.ones(()), 2.5, "n_tokens is 2.5"),
        (torch.ones(()), torch.ones(2), "one number"),
        (torch.ones(()), torch.tensor(float("nan")), "n_tokens is nan"),
        (torch.ones(()), 0, "on every rank"),
    ],
)
def test_what_is_refused(loss, n, match) -> None:
    with pytest.raises(Parallel3dError, match=match):
        optim.global_mean(loss, n)


def test_a_number_of_tokens_that_is_a_dtensor() -> None:
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")["tp"]
        with pytest.raises(Parallel3dError, match=r"n_tokens is a DTensor.*to_local"):
            optim.global_mean(torch.ones(()), DTensor.from_local(torch.ones(()), mesh))


def test_no_mesh() -> None:
    with pytest.raises(MeshError, match="must be a DeviceMesh"):
        optim.global_mean(torch.ones(()), 4, mesh="shard")
