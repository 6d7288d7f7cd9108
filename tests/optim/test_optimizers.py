"""optim.local with all of pytorch_optimizer: what may be said of a class, and the plain model's numbers."""

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

from parallel3d import MeshLayout
from parallel3d.optim import local
from parallel3d.optim.known import ELEMENTWISE, MATRIX
from parallel3d.testing import GlooPool, local_world

pytestmark = pytest.mark.ci


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
        zip(SAID, ["RuntimeError", "refused", "no", "right"], strict=True)
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


def test_the_others_of_torch_are_not_known() -> None:
    assert set(TORCHS) - ELEMENTWISE.keys() == MATRIX.keys()


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
