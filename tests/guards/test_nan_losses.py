"""A loss that is nan on some ranks only is said once, with the ranks and the remedy."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d._util.trace import issuing
from parallel3d.guards import nan_losses as module
from parallel3d.guards.nan_losses import NanLosses
from parallel3d.testing import GlooPool

NONE = -100


def loss_of(kind: str, model: nn.Module, x: torch.Tensor, has_rows: bool) -> torch.Tensor:
    """What ``model`` is trained with on a rank that has rows, or none."""
    if kind == "no rows":
        x = x if has_rows else x[:0]
        return F.mse_loss(model(x), x)
    if kind == "global mean":
        x = x if has_rows else x[:0]
        loss_sum = F.mse_loss(model(x), x, reduction="sum")
        return p3d.optim.global_mean(loss_sum, x.numel())
    if kind == "no labels":
        labels = torch.full((len(x),), 1 if has_rows else NONE)
        return F.cross_entropy(model(x), labels, ignore_index=NONE)
    mask = torch.full((len(x), 1), float(has_rows))
    return (model(x).square() * mask).sum() / mask.sum()  # whose gradient is nan, too


def train(kind: str, without: tuple[int, ...], steps: int) -> list[str]:
    """The warnings of this rank; those of ``without`` have nothing from the second step on."""
    module.nan_losses.__init__()  # type: ignore[misc]  # the process may have said it before
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
    torch.manual_seed(0)
    model = p3d.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            has_rows = step == 0 or dist.get_rank() not in without
            loss_of(kind, model, torch.ones(3, 4), has_rows).backward()
    return [str(each.message) for each in caught if "nan" in str(each.message)]


@pytest.mark.parametrize("kind", ["no rows", "no labels", "a mask"])
@pytest.mark.parametrize("rank", [1, 0])
def test_the_rank_is_named_once(gloo_pool: GlooPool, kind: str, rank: int) -> None:
    said = gloo_pool.run(train, kind, (rank,), 4, world_size=2)
    assert said[1 - rank] == []
    (text,) = said[rank]
    assert f"the loss is nan on rank {rank}, and not on rank {1 - rank}" in text
    assert "global_mean" in text


@pytest.mark.parametrize(
    ("kind", "without"), [("a mask", (0, 1)), ("global mean", (1,)), ("no rows", ())]
)
def test_nothing_is_said_elsewhere(
    gloo_pool: GlooPool, kind: str, without: tuple[int, ...]
) -> None:
    """All ranks diverge; the sums are divided by all rows; all have rows."""
    assert gloo_pool.run(train, kind, without, 3, world_size=2) == [[], []]


# On an accelerator: values arrive later


@pytest.fixture
def ranks(monkeypatch) -> Iterator[list[NanLosses]]:
    store = dist.HashStore()
    watching = [NanLosses() for _ in range(3)]
    now = [0]
    monkeypatch.setattr(module, "others", lambda: (store, now[0], 3))
    monkeypatch.setattr(issuing, "forwards", 0)
    for rank, each in enumerate(watching):
        each.rank = rank  # type: ignore[attr-defined]
    watching[0].now = now  # type: ignore[attr-defined]
    yield watching


def backward(ranks: list[NanLosses], losses: list[float]) -> None:
    """As the engine calls it, once on each rank."""
    issuing.forwards += 1
    for rank, (each, loss) in enumerate(zip(ranks, losses, strict=True)):
        ranks[0].now[0] = rank  # type: ignore[attr-defined]
        if each.looks:
            each.look_later(torch.tensor(loss))
        else:
            each.say()


def test_later_values_name_the_forward_that_they_are_of(ranks: list[NanLosses]) -> None:
    nan = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for losses in ([1.0, 1.0, 1.0], [1.0, nan, nan], *[[nan, nan, nan]] * 8):
            backward(ranks, losses)
    (warning,) = caught
    assert "nan on ranks 1-2, and not on rank 0, after forward 2." in str(warning.message)


def test_later_values_of_all_ranks_say_nothing(ranks: list[NanLosses]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            backward(ranks, [float("nan")] * 3)
        assert not any(each.looks for each in ranks)


def test_copies_are_used_again(ranks: list[NanLosses]) -> None:
    for _ in range(10):
        backward(ranks, [1.0, 2.0, 3.0])
    assert all(len(each._on_the_way) + len(each._free) <= 2 for each in ranks)
