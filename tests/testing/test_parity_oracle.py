"""The oracle must fail where the parallel model is wrong."""

import functools

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens

from parallel3d import MeshLayout
from parallel3d.fsdp import reduction
from parallel3d.fsdp.inspect import Bucket
from parallel3d.testing import assert_parity
from parallel3d.tp import Replicated

LAYOUT = MeshLayout(2, 2, 1)
run = functools.partial(
    assert_parity, functools.partial(Lm, layers=1), tokens, loss=lm_loss, steps=2, fp32=False
)


def test_reports_differences() -> None:
    result = run(LAYOUT)
    assert 0 <= result.grads["float64"] < 1e-12 and 0 <= result.weights["float64"] < 1e-12


def test_missing_all_reduce(monkeypatch) -> None:
    monkeypatch.setattr(reduction.Reducer, "all_reduce", lambda *args, unit: None)
    with pytest.raises(AssertionError, match="gradient of"):
        run(LAYOUT)


def test_missing_mean(monkeypatch) -> None:
    monkeypatch.setattr("parallel3d.fsdp.placement.DataAxes.data_size", 1)
    with pytest.raises(AssertionError, match="gradient of"):
        run(LAYOUT)


def test_partial_gradient_taken_for_whole() -> None:
    """Norms that see a part of the sequence need their gradients summed over tp."""
    plan = dict(LM_PLAN)
    plan["layers.*.norm"] = Replicated(tp_grad="partial")  # but they see all of it
    with pytest.raises(AssertionError, match=r"gradient of layers\.0\.norm"):
        run(MeshLayout(1, 1, 2), tp_plan=plan)


def test_rows_in_wrong_places(monkeypatch) -> None:
    """Values right, shards swapped: placements say one thing, memory another."""
    original = Bucket.build

    def swapped(self, device):
        original(self, device)
        for view in self.local_views:
            view.copy_(view.flip(0))

    monkeypatch.setattr(Bucket, "build", swapped)
    with pytest.raises(AssertionError, match=r"loss|gradient|weight"):
        run(MeshLayout(1, 2, 1))


def test_wrong_weights_after_steps() -> None:
    class Drifts(Lm):
        def forward(self, ids):
            out = super().forward(ids)
            if type(self) is not Drifts and not torch.is_grad_enabled():
                return out
            return out * (1.0 if type(self) is Drifts else 1.0 + 1e-6)

    with pytest.raises(AssertionError, match=r"loss|gradient|weight"):
        assert_parity(functools.partial(Drifts, layers=1), tokens, LAYOUT, loss=lm_loss, fp32=False)
