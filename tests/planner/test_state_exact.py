"""The state and buffer part of a predicted memory is what the engine allocates, to the byte."""

import pytest
import torch
from _support.planner.held_by_engine import Held, local_of
from _support.planner.state_models import Case, Net, random_case, spec_of

from parallel3d import build_mesh, optim, parallelize
from parallel3d.fsdp import param
from parallel3d.fsdp.inspect import units_of
from parallel3d.planner.memory import StateMemory, state_memory
from parallel3d.testing import fake_world

SEEDS = range(30)


def predicted(model: Net, case: Case) -> StateMemory:
    """On the CPU, where no streams are, and parameters travel in place from ``case.large`` on."""
    return state_memory(
        spec_of(model, case), case.layout, case.workload, zero_copy_bytes=case.large, streams=False
    )


def made_parallel(case: Case, patch: pytest.MonkeyPatch) -> tuple[Net, StateMemory]:
    patch.setattr(param, "CPU_BYTES", case.large)
    torch.manual_seed(0)
    model = Net(case)
    wanted = predicted(model, case)
    mesh = build_mesh(case.layout, device_type="cpu")
    parallelize(model, mesh, case.plan(), mp_policy=case.policy, reshard_after_forward=case.reshard)
    return model, wanted


def step(model: Net, case: Case, optimizer: torch.optim.Optimizer, held: Held | None = None) -> int:
    """One training step; the bytes of unsharded parameters at its loss."""
    optimizer.zero_grad()
    tokens = torch.arange(16).view(2, 8) % case.vocab
    loss = model(tokens).float().pow(2).mean()
    at_loss = 0
    if held is not None:
        at_loss = held.begin_backward()
    loss.backward()
    return at_loss


def at_rest(model: Net, optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Bytes of parameters (with the engine's padding), gradients (the same), and AdamW's moments."""
    buckets = [bucket for unit in units_of(model, recurse=True) for bucket in unit.group.buckets]
    parameters = sum(bucket.flat.nbytes for bucket in buckets)
    grads = [local_of(p.grad) for p in model.parameters() if p.grad is not None]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}
    moments = [
        local_of(value).nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    return parameters, sum(storages.values()), sum(moments)


def adamw(model: Net, dtensors: bool = False) -> torch.optim.Optimizer:
    """foreach, the default on accelerators; on our plain tensors, or on torch's DTensors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if dtensors:
        return torch.optim.AdamW(trained, foreach=True)
    return optim.local(torch.optim.AdamW, trained, foreach=True)


ON_DTENSORS = [pytest.param(seed, True, marks=pytest.mark.full) for seed in (4, 14, 24)]


@pytest.mark.parametrize(("seed", "dtensors"), [*((seed, False) for seed in SEEDS), *ON_DTENSORS])
def test_the_first_rank_holds_what_is_predicted(seed, dtensors, monkeypatch):
    """Of a random model and layout, in the second step, which knows the order of the units. Equal are:

    - parameters, gradients and moments at rest after the step, as the buffers they lie in, padding included;
    - unsharded parameters at the end of forward;
    - the most that unsharded parameters and buffers take together during backward: gather buffers and cast
      inputs of gathers, gradients from their arrival at the engine to their reduction, inputs of reductions;
    - the most that gradients and results of reductions take;
    - what the optimizer's step allocates beside.
    """
    case = random_case(seed)
    with fake_world(0, case.layout.world_size):
        held = Held(monkeypatch)
        model, wanted = made_parallel(case, monkeypatch)
        optimizer = adamw(model, dtensors)
        step(model, case, optimizer)
        optimizer.step()
        with held.following(model):
            at_loss = step(model, case, optimizer, held)
        with held.counting_new() as new:
            optimizer.step()
        parameters, gradients, moments = at_rest(model, optimizer)
    assert (parameters, gradients, moments) == (
        wanted.parameters,
        wanted.gradients,
        wanted.optimizer,
    )
    assert at_loss == wanted.unsharded_at_loss
    assert held.peak == wanted.unsharded + wanted.buffers
    assert held.most_reduced == wanted.gradients + wanted.results
    assert new.most == wanted.step


@pytest.mark.parametrize("seed", SEEDS[::10])
def test_no_other_rank_holds_more(seed, monkeypatch):
    """The last rank: as many bytes at rest of parameters and gradients (segments are alike on all ranks), and
    no more moments, of which it has those of its own rows only."""
    case = random_case(seed)
    world = case.layout.world_size
    with fake_world(world - 1, world):
        model, wanted = made_parallel(case, monkeypatch)
        optimizer = adamw(model)
        step(model, case, optimizer)
        optimizer.step()
        parameters, gradients, moments = at_rest(model, optimizer)
    assert (parameters, gradients) == (wanted.parameters, wanted.gradients)
    assert moments <= wanted.optimizer


@pytest.mark.parametrize("seed", SEEDS[1::10])
def test_gradients_that_are_added_to(seed, monkeypatch):
    """The second micro-batch of a step: results of all units wait beside the gradients they are added to."""
    case = random_case(seed)
    with fake_world(0, case.layout.world_size):
        held = Held(monkeypatch)
        model, wanted = made_parallel(case, monkeypatch)
        tokens = torch.arange(16).view(2, 8) % case.vocab
        model(tokens).float().pow(2).mean().backward()
        with held.following(model):
            loss = model(tokens).float().pow(2).mean()
            held.begin_backward()
            loss.backward()
    assert held.most_reduced == wanted.gradients + wanted.results_again
