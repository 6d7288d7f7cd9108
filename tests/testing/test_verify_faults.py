"""verify names the module in which a fault was planted, also if every module of a model has it in turn."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from _support.testing.verify_faults import (
    FAULTS,
    BiasOnEveryRank,
    Fault,
    LowPrecision,
    NoReduction,
    NoSumOfInputGradient,
    ReducedTwice,
    SummedAgainInBackward,
    table,
)
from _support.testing.verify_models import PLAN, SEQUENCE, Decoder, by_hand, ids, part
from torch import Tensor, nn

from parallel3d import MeshLayout, parallelize
from parallel3d.testing import Difference, first_difference

DOCS = Path(__file__).parents[2] / "docs" / "verify.md"


@functools.cache
def found(index: int) -> Difference | None:
    """What verify finds of a fault."""
    fault = FAULTS[index]
    return first_difference(fault.build, fault.batch, MeshLayout(*fault.mesh), **fault.options)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, id=fault.title.replace(" ", "-"), marks=[pytest.mark.slow] * (i % 4 > 0)
        )
        for i, fault in enumerate(FAULTS)
    ],
)
def test_names_the_module(fault: Fault) -> None:
    difference = found(FAULTS.index(fault))
    assert difference is not None
    assert (difference.module, difference.kind) == (fault.module, fault.kind), str(difference)
    assert difference.difference > difference.bound


def test_at_least_twenty_faults_of_different_kinds() -> None:
    assert len(FAULTS) >= 20
    assert len({fault.title for fault in FAULTS}) == len(FAULTS)
    assert len({fault.kind for fault in FAULTS}) >= 7


def test_the_docs_have_the_table_and_the_count() -> None:
    text = DOCS.read_text()
    assert table() in text
    assert f"names the right module in all {len(FAULTS)} of {len(FAULTS)}" in text


# Every module of a model, made to differ in turn, is the one that verify names.


class _Scaled(torch.autograd.Function):
    """Its value times one number, its gradient times another."""

    @staticmethod
    def forward(ctx, x: Tensor, value: float, grad: float) -> Tensor:
        ctx.grad = grad
        return x * value

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.grad, None, None


build = functools.partial(Decoder, vocab=20, bias=True)
NAMES = [n for n, m in build().named_modules() if not isinstance(m, nn.ModuleList)]
ROWS = [n for n in NAMES if n.endswith(("wo", "down"))]
COLUMNS = [n for n in NAMES if n.endswith(("wq", "wk", "wv", "up"))]


@pytest.mark.full
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE], ids=["plan", "sequence"])
@pytest.mark.parametrize("what", ["output", "gradient"])
@pytest.mark.parametrize("name", NAMES)
def test_of_the_library(plan: dict, what: str, name: str) -> None:
    value, grad = (1 + 1e-4, 1.0) if what == "output" else (1.0, 1 + 1e-4)

    def apply(model: nn.Module, mesh) -> nn.Module:
        parallelize(model, mesh, plan)
        hook = lambda _, args, y: _Scaled.apply(y, value, grad)  # noqa: E731
        model.get_submodule(name).register_forward_hook(hook)
        return model

    found = first_difference(build, ids, MeshLayout(1, 1, 2), apply=apply, steps=1)
    assert found is not None and (found.module, found.kind) == (name, what), str(found)


CLASSES = [NoReduction, ReducedTwice, BiasOnEveryRank, LowPrecision, SummedAgainInBackward]
BY_HAND = [*itertools.product(ROWS, CLASSES), *itertools.product(COLUMNS, [NoSumOfInputGradient])]


@pytest.mark.full
@pytest.mark.parametrize(("name", "cls"), BY_HAND)
def test_by_hand(name: str, cls: type) -> None:
    def apply(model: nn.Module, mesh) -> nn.Module:
        by_hand(model, mesh)
        model.get_submodule(name).__class__ = cls
        return model

    found = first_difference(build, ids, MeshLayout(2, 1, 2), apply=apply)
    assert found is not None and found.module == name, str(found)


@pytest.mark.full
@pytest.mark.parametrize("name", COLUMNS)
def test_parts_exchanged(name: str) -> None:
    def apply(model: nn.Module, mesh) -> nn.Module:
        linear, tp = model.get_submodule(name), mesh["tp"]
        whole = dict(linear.named_parameters())
        by_hand(model, mesh)
        for own, param in whole.items():
            setattr(linear, own, part(param, 0, tp, 1 - tp.get_local_rank()))
        return model

    found = first_difference(build, ids, MeshLayout(1, 1, 2), apply=apply)
    assert found is not None and found.module == name, str(found)
