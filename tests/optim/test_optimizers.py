"""optim.local with all of pytorch_optimizer: the plain model's numbers, or refused; never others."""

import functools

import pytest

pytest.importorskip("pytorch_optimizer")

import torch
from _support.optim import around_optimizers
from _support.optim.local_sides import Sides, everything
from _support.optim.optimizers_table import (
    ITSELF,
    KNOWN_WRONG,
    SAID,
    TORCHS,
    classes,
    faults,
    outcomes,
)
from torch import optim

from parallel3d import MeshLayout, Parallel3dError
from parallel3d.optim import local
from parallel3d.optim.trial import ELEMENTWISE, check_elementwise, check_one_by_one
from parallel3d.testing import GlooPool, local_world

# Two steps on one matrix took these for elementwise; matrix=True was wrong with AdamP, AdaShift and Prodigy.
TAKEN = (
    "AdaShift",
    "AdamP",
    "ApolloDQN",
    "AvaGrad",
    "DAdaptAdam",
    "DAdaptLion",
    "Prodigy",
    "Ranger",
    "SGDP",
)
ONE_BY_ONE = ("AdamP", "ApolloDQN", "Ranger", "SGDP")  # of these
RIGHT = ("AdaBelief", "Lion", "ScheduleFreeAdamW")  # elementwise indeed


def named(*names: str) -> list[str]:
    return [f"pytorch_optimizer.{name}" for name in names]


@pytest.mark.slow
def test_nothing_is_wrong(gloo_pool: GlooPool) -> None:
    names = [*named("AdamP", "AdaShift", "Prodigy", "ScheduleFreeAdamW"), "torch.optim.AdamW"]
    names += KNOWN_WRONG
    table = gloo_pool.run(outcomes, names, world_size=2)[0]
    assert faults(table) == []
    assert table["torch.optim.AdamW"]["nothing said"] == "right"
    assert table["pytorch_optimizer.AdamP"] == dict(
        zip(SAID, ["RuntimeError", "refused", "refused", "right"], strict=True)
    )
    assert table["torch.optim.AdamW"][ITSELF] == "right"
    assert all(table[name][ITSELF].startswith("wrong") for name in KNOWN_WRONG)
    assert table["pytorch_optimizer.ScheduleFreeAdamW"]["`elementwise=True`"] == "right"


@pytest.mark.full
def test_nothing_is_wrong_with_any(gloo_pool: GlooPool) -> None:
    table = gloo_pool.run(outcomes, list(classes()), world_size=2, timeout=1800)[0]
    assert faults(table) == []
    rows = [
        row
        for name, row in table.items()
        if name.startswith("pytorch") and not isinstance(row, str)
    ]
    assert len(rows) >= 111
    assert sum("right" in (row["`elementwise=True`"], row["`matrix=True`"]) for row in rows) > 80


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (place % 4 > 0))
        for place, name in enumerate(around_optimizers.AROUND)
    ],
)
def test_around_optimizers(gloo_pool: GlooPool, name: str) -> None:
    """Schedules, averages and wrappers: the plain weights and averages; Lookahead raises."""
    found = gloo_pool.run(around_optimizers.outcomes, [name], world_size=2, timeout=120)[0][name]
    wanted = "NotImplementedError" if "Lookahead" in name else "right"
    assert found == dict.fromkeys(around_optimizers.OPTIMIZERS, wanted)


@pytest.mark.parametrize("name", TAKEN)
def test_the_guard_catches_what_is_said_wrongly(name) -> None:
    cls = classes()[f"pytorch_optimizer.{name}"]
    with pytest.raises(Parallel3dError, match="is not elementwise: in a trial"):
        check_elementwise(cls, {}, {}, torch.device("cpu"))
    if name in ONE_BY_ONE:
        check_one_by_one(cls, {}, {})
    else:
        with pytest.raises(Parallel3dError, match=r"use the class itself|use one that treats"):
            check_one_by_one(cls, {}, {})


def test_one_that_takes_parameters_in_pairs() -> None:
    """It fails on sizes that don't fit together, and so is tried on some that do."""
    with pytest.raises(Parallel3dError, match="where there are others"):
        check_one_by_one(classes()["pytorch_optimizer.LoRARite"], {}, {})


def test_one_whose_state_depends_on_the_weights() -> None:
    """Ranks would exchange tensors of different sizes, and wait for each other."""
    with pytest.raises(Parallel3dError, match="two of one shape had state of different shapes"):
        check_one_by_one(classes()["pytorch_optimizer.SaRA"], {}, {})


@pytest.mark.parametrize("name", RIGHT)
def test_the_guard_lets_elementwise_ones_pass(name) -> None:
    cls = classes()[f"pytorch_optimizer.{name}"]
    check_elementwise(cls, {}, {}, torch.device("cpu"))
    check_one_by_one(cls, {}, {})


OPTIONS: dict[str, list[dict]] = {
    "ASGD": [{"t0": 3}, {"weight_decay": 0.1}],
    "Adadelta": [{"weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.5}, {"fused": True}],
    "Adam": [
        {"amsgrad": True},
        {"fused": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    "AdamW": [{"amsgrad": True}, {"fused": True}],
    "Adamax": [{"weight_decay": 0.1}],
    "NAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "Rprop": [{"etas": (0.4, 1.3)}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"fused": True, "momentum": 0.9}],
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_known_ones_pass(name) -> None:
    shared = [{}, {"foreach": True}, {"foreach": False}, {"maximize": True}]
    for options in [*shared, *OPTIONS[name]]:
        check_elementwise(getattr(optim, name), options, {}, torch.device("cpu"))


def test_the_others_of_torch_are_not_known() -> None:
    assert set(TORCHS) - ELEMENTWISE.keys() == {"Adafactor", "Muon"}


class OwnNumbers(optim.Optimizer):
    """A number in each parameter's state, which is the parameter's own; a counter made at the first step."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("counts", torch.zeros(())).add_(1)
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["norm"] = round(state.get("norm", 0.0) + float(p.grad.norm()), 8)
                    state["large"] = state["norm"] > 1
                    state["step"] = state.get("step", 0) + 1
                    scale = group["lr"] / state["norm"] / group["step"] / float(group["counts"])
                    p.sub_(p.grad, alpha=scale)


class Held(optim.SGD):
    """Elementwise, but for a list in its state."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [torch.zeros_like(p)]
        return super().step(closure)


class Twice(optim.SGD):
    """Calls its closure again at other weights."""

    def step(self, closure=None):
        loss = super().step(closure)
        if closure is not None:
            closure()
        return loss


class ByLoss(optim.SGD):
    """Scales the step by the loss."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = 1.0 if closure is None else float(closure())
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * loss)


@pytest.mark.parametrize(
    ("cls", "match"),
    [(Held, "list"), (Twice, "closure several times"), (ByLoss, "loss that a closure")],
)
def test_what_else_is_refused(cls, match) -> None:
    for said in ({"elementwise": True}, {"matrix": True}):
        with pytest.raises(Parallel3dError, match=match):
            local(cls, torch.nn.Linear(3, 2), lr=0.1, **said)


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1), (1, 2, 2)], ids=str)
def test_numbers_are_each_parameters_own(sizes) -> None:
    """And what a class makes in its group at the first step is counted once a step."""
    with local_world(4) as world:
        sides = Sides(world, MeshLayout(*sizes), layers=2)
        sides.optimizers(everything, OwnNumbers, functools.partial(local, OwnNumbers, matrix=True))
        for step in range(3):
            sides.backward(step)
            if step == 1:  # nothing to step on: counted all the same
                sides.zero_grad()
            sides.step()
            sides.zero_grad()
        sides.check(moved=False)
        assert sides.optimizer.param_groups[0]["step"] == 3
        assert sides.optimizer.param_groups[0]["counts"] == 3
