"""optim.local of optimizers that need whole parameters: the plain model's update, on shards."""

import copy
import functools

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.optim.local_sides import Sides, everything, matrices
from _support.optim.normed import Normed
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parallel3d import MeshError, MeshLayout, StateError, build_mesh, parallelize
from parallel3d.optim import local
from parallel3d.testing import fake_world, local_world, record_collectives

SIZES = [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_plain_models_steps(sizes) -> None:
    """Rows shared unevenly, vectors, tp before shard, and fewer parameters of a shape than ranks."""
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes), layers=2)
        for model in (sides.plain, sides.model):
            model.layers[0].norm.weight.requires_grad_(False)
        sides.optimizers(everything, Normed, functools.partial(local, Normed))
        for step in range(2):
            sides.backward(step)
            if step:
                for model in (sides.plain, sides.model):
                    model.layers[1].up.weight.grad = None  # its step count stays behind
            sides.step()
            sides.zero_grad()
        sides.check()
        state = sides.optimizer.state[sides.model.layers[0].up.weight]
        assert isinstance(state["momentum"], DTensor) and not isinstance(state["row"], DTensor)
        assert sides.optimizer.param_groups[0]["calls"] == sides.optimizer.steps == 2
        assert sides.optimizer.state["of no parameter"] == {"steps": 2}
        if sizes == (1, 2, 2):
            assert state["momentum"].placements == sides.model.layers[0].up.weight.placements


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_muon_and_adafactor(sizes) -> None:
    """torch's Muon computes in bfloat16: equal inputs give equal results, to the bit."""
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes), layers=2)
        sides.backward()
        for cls, of in ((optim.Muon, matrices), (optim.Adafactor, everything)):
            sides.reset()
            sides.optimizers(
                of, functools.partial(cls, lr=1e-2), functools.partial(local, cls, lr=1e-2)
            )
            assert isinstance(sides.optimizer, cls)
            for _ in range(2):
                sides.step()
            sides.check(moved=False)
            weight = sides.model.layers[0].up.weight
            assert not all(
                torch.equal(a, b)
                for a, b in zip(
                    world.per_rank(weight), world.per_rank(sides.shards[2]), strict=True
                )
            )


@pytest.mark.slow
def test_state_of_the_plain_model_is_cut() -> None:
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(1, 2, 2))
        sides.optimizers(everything, Normed, functools.partial(local, Normed))
        sides.backward()
        sides.step()
        kept = sides.optimizer.state[sides.model.head.weight]["momentum"]
        sides.step()  # in the same memory
        assert sides.optimizer.state[sides.model.head.weight]["momentum"] is kept
        with world.paused():
            saved = copy.deepcopy(sides.plain_optimizer.state_dict())
        sides.optimizer.load_state_dict(saved)
        sides.step()
        sides.check(moved=False)  # biases of zero have norm zero


def test_what_is_communicated() -> None:
    """Each rank sends what it holds, twice or thrice: no parameter is gathered by every rank."""
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(1, 4, 1), device_type="cpu")
        model = parallelize(Lm(layers=8, vocab=20), mesh)
        chosen = [p for n, p in model.named_parameters() if n.endswith("up.weight")]
        optimizer = local(optim.Muon, chosen)
        lm_loss(model, tokens(0)).backward()
        whole = 20 * 12 * 4
        # Weight and gradient there, both back with the momentum; then it goes there too.
        for transfers in (4, 5):
            with record_collectives(mesh) as recorder:
                optimizer.step()
            assert {(c.op, c.axis) for c in recorder.calls} == {("all_to_all", "shard")}
            # Eight parameters, four ranks: two rounds.
            assert len(recorder.calls) == 2 * transfers
            assert all(c.bytes <= whole for c in recorder.calls)
        for param in chosen:
            momentum = optimizer.state[param]["momentum_buffer"]
            assert momentum.placements == param.placements and momentum.placements[1] == Shard(0)
            assert momentum.to_local().numel() == 5 * 12


def test_nothing_is_communicated_where_nothing_is_shared() -> None:
    with fake_world(0, 2):
        mesh = build_mesh(MeshLayout(2, 1, 1), device_type="cpu")
        model = parallelize(Lm(), mesh)
        optimizer = local(optim.Muon, matrices(model))
        lm_loss(model, tokens(0)).backward()
        before = model.head.weight.to_local().clone()
        with record_collectives(mesh) as recorder:
            optimizer.step()
        assert not recorder.calls
        assert not torch.equal(model.head.weight.to_local(), before)
        assert isinstance(optimizer.state[model.head.weight]["momentum_buffer"], DTensor)


def test_the_argument_and_the_attribute() -> None:
    plain = nn.Linear(3, 2)
    plain(torch.ones(1, 3)).sum().backward()

    class Unmarked(Normed):
        whole_matrix = False

    for cls, matrix in ((Normed, None), (Unmarked, True)):
        optimizer = local(cls, plain, matrix=matrix)
        optimizer.step(lambda: plain(torch.ones(1, 3)).sum())
        assert optimizer.state[plain.weight]["step"] == 1
    with pytest.raises(ValueError, match="Muon steps on matrices"):
        local(optim.Muon, plain)


def test_axes_without_names() -> None:
    with fake_world(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, (Shard(0), Shard(0))))
        optimizer = local(optim.Muon, [weight])
        weight.grad = weight.detach().clone()
        with pytest.raises(MeshError, match=r"shape \(8, 4\).*name them"):
            optimizer.step()


def test_a_sum_that_waits_is_no_gradient() -> None:
    with fake_world(0, 4):
        mesh = build_mesh(MeshLayout(1, 2, 2), device_type="cpu")
        model = parallelize(Lm(), mesh, LM_PLAN)
        optimizer = local(optim.Muon, matrices(model))
        with model.no_sync():
            lm_loss(model, tokens(0)).backward()
        with pytest.raises(StateError, match="last micro-batch"):
            optimizer.step()
        assert optimizer.param_groups[0]["params"] == matrices(model)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2)], ids=str)
def test_elementwise_and_whole(sizes) -> None:
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes), shard_optimizer_over_replicate=True)
        for cls in (functools.partial(optim.AdamW, lr=1e-2), Normed):
            base = getattr(cls, "func", cls)
            sides.reset()
            sides.optimizers(everything, cls, functools.partial(local, base, lr=1e-2))
            for step in range(2):
                sides.backward(step)
                sides.step()
                sides.zero_grad()
            sides.check()
        up = sides.model.layers[0].up.weight
        momentum = sides.optimizer.state[up]["momentum"]
        assert all(not placement.is_replicate() for placement in momentum.placements[:1])
        parts = world.per_rank(momentum)
        assert {tuple(part.shape) for part in parts} == {(5, 12)}
        assert not torch.equal(parts[0], parts[2])  # of the two replicas
