"""A norm that is nan or infinite: the ranks whose loss was are named, on every rank."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

import parallel3d as p3d
from parallel3d.errors import Parallel3dError
from parallel3d.optim import clip_grad_norm_
from parallel3d.testing import GlooPool


def told(bad: dict[int, float], given: bool) -> str:
    torch.manual_seed(0)
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu")
    model = p3d.parallelize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), mesh)
    loss = model(torch.ones(2, 3)).sum() * bad.get(dist.get_rank(), 1.0)
    loss.backward()
    with pytest.raises(Parallel3dError) as caught:
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True, loss=loss if given else None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({1: float("nan")}, "The loss is nan on rank 1, finite on rank 0"),
        ({0: float("nan"), 1: float("nan")}, "The loss is nan on ranks 0-1"),
    ],
)
def test_it_is_named(gloo_pool: GlooPool, bad: dict[int, float], text: str) -> None:
    for said in gloo_pool.run(told, bad, True, world_size=2):
        assert "norm of the gradients is nan" in said and said.endswith(text)


def test_without_a_loss_the_error_says_how(gloo_pool: GlooPool) -> None:
    for said in gloo_pool.run(told, {1: float("nan")}, False, world_size=2):
        assert "Give clip_grad_norm_ loss=" in said


def test_one_process() -> None:
    weight = nn.Parameter(torch.ones(2))
    loss = (weight * torch.inf).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="This rank's loss is inf"):  # as torch's
        clip_grad_norm_([weight], 1.0, error_if_nonfinite=True, loss=loss)
    with pytest.raises(Parallel3dError, match="This rank's loss is inf"):
        clip_grad_norm_([weight], 1.0, error_if_nonfinite=True, loss=loss)
    with pytest.raises(Parallel3dError, match="This rank's loss is finite"):
        clip_grad_norm_([weight], 1.0, error_if_nonfinite=True, loss=3.0)
