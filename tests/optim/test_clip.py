"""clip_grad_norm_: the plain model's norm on any mix of gradients; which loss made it nan or infinite."""

import copy
import math

import pytest
import torch
from _support.models import LM_PLAN, SEQUENCE_PLAN, Lm, lm_loss, tokens
from _support.side_by_side import same_batch
from torch import distributed as dist
from torch import nn

from parallel3d import MeshLayout, Parallel3dError, StateError, build_mesh, parallelize
from parallel3d.fsdp import fully_shard
from parallel3d.optim import clip_grad_norm_
from parallel3d.optim.clip import plan_for
from parallel3d.testing import GlooPool, fake_world, local_world, record_collectives, shards_of
from parallel3d.tp import resolve_plan

NORMS = [1.0, 2.0, 3.5, math.inf]


def compare(plain: nn.Module, model: nn.Module, world, norm_type: float, max_norm: float) -> None:
    """Norms and clipped gradients of both."""
    with world.paused():
        want = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    got = clip_grad_norm_(model, max_norm, norm_type)
    for value in world.per_rank(got):
        torch.testing.assert_close(value, want)
    with world.paused():
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            for rank, box, local in shards_of(q.grad):
                torch.testing.assert_close(local, p.grad[box], msg=f"{name} on rank {rank}")


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("mesh_shape", [(2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4)], ids=str)
def test_parallel_model(mesh_shape, norm_type) -> None:
    """TP-sharded, TP-replicated and uneven parameters; a norm that clips."""
    with same_batch(mesh_shape) as (plain, model, world):
        compare(plain, model, world, norm_type, 0.1)


@pytest.mark.parametrize("mesh_shape", [(2, 2, 1), (2, 1, 2), (2, 2, 2)], ids=str)
def test_optimizer_sharded_over_replicate(mesh_shape) -> None:
    """HFSDP: gradients in parts over replicate x shard, and under it over tp."""

    def apply(model: nn.Module, mesh) -> nn.Module:
        return parallelize(model, mesh, LM_PLAN, shard_optimizer_over_replicate=True)

    with same_batch(mesh_shape, apply, dim=16, hidden=24, vocab=20) as (plain, model, world):
        assert not model.layers[0].up.weight.grad.placements[0].is_replicate()
        compare(plain, model, world, 2.0, 0.1)


def test_partial_gradients_count_once() -> None:
    def apply(model: nn.Module, mesh) -> nn.Module:
        return parallelize(model, mesh, SEQUENCE_PLAN)

    for plan in (None, apply):
        with same_batch((1, 2, 2), plan) as (plain, model, world):
            compare(plain, model, world, 2.0, 1e9)  # nothing to clip


def test_mixed_meshes_and_plain_gradients() -> None:
    """torch 2.13: "All operands in aten.stack must have the same mesh", "got mixed"."""

    def apply(model: nn.Module, mesh) -> nn.Module:
        ignored = {model.norm.weight, model.norm.bias}
        fully_shard(model.layers[0], mesh=mesh["shard"])  # two meshes, and two plain ones
        return fully_shard(model, mesh=mesh, ignored_params=ignored)

    with same_batch((2, 2, 1), apply) as (plain, model, world):
        compare(plain, model, world, 2.0, 0.1)


def test_one_small_collective_per_axis() -> None:
    with fake_world(0, 8):
        mesh = build_mesh(MeshLayout(2, 2, 2), device_type="cpu")
        model = parallelize(Lm(layers=2), mesh, LM_PLAN)
        lm_loss(model, tokens(0)).backward()
        with record_collectives(mesh) as recorder:
            clip_grad_norm_(model.parameters(), 1.0)
        assert {c.axis for c in recorder.calls} == {"shard", "tp"}
        assert len(recorder.calls) == 2 and all(c.bytes <= 16 for c in recorder.calls)


def test_plain_model_without_a_process_group() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    want = nn.utils.get_total_norm([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(clip_grad_norm_(model, 1.0), want)
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0) == 0


def test_nonfinite() -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, math.nan])
    assert math.isnan(clip_grad_norm_(p, 1.0))
    with pytest.raises(Parallel3dError, match="must be finite"):
        clip_grad_norm_(p, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_a_sum_that_waits_is_refused(switch) -> None:
    with fake_world(0, 4):
        model = parallelize(Lm(layers=1), build_mesh(MeshLayout(2, 2, 1), device_type="cpu"))
        getattr(model, switch)(False)
        lm_loss(model, tokens(0)).backward()
        with pytest.raises(StateError, match="Clip after the backward of the last micro-batch"):
            clip_grad_norm_(model, 1.0)


class WithEmpty(nn.Module):
    """A weight that tp cuts, and next to it a parameter without elements, which nothing cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.none = nn.Linear(4, 8, bias=False), nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sum() + self.none.sum()


@pytest.mark.parametrize("norm_type", NORMS)
def test_a_parameter_without_elements(norm_type) -> None:
    torch.manual_seed(0)
    plain = WithEmpty().double()
    model = copy.deepcopy(plain)
    plain(torch.ones(2, 4).double()).backward()
    with local_world(4) as world:
        mesh = build_mesh(MeshLayout(1, 2, 2), device_type="cpu")
        parallelize(model, mesh, {"up": "colwise"})
        model(world.map(lambda r: torch.ones(2, 4).double())).backward()
        got = clip_grad_norm_(model, 0.1, norm_type)
        grad = plain.up.weight.grad
        for value in world.per_rank(got):
            torch.testing.assert_close(value, torch.linalg.vector_norm(grad, norm_type))


def test_gradients_cut_alike_are_neighbours() -> None:
    """Of 20 modules that take turns in what tp cuts, norms are taken of three runs at most."""
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(1, 2, 2), device_type="cpu")
        model = Lm(layers=2)
        resolve_plan(model, LM_PLAN, tp_size=2).apply(model, mesh)
        fully_shard(model, mesh=mesh)
        lm_loss(model, tokens(0)).backward()
        plan = plan_for(list(model.parameters()))
        found = plan.find(list(model.parameters()))
        assert len(found.wholes) == 1 and not found.others
        assert 2 <= sum(map(len, found.flats.values())) <= 3


def told(bad: dict[int, float], given: bool) -> str:
    torch.manual_seed(0)
    mesh = build_mesh(MeshLayout(shard=2), device_type="cpu")
    model = parallelize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), mesh)
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
