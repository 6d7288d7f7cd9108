"""verify on odd but legitimate models: what it must see, and must not be silent about."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d import MeshLayout, parallelize
from parallel3d.testing import Verification, verify

PLAN = {"up": "colwise", "down": "rowwise"}


class Odd(nn.Module):
    """Two outputs, dropout, a counter, a module for evaluation only."""

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.drop, self.second, self.idle = nn.Dropout(0.3), nn.Linear(4, 3), nn.Linear(4, 4)
        self.extra = extra or nn.Identity()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        y = self.extra(self.drop(self.down(torch.tanh(self.up(x)))))
        y = y if self.training else self.idle(y)
        return {"first": y, "second": self.second(y), "none": None}


class OwnLoss(Odd):
    def forward(self, x: Tensor) -> dict[str, Any]:
        output = super().forward(x)
        return {**output, "loss": output["first"].mean() + output["second"].square().mean()}


def rows(index: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(index))


def checked(
    build: Callable[[], nn.Module],
    change: Callable[[nn.Module], Any] = lambda model: None,
    sizes: tuple[int, int, int] = (2, 1, 2),
) -> Verification:
    """What is found where ``change`` is made to the parallel model."""

    def apply(model: nn.Module, mesh: Any) -> nn.Module:
        parallelize(model, mesh, tp_plan=PLAN if sizes[2] > 1 else None)
        change(model)
        return model

    return verify(build, rows, MeshLayout(*sizes), steps=1, apply=apply)


def doubles(model: nn.Module) -> None:
    model.second.register_forward_hook(lambda module, args, output: output * 2)


def test_says_which_parameters_the_loss_does_not_reach() -> None:
    """A fault behind the second output can't be seen by the default loss: not in silence."""
    found = checked(Odd, doubles)
    assert found.difference is None
    assert found.without_gradient == ("second.weight", "second.bias", "idle.weight", "idle.bias")


def test_the_loss_in_a_dict_is_the_models_own() -> None:
    found = checked(OwnLoss, doubles).difference
    assert found is not None and (found.module, found.kind) == ("second", "output")
    assert checked(OwnLoss).without_gradient == ("idle.weight", "idle.bias")


@pytest.mark.parametrize(
    ("change", "place", "what"),
    [
        (
            lambda model: setattr(model, "drop", nn.Identity()),
            ("drop", "dropout"),
            "it drops nothing, in the plain model 0.3 of the elements",
        ),
        (
            lambda model: setattr(model, "extra", nn.Dropout(0.2)),
            ("extra", "dropout"),
            "it drops 0.2 of the elements, in the plain model nothing",
        ),
        (
            lambda model: model.eval(),
            ("", "structure"),
            "it is in evaluation mode in the parallel model only",
        ),
    ],
    ids=["a dropout left out", "a dropout too many", "in evaluation only in the parallel model"],
)
def test_what_a_module_does_in_one_model_only(
    change: Any, place: tuple[str, str], what: str
) -> None:
    found = checked(Odd, change).difference
    assert found is not None and (found.module, found.kind) == place, str(found)
    assert found.what == what


class Elsewhere(nn.Module):
    """The dropout of ``drop`` in two calls of a function."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([F.dropout(first, 0.3), F.dropout(second, 0.3)], -1)


def test_a_dropout_in_another_place_is_none_too_many() -> None:
    def move(model: nn.Module) -> None:
        model.drop, model.extra = nn.Identity(), Elsewhere()

    assert checked(Odd, move).difference is None


def test_a_counter_that_was_zero() -> None:
    found = checked(Odd, lambda model: model.calls.add_(1)).difference
    assert found is not None and found.kind == "buffer" and found.difference == 1


class Normed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4, **options), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def test_batch_norms_statistics_are_each_ranks_own() -> None:
    """As under torchrun: simulated ranks must not add to one buffer in turn."""
    found = checked(Normed, sizes=(1, 2, 1)).difference
    assert found is not None and (found.module, found.kind) == ("norm", "buffer"), str(found)
    assert "isn't synchronised" in found.hint
    assert checked(lambda: Normed(momentum=None), sizes=(1, 1, 1)).difference is None
    found = checked(lambda: Normed(momentum=None), sizes=(2, 1, 1)).difference
    assert found is not None and found.kind == "buffer"
