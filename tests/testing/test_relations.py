"""testing.audit and parallel3d audit: mistakes, engines of others, and a user's training step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _support.audit.published import Net, loss_of, tokens
from torch import Tensor, nn

import parallel3d as p3d
from parallel3d import MeshLayout, Parallel3dError
from parallel3d.testing import ENGINES, GlooPool, audit
from parallel3d.testing.relations.relation import Verdict

PROGRAM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def build_model():
    return Model()


def batch(index):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(index))


def loss(model, x):
    return model(x).square().mean()
"""


def run(*words: str) -> Any:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from parallel3d.tools.cli.app import app

    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["audit", *words])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"relations": ["acumulation"]}, "'acumulation' is no relation; there are plain, accum"),
        ({"engines": ["deepspeed"]}, "'deepspeed' is no engine; there are parallel3d, torch"),
        ({"steps": 1}, "steps=1: at least 2"),
    ],
)
def test_mistakes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Parallel3dError, match=message):
        audit(Net, tokens, loss=loss_of, **given)


def test_a_file_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "no_model_here.py").write_text("def make():\n    pass\n")
    result = run(str(tmp_path / "no_model_here.py"))
    assert result.exit_code == 2 and "no_model_here:NAME; there are make" in result.stderr
    assert run("nowhere.py").exit_code == 2


@pytest.mark.slow
def test_a_file_whose_functions_are_found(tmp_path: Path) -> None:
    """As a user starts it: processes of its own."""
    (tmp_path / "found_by_name.py").write_text(PROGRAM)
    words = ("--relation", "plain", "--relation", "norm", "--relation", "rotated", "--json")
    result = run(str(tmp_path / "found_by_name.py"), *words)
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert [row["verdict"] for row in table["outcomes"]] == ["holds"] * 3


def own_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> Any:
    """A user's training step."""
    total = torch.zeros((), dtype=torch.float64)
    for (ids,) in p3d.optim.accumulate(model, batches):
        loss = loss_of(model, ids) / len(batches)
        loss.backward()
        total += loss.detach()
    norm = p3d.optim.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


def step_without_division(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any]
) -> Tensor:
    """It forgets that there are several micro-batches."""
    for (ids,) in p3d.optim.accumulate(model, batches):
        loss = loss_of(model, ids)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.slow
def test_a_step_of_a_user(gloo_pool: GlooPool) -> None:
    given: dict[str, Any] = {"loss": loss_of, "layout": MeshLayout(2, 1), "pool": gloo_pool}
    wrong = audit(Net, tokens, step=step_without_division, relations=["accumulation"], **given)
    (found,) = wrong.failed
    assert (found.what, found.factor, found.axes) == ("gradient", pytest.approx(2), "micro_batches")
    right = audit(Net, tokens, step=own_step, relations=["accumulation", "norm"], **given)
    assert not right.failed, right


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "accelerate", "transformers"])
def test_engines_of_others(name: str, gloo_pool: GlooPool) -> None:
    pytest.importorskip(name)
    table = audit(
        Net, tokens, loss=loss_of, engines=[name], layout=MeshLayout(1, 2), pool=gloo_pool
    )
    assert not table.failed, table
    assert all(outcome.verdict is Verdict.HOLDS for outcome in table.outcomes), table


def test_what_an_engine_has_not() -> None:
    pytest.importorskip("accelerate")
    from parallel3d.testing.relations.engines import Program
    from parallel3d.testing.samples import Samples

    def program(layout: MeshLayout) -> Program:
        return Program(Net, Samples(tokens, Net), loss_of, layout)

    assert "no tp" in ENGINES["accelerate"].unable(program(MeshLayout(1, 1, 2)), "")
    assert not ENGINES["parallel3d"].unable(program(MeshLayout(2, 1, 2)), "resumed")
