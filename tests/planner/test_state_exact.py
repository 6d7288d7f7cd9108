"""The state and buffer part of a predicted memory is what the engine allocates, to the byte."""

from dataclasses import replace

import pytest
import torch
from _support.fsdp.lifetimes import PeakBytes
from _support.planner.held_by_engine import Held, local_of
from _support.planner.state_models import Case, Net, random_case, spec_of, wired_case

from parallel3d import Sharding, build_mesh, optim, parallelize
from parallel3d.fsdp import param
from parallel3d.fsdp.inspect import units_of
from parallel3d.planner.memory import StateMemory, state_memory
from parallel3d.testing import fake_world

SEEDS = range(30)


def predicted(model: Net, case: Case, memory: str = "on demand") -> StateMemory:
    """On the CPU, where no streams are, and parameters travel in place from ``case.large`` on."""
    work = replace(case.workload, memory=memory)
    return state_memory(
        spec_of(model, case), case.layout, work, zero_copy_bytes=case.large, streams=False
    )


def made_parallel(
    case: Case, patch: pytest.MonkeyPatch, memory: str = "on demand"
) -> tuple[Net, StateMemory]:
    patch.setattr(param, "CPU_BYTES", case.large)
    torch.manual_seed(0)
    model = Net(case)
    wanted = predicted(model, case, memory)
    mesh = build_mesh(case.layout, device_type="cpu")
    sharding = Sharding(reshard_after_forward=case.reshard)
    parallelize(model, mesh, case.plan(), sharding, mp_policy=case.policy, memory=memory)
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
    holds_what_is_predicted(random_case(seed), monkeypatch, dtensors)


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_with_gradients_in_another_dtype_on_the_wire(seed, monkeypatch):
    """They are packed in it if they arrive in it, else cast; what is received waits for its sum."""
    holds_what_is_predicted(wired_case(seed), monkeypatch)


def holds_what_is_predicted(case: Case, monkeypatch, dtensors: bool = False) -> None:
    with fake_world(0, case.layout.world_size):
        held = Held(monkeypatch)
        model, wanted = made_parallel(case, monkeypatch)
        optimizer = adamw(model, dtensors)
        step(model, case, optimizer)
        optimizer.step()
        with held.following(model):
            at_loss = step(model, case, optimizer, held)
        with PeakBytes() as new:
            optimizer.step()
        parameters, gradients, moments = at_rest(model, optimizer)
    assert (parameters, gradients, moments) == (
        wanted.parameters,
        wanted.gradients,
        wanted.optimizer,
    )
    assert at_loss == wanted.played.at_loss
    assert held.peak == wanted.played.unsharded + wanted.played.buffers
    results = wanted.gradients + wanted.results
    if case.wire is None:
        assert held.most_reduced == results
    else:  # on the CPU the last sum is made when the first results are gradients already
        assert wanted.gradients <= held.most_reduced <= results
    assert new.peak == wanted.step


def fixed_bytes(model: Net) -> tuple[int, int]:
    """Bytes of the fixed buffers: of unsharded parameters, and others."""
    kinds: tuple[dict, dict] = {}, {}
    for unit in units_of(model, recurse=True):
        place = unit.group.place
        if place is not None:
            scratch = [*place.scratch.buffers.values(), *place.lent.tensors]
            for found, tensors in zip(kinds, (place.slot.buffers.values(), scratch), strict=True):
                found |= {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    unsharded, others = (sum(found.values()) for found in kinds)
    return unsharded, others


@pytest.mark.parametrize("seed", SEEDS)
def test_static_memory(seed, monkeypatch):
    """What is allocated once, and what comes beside it: gradients that wait to be reduced."""
    wanted, fixed, beside = with_fixed_buffers(random_case(seed), monkeypatch)
    assert fixed == wanted.played.fixed
    assert wanted.played.unsharded == wanted.played.at_loss == fixed[0]
    assert fixed[1] + beside == wanted.played.buffers


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_static_memory_and_another_dtype_on_the_wire(seed, monkeypatch):
    """What is sent then is not lent."""
    wanted, fixed, _ = with_fixed_buffers(wired_case(seed), monkeypatch)
    assert fixed == wanted.played.fixed
    assert wanted.played.unsharded == wanted.played.at_loss == fixed[0]


def with_fixed_buffers(case: Case, monkeypatch) -> tuple[StateMemory, tuple[int, int], int]:
    """What is predicted; the fixed buffers; and the most bytes of buffers beside them in a backward."""
    with fake_world(0, case.layout.world_size):
        held = Held(monkeypatch)
        model, wanted = made_parallel(case, monkeypatch, "static")
        optimizer = adamw(model)
        for _ in range(2):
            step(model, case, optimizer)
            optimizer.step()
        with held.following(model):
            step(model, case, optimizer, held)
        fixed = fixed_bytes(model)
    # Held counts the buffers of all-gathers, and no inputs.
    return wanted, fixed, held.peak - fixed[0] - held.gathered


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
