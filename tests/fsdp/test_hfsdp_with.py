"""HFSDP together with what else a unit does, on simulated ranks beside the plain model."""

import pytest
import torch
from _support.fsdp.beside_plain import Trial
from _support.fsdp.breakages import Boom, explode
from torch import nn

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, optim
from parallel3d.fsdp import (
    CommHookState,
    StateDictType,
    fp16_compress_hook,
    full_params,
    fully_shard,
    load_model_state_dict,
    model_state_dict,
    reduce_scatter_hook,
)
from parallel3d.fsdp.options import hfsdp
from parallel3d.testing import fake_world, local_world, record_collectives

LAYOUT = MeshLayout(2, 2, 1)


class Net(nn.Module):
    """Matrices that four ranks divide, and vectors that they don't."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wrapped(**options):
    def wrap(model, mesh):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, shard_optimizer_over_replicate=True, **options)
        return fully_shard(model, mesh=mesh, shard_optimizer_over_replicate=True, **options)

    return wrap


@pytest.fixture
def trial():
    with local_world(4) as world:
        yield lambda **options: Trial(world, LAYOUT, wrapped(**options), Net)


@pytest.mark.parametrize(
    ("hook", "tolerance"), [(reduce_scatter_hook, 1e-12), (fp16_compress_hook, 3e-3)]
)
def test_comm_hooks(trial, hook, tolerance) -> None:
    run = trial()
    run.model.register_comm_hook(CommHookState(), hook)
    run.backward(0)
    run.check([0], tolerance=tolerance)
    run.play("-all 1 -sync 2 +sync 3")
    run.check([0, 1, 2, 3], tolerance=tolerance)


def test_whole_tensors(trial) -> None:
    """full_params and full state dicts see the plain model's tensors; edits reach the copy."""
    run = trial()
    run.backward(0)
    run.check([0])
    run.step()
    names = [name for name, _ in run.plain.named_parameters()]
    with full_params(run.model), torch.no_grad():
        for name in names:
            shown, plain = run.model.get_parameter(name), run.plain.get_parameter(name)
            for value in run.world.per_rank(shown):
                torch.testing.assert_close(value, plain, rtol=1e-12, atol=1e-12)
            shown.mul_(0.5)
    with run.world.paused(), torch.no_grad():
        for plain in run.plain.parameters():
            plain.mul_(0.5)
    run.backward(1)
    run.check([1])
    whole = model_state_dict(run.model, type=StateDictType.FULL_STATE_DICT)
    for name in names:
        for value in run.world.per_rank(whole[name]):
            torch.testing.assert_close(value, run.plain.get_parameter(name).detach())
    with torch.no_grad():
        for param in run.model.parameters():
            param.zero_()
    load_model_state_dict(run.model, whole, type=StateDictType.FULL_STATE_DICT)
    run.model.zero_grad()
    run.backward(2)
    run.check([2])


def test_full_precision_in_eval(trial) -> None:
    policy = MixedPrecisionPolicy(
        torch.float32, full_precision_in_eval=True, keep_low_precision_grads=True
    )
    run = trial(mp_policy=policy)
    for training in (True, False, True, False):
        run.model.train(training)
        run.model.zero_grad()
        run.backward(0)
        weight = run.model.layers[0].weight
        assert weight.grad.dtype is (torch.float32 if training else torch.float64)
        for param in run.model.parameters():
            param.grad = param.grad.double()
        run.check([0], tolerance=1e-6 if training else 1e-12)


def test_average_swapped_in(trial) -> None:
    run = trial()
    ema = optim.EMA(run.model, 0.0)  # the weights at the last update
    run.backward(0)
    run.step()
    with ema.swapped(), torch.no_grad():
        before = run.forward(3)
    after = run.forward(3).detach()
    assert not any(
        torch.equal(a, b)
        for a, b in zip(run.world.per_rank(before), run.world.per_rank(after), strict=True)
    )
    ema.update()
    with ema.swapped(), torch.no_grad():
        again = run.forward(3)
    for a, b in zip(run.world.per_rank(again), run.world.per_rank(after), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kept", [False, True])
def test_an_optimizer_of_something_else(kept) -> None:
    """One rank may step it alone, so that no rank may take it for a reason to gather."""
    with fake_world(0, 4):
        mesh = build_mesh(LAYOUT, device_type="cpu")
        model = fully_shard(Net(), mesh=mesh, shard_optimizer_over_replicate=not kept)
        model.set_reshard_after_backward(not kept)
        model.set_keep_between_forwards(True)
        probe = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(each.parameters()) for each in (probe, model)]
        counts = []
        for optimizer in (None, *optimizers):
            if optimizer is not None:
                optimizer.step()
            with record_collectives(mesh) as recorder:
                model(torch.ones(2, 6)).sum().backward()
            counts.append(recorder.count("all_gather", "shard" if kept else "replicate"))
        assert counts == [1, 0, 1]


def test_a_renewal_that_raises_is_made_up_for(monkeypatch) -> None:
    """As where memory runs out: the next forward must not compute with the weights of before."""
    with fake_world(0, 4), torch.no_grad():
        mesh = build_mesh(LAYOUT, device_type="cpu")
        model = wrapped()(Net(), mesh)
        model(torch.ones(2, 6))
        for param in model.parameters():
            param.mul_(2)
        with monkeypatch.context() as patch:
            patch.setattr(hfsdp, "all_gather", explode)
            with pytest.raises(Boom):
                model(torch.ones(2, 6))
        with record_collectives(mesh) as recorder:
            model(torch.ones(2, 6))
        assert recorder.count("all_gather", "replicate") == 2


def test_updates_within_the_backward(trial) -> None:
    run = trial()
    optim.step_in_backward(run.model, torch.optim.AdamW, lr=0.1)
    with run.world.paused():
        plain = torch.optim.AdamW(run.plain.parameters(), lr=0.1)
    for batch in range(2):
        run.backward(batch)
        with run.world.paused():
            run.plain_grads([batch])
            plain.step()
    assert all(param.grad is None for param in run.model.parameters())
    with full_params(run.model):
        for name, param in run.plain.named_parameters():
            for value in run.world.per_rank(run.model.get_parameter(name).detach()):
                torch.testing.assert_close(value, param.detach(), rtol=1e-9, atol=1e-9)
