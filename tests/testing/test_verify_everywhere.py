"""Every module of a model, made to differ in turn, is the one that verify names."""

import functools
import itertools

import pytest
import torch
from _support.testing.verify_faults import (
    BiasOnEveryRank,
    LowPrecision,
    NoReduction,
    NoSumOfInputGradient,
    ReducedTwice,
    SummedAgainInBackward,
)
from _support.testing.verify_models import PLAN, SEQUENCE, Decoder, by_hand, ids, part
from torch import Tensor, nn

from parallel3d import MeshLayout, parallelize
from parallel3d.testing import first_difference


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
pytestmark = pytest.mark.full


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


@pytest.mark.parametrize(("name", "cls"), BY_HAND)
def test_by_hand(name: str, cls: type) -> None:
    def apply(model: nn.Module, mesh) -> nn.Module:
        by_hand(model, mesh)
        model.get_submodule(name).__class__ = cls
        return model

    found = first_difference(build, ids, MeshLayout(2, 1, 2), apply=apply)
    assert found is not None and found.module == name, str(found)


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
