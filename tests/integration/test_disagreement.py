"""Ranks that ask parallelize for different things: one error on all of them, not a hang."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from _support.snapshot import Snapshot
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallel3d as p3d
from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, parallelize
from parallel3d.tp import Colwise, Style

LAYOUT = MeshLayout(shard=2, tp=2)
RANKS = LAYOUT.world_size
LIMIT = 30.0  # seconds


def usual() -> Lm:
    torch.manual_seed(0)
    return Lm()


@dataclass(frozen=True)
class Request:
    """What one rank asks for."""

    build: Callable[[], nn.Module] = usual
    plan: Any = field(default_factory=lambda: LM_PLAN)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What one rank got."""

    error: str
    message: str
    cause: str
    seconds: float


# The odd rank's models and styles


def wider() -> Lm:
    return Lm(hidden=24)


def deeper() -> Lm:
    return Lm(layers=3)


def half_precision() -> Lm:
    return Lm().bfloat16()


def frozen() -> Lm:
    model = Lm()
    model.embed.weight.requires_grad_(False)
    return model


def tied() -> Lm:
    """The usual names and shapes; only which parameters are one differs."""
    model = usual()
    model.layers[1].up.weight = model.layers[0].up.weight
    return model


def sparse_parameter() -> Lm:
    model = Lm()
    model.norm.odd = nn.Parameter(torch.ones(2).to_sparse())
    return model


class Buggy(Style):
    """A user's style with a bug that shows on one rank."""

    def plan(self, module: nn.Module, tp: int) -> dict:
        raise ZeroDivisionError("a bug")


# What runs on each rank


def ask(odd: int, usually: Request, oddly: Request) -> Outcome:
    """Asks; checks that the model is unchanged, and that the ranks can go on together."""
    mesh = build_mesh(LAYOUT, device_type="cpu")
    request = oddly if dist.get_rank() == odd else usually
    model = request.build()
    before = Snapshot(model, tokens(0))
    start = time.monotonic()
    with pytest.raises(Exception) as caught:  # which one is the result
        parallelize(model, mesh, request.plan, **request.options)
    seconds = time.monotonic() - start
    before.check()

    # Corrected, the same program runs: nobody is one collective ahead of the others.
    model = parallelize(usual(), mesh, LM_PLAN)
    lm_loss(model, tokens(LAYOUT.data_rank(dist.get_rank()))).backward()
    assert all(p.grad is not None for p in model.parameters())

    cause = type(caught.value.__cause__).__name__
    return Outcome(type(caught.value).__name__, str(caught.value), cause, seconds)


def outcomes(gloo_pool: Any, odd: int, usually: Request, oddly: Request) -> list[Outcome]:
    """Of all ranks, each within the limit."""
    found = gloo_pool.run(ask, odd, usually, oddly, world_size=RANKS, timeout=2 * LIMIT)
    assert max(outcome.seconds for outcome in found) < LIMIT
    return found


def check_disagreement(found: list[Outcome], odd: int, *shown: str) -> None:
    """The same error everywhere, which names the odd rank and shows ``shown``."""
    assert {outcome.error for outcome in found} == {"AgreementError"}
    (message,) = {outcome.message for outcome in found}
    assert f"disagree about 'parallelize': rank {odd} differs from the majority" in message
    for text in shown:
        assert text in message, message


WRONG_PLAN = {**LM_PLAN, "layers.*.upp": "colwise"}
GATHERING = {**LM_PLAN, "layers.*.up": Colwise(), "norm": "replicated_with_grad_allreduce"}

DIFFERENCES: dict[str, tuple[Request, tuple[str, ...]]] = {
    "plan": (Request(plan=GATHERING), ("tp_plan: ", "Replicated(tp_grad='partial')")),
    "a dim of the model": (Request(wider), ("parameters: ", "(24, 12)", "(20, 12)")),
    "number of layers": (Request(deeper), ("units: ", "layers.2")),
    "dtype": (Request(half_precision), ("torch.bfloat16", "torch.float32")),
    "what is trained": (Request(frozen), ("embed.weight", "False", "True")),
    "units": (Request(options={"units": ["layers.0"]}), ("units: ", "'layers.0'")),
    "policy": (
        Request(options={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
        ("mp_policy: ", "param_dtype=torch.bfloat16", "param_dtype=None"),
    ),
    "reshard_after_forward": (
        Request(options={"reshard_after_forward": False}),
        ("reshard_after_forward: True on ranks 0-1, 3; False on rank 2",),
    ),
    "checkpointing": (
        Request(options={"activation_checkpointing": True}),
        ("activation_checkpointing: False on ranks 0-1, 3; True on rank 2",),
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_difference_is_the_same_error_on_every_rank(gloo_pool, difference: str) -> None:
    oddly, shown = DIFFERENCES[difference]
    check_disagreement(outcomes(gloo_pool, 2, Request(), oddly), 2, *shown)


def test_weights_that_one_rank_ties(gloo_pool) -> None:
    # Alone, the odd rank would find the tie between two units when the others are done.
    found = outcomes(gloo_pool, 1, Request(), Request(tied))
    check_disagreement(found, 1, "layers.0.up.weight layers.1.up.weight")


# A rank that has an error of its own reports it; the others don't wait for it in a collective.

OWN_ERRORS: dict[str, tuple[Request, str, str]] = {
    "a plan": (Request(plan=WRONG_PLAN), "'layers.*.upp' matches no module", "PlanError"),
    "no plan": (Request(plan=None), "Give a plan", "PlanError"),
    "a model": (Request(sparse_parameter), "to_dense()", "Parallel3dError"),
    "units": (Request(options={"units": ["blocks"]}), "matches no module", "Parallel3dError"),
    "an option": (Request(options={"compile": 3}), "compile is 3", "Parallel3dError"),
    "a bug": (Request(plan={"head": Buggy()}), "a bug", "ZeroDivisionError"),
}


@pytest.mark.parametrize(
    ("wrong", "odd"),  # rank 0 compares, the others read what it found
    [*((wrong, 3) for wrong in OWN_ERRORS), ("a plan", 0), ("a bug", 0)],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(gloo_pool, wrong: str, odd: int) -> None:
    oddly, shown, own = OWN_ERRORS[wrong]
    found = outcomes(gloo_pool, odd, Request(), oddly)
    check_disagreement(found, odd, "problem: none on ranks ", shown)
    causes = [outcome.cause for outcome in found]
    assert causes == [own if rank == odd else "NoneType" for rank in range(RANKS)]


def test_what_is_wrong_everywhere_is_everyones_own_error(gloo_pool) -> None:
    wrong = Request(plan=WRONG_PLAN)
    found = outcomes(gloo_pool, 0, wrong, wrong)
    assert {outcome.error for outcome in found} == {"PlanError"}
    assert all("'layers.*.upp' matches no module" in outcome.message for outcome in found)


def other_seed(rank_that_differs: int) -> str:
    """Real (not meta) models from different seeds: their shards would not fit together."""
    torch.manual_seed(int(dist.get_rank() == rank_that_differs))
    model = torch.nn.Linear(4, 4)
    mesh = p3d.build_mesh(p3d.MeshLayout(1, 4, 1), device_type="cpu")
    with pytest.raises(p3d.AgreementError) as info:
        p3d.parallelize(model, mesh)
    return str(info.value)


@pytest.mark.smoke
def test_models_from_different_seeds(gloo_pool) -> None:
    for message in gloo_pool.run(other_seed, 2, world_size=4):
        assert "rank 2 differs" in message and "first 'weight', in 2 of 2 parameters" in message
        assert "torch.manual_seed" in message and "p3d.materialize" in message


def three_seeds() -> str:
    torch.manual_seed(dist.get_rank() // 2 * dist.get_rank())
    model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    with pytest.raises(p3d.AgreementError) as info:
        p3d.parallelize(model, p3d.build_mesh(p3d.MeshLayout(1, 4, 1), device_type="cpu"))
    return str(info.value)


def test_models_of_which_none_has_a_majority(gloo_pool) -> None:
    for message in gloo_pool.run(three_seeds, world_size=4):
        assert "first '1.weight', in 2 of 4 parameters: 3 models on 4 ranks" in message


def two_meshes() -> list[int]:
    """Two halves of the world, each with a model of its own, as pipeline stages have."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    stage = mesh.get_local_rank("pp")
    torch.manual_seed(stage)
    model = p3d.parallelize(torch.nn.Linear(3 + stage, 4), mesh["shard"])
    model(torch.ones(1, 3 + stage)).sum().backward()
    return list(model.weight.grad.shape)


def test_submeshes_are_compared_apart(gloo_pool) -> None:
    assert gloo_pool.run(two_meshes, world_size=4) == [[4, 3], [4, 3], [4, 4], [4, 4]]
