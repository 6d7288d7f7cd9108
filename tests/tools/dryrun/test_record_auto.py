"""What decides by values within this package, in a dry run: an "auto" plan's proof, sums that are checked."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d.errors import DryRunError
from parallel3d.tools.dryrun import DryRun, record
from parallel3d.tp import auto_plan


class Rotated(nn.Module):
    """Attention with a table that is a buffer, an attribute, or in a list of one."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.heads, self.kept = 4, kept
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        table = torch.outer(torch.arange(16.0), torch.ones(4)).cos()
        if kept == "buffer":
            self.register_buffer("table", table, persistent=False)
        else:
            self.table: Any = [table] if kept == "list" else table

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        table = self.table[0] if self.kept == "list" else self.table
        turn = table[: x.shape[1]].repeat_interleave(2, -1)
        attended = F.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def dry(program: Callable[[], Any]) -> DryRun:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of fake tensors' pointers
        return record(program, 4)


@pytest.mark.parametrize("kept", ["buffer", "attribute", "list"])
def test_an_auto_plan_is_proven_with_real_numbers(kept: str) -> None:
    """The same plan as outside, and no operation of the proof in the record."""
    plans = [auto_plan(nn.Sequential(Rotated(kept), Rotated(kept)), 2)]

    def program() -> None:
        model = nn.Sequential(Rotated(kept), Rotated(kept))
        plans.append(auto_plan(model, 2))
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=2, tp=2), device_type="cpu")
        p3d.parallelize(model, mesh, tp_plan="auto")
        train(model, torch.randn(2, 8, 32))

    run = dry(program)
    assert str(plans[0]) == str(plans[1]) and run.steps == 2
    local = {each.name: each.local_shape for each in run.parameters}
    assert local["0.qkv.weight"] == (24, 32)  # of 96 rows over shard x tp
    assert not [each for each in run.operations if each.dtype == "float64"]
    assert [call.op for call in run.collectives if call.axis == "tp"]


def test_an_example_has_values() -> None:
    """One of floating-point numbers has none in a dry run: others stand for them."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=2, tp=2), device_type="cpu")
        x = torch.randn(2, 8, 32)
        p3d.parallelize(model, mesh, tp_plan="auto", example=((x,), {}))
        train(model, x)

    assert {each.name: each.local_shape for each in dry(program).parameters}["0.weight"] == (16, 32)


def test_numbers_that_are_checked() -> None:
    """A count of tokens, a norm, and a Hugging Face folder: outside a dry run each decides."""

    def program() -> None:
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=4), device_type="cpu")
        model = p3d.parallelize(nn.Linear(8, 8), mesh)
        out = model(torch.randn(4, 8))
        count = (out > 0).sum()
        p3d.optim.global_mean(out.sum(), count).backward()
        p3d.optim.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)

    assert not dry(program).unknown


def test_other_checkpoints_end_at_once(tmp_path: Path) -> None:
    """Nothing is written or read; what hands values to the program says that there are none."""

    def program() -> None:
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=4), device_type="cpu")
        with torch.device("meta"):
            model = nn.Linear(8, 8)
        p3d.parallelize(model, mesh)
        assert p3d.checkpoint.load_hf(tmp_path / "none", model) == ([], [])
        train(model, torch.randn(4, 8))
        p3d.checkpoint.save_hf(tmp_path / "hf", model)
        p3d.checkpoint.save_torch(tmp_path / "file.pt", model)
        p3d.checkpoint.save_dcp(tmp_path / "dcp", model)
        with pytest.raises(
            DryRunError, match=r"checkpoint\.hf_tensors in a dry run: there are no v"
        ):
            p3d.checkpoint.hf_tensors(model)
        p3d.checkpoint.load_dcp(tmp_path / "dcp", model)
        p3d.checkpoint.load_torch(tmp_path / "file.pt", model)

    assert dry(program).steps == 2 and not list(tmp_path.iterdir())
