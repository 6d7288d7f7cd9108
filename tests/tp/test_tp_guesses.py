"""Inputs and dtypes with which "auto" runs a model of which nothing is known."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from _support.tp.derive_models import Mlp, Vit
from torch import Tensor, nn
from torch.nn import functional

from parallel3d.errors import PlanError
from parallel3d.tp import Colwise, Rowwise, auto_plan, resolve_plan

MLP = {"mlp.up": Colwise(), "mlp.down": Rowwise()}


def split_mlp(model: nn.Module) -> None:
    plan = auto_plan(model, 2)
    assert {name: style for name, style in plan.items() if name.startswith("mlp.")} == MLP


class Rotated(nn.Module):
    """Insists on the dtype of what it computes, as programs do that keep some weights in another."""

    def __init__(self, table: torch.dtype, rest: torch.dtype) -> None:
        super().__init__()
        self.tokens = nn.Embedding(67, 16, dtype=table)
        self.register_buffer("angles", torch.rand(16).to(rest))
        self.mlp = Mlp("activation").to(rest)
        self.rest = rest

    def forward(self, ids: Tensor) -> Tensor:
        assert self.angles.dtype == self.mlp.up.weight.dtype == self.rest, "another dtype"
        x = self.tokens(ids)
        assert x.dtype == self.tokens.weight.dtype, "other vectors"
        y = self.mlp((x * 2).to(self.rest) * self.angles)
        assert y.dtype == self.rest, "another result"
        return y


DTYPES = [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("dtypes", [*DTYPES, (torch.float32, torch.float16)])
def test_a_model_is_run_in_its_own_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    split_mlp(Rotated(*dtypes))


class OfOneDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp("activation").bfloat16()


class Insists(OfOneDtype):
    """On features of the model's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16, "another dtype"
        return self.mlp(x)


class InFloat32Only(OfOneDtype):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(torch.addmm(torch.ones(16), x, torch.eye(16)))


class OwnLookup(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return functional.embedding(input, self.weight) * 2


class Table(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width))

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


class Indexed(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Lm(nn.Module):
    def __init__(self, table: type[nn.Module]) -> None:
        super().__init__()
        self.tokens = table(11, 16)
        self.mlp = Mlp("activation")

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.tokens(ids))


class OfTheModel(Table):
    def __init__(self) -> None:
        super().__init__(11, 16)
        self.mlp = Mlp("activation")

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(super().forward(ids))


class Standardized(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(input, weight, self.bias, self.stride, self.padding)


class Pooled(nn.Module):
    """A convolution over one, two or three dims, then features."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.mlp = conv, Mlp("activation")

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == self.conv.weight.dim()
        return self.mlp(self.conv(x).flatten(2).mean(2))


@pytest.mark.parametrize(
    "make",
    [
        Insists,
        InFloat32Only,
        *(partial(Lm, table) for table in (OwnLookup, Table, Indexed)),
        OfTheModel,
        lambda: Pooled(nn.Conv2d(1, 16, 3, padding=1)),
        lambda: Pooled(Standardized(3, 16, 4, stride=4)),
        lambda: Pooled(nn.Conv1d(80, 16, 3, stride=2)),
        lambda: Pooled(nn.Conv3d(3, 16, (2, 4, 4), stride=(2, 4, 4))),
    ],
)
def test_inputs_are_guessed(make: Callable[[], nn.Module]) -> None:
    split_mlp(make())


def test_the_side_of_an_image_fits_the_positions() -> None:
    assert auto_plan(Vit(size=32, patch=8), 2)


class Holder:
    """An object of the user's."""


def held(value: object) -> Holder:
    holder = Holder()
    holder.value = value  # type: ignore[attr-defined]
    return holder


def with_graph(mlp: Mlp) -> Tensor:
    return mlp.up.weight * 2


UNCOPIED = {
    "in an object": (
        lambda mlp: held(with_graph(mlp)),
        "can't be copied: it has a tensor that was",
    ),
    "in an object's list": (lambda mlp: [held([with_graph(mlp)])], "delete it before parallelize"),
    "no tensor": (lambda mlp: (each for each in mlp.children()), "TypeError: cannot pickle"),
}


@pytest.mark.parametrize("case", UNCOPIED)
def test_what_cannot_be_copied_is_named_and_no_example_asked_for(case: str) -> None:
    make, said = UNCOPIED[case]
    model = nn.Sequential(Mlp("activation"))
    model[0].extra = make(model[0])
    with pytest.raises(PlanError, match=rf"0\.extra of Sequential.*{said}") as raised:
        auto_plan(model, 2)
    assert "example" not in str(raised.value)
    with pytest.raises(PlanError, match=rf"0\.extra of Sequential.*{said}"):
        resolve_plan(model, {"0.up": "colwise", "0.down": "rowwise"}, 2)


def test_a_table_without_rows_is_no_table_of_ids() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    model.register_parameter("none", nn.Parameter(torch.empty(0, 3)))
    assert "0" in auto_plan(model, 2)
