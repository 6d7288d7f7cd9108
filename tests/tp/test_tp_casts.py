"""Linear layers of one's own that cast their weight to the input's dtype, and others that do more."""

import warnings

import pytest
import torch
from _support.tp.tp_world import check_parity
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.errors import PlanError
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.parallelize import parallelize
from parallel3d.testing import assert_parity
from parallel3d.testing.worlds import local_world
from parallel3d.tp import Colwise, Rowwise, auto_plan, resolve_plan
from parallel3d.tp.auto.derive import derive_plan
from parallel3d.tp.styles.casts import casts_weight


class Casts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype))


class CastsBias(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.type_as(input), bias)


class Inherits(CastsBias):
    pass


class Upcasts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


class ToWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Normed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight, dim=-1).to(x.dtype))


class Scaled(nn.Linear):
    """The same product today; the factor is a setting."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.factor


class Trains(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype))
        return y if torch.is_grad_enabled() and x.dim() == 3 else y + 1


class LeavesOutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


SPLIT = [(Casts, False), (CastsBias, True), (CastsBias, False), (Inherits, True)]
WHOLE = [
    (Upcasts, False),
    (ToWeight, True),
    (Normed, False),
    (Scaled, False),
    (LeavesOutBias, True),
]


@pytest.mark.parametrize(("kind", "bias"), SPLIT)
def test_what_only_casts_is_known(kind: type[nn.Linear], bias: bool) -> None:
    assert casts_weight(kind(4, 3, bias))
    assert casts_weight(kind(4, 3, bias, device="meta"))


@pytest.mark.parametrize(("kind", "bias"), [*WHOLE, (nn.Linear, True)])
def test_what_does_more_is_not(kind: type[nn.Linear], bias: bool) -> None:
    assert not casts_weight(kind(4, 3, bias))


def test_a_forward_of_the_instance_is_not() -> None:
    layer = Casts(4, 3, bias=False)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    assert not casts_weight(layer)


class Mlp(nn.Module):
    def __init__(self, kind: type[nn.Linear], bias: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.first = nn.Linear(16, 16)
        self.up, self.down = kind(16, 32, bias), kind(32, 16, bias)
        self.head = kind(16, 11, bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.tokens(ids))
        return self.head(x + self.down(self.up(x).relu()))


IDS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize(("kind", "bias"), SPLIT)
def test_auto_splits_them_and_they_compute_the_same(kind: type[nn.Linear], bias: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = auto_plan(Mlp(kind, bias), 2)
    assert plan["up"] == Colwise() and plan["down"] == Rowwise()
    assert plan["head"] == Colwise(output="replicate")
    check_parity(Mlp(kind, bias), plan, 2, IDS)


def test_weights_of_another_dtype_are_cast_on_each_rank() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(CastsBias(16, 32), nn.ReLU(), CastsBias(32, 16))
    x = torch.randn(2, 3, 16).bfloat16()
    want = plain(x)
    with local_world(2):
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        parallelize(plain, mesh, {"0": "colwise", "2": "rowwise"})
        got = plain(x)
        assert got.dtype == torch.bfloat16
        got.float().square().sum().backward()
        assert plain[0].weight.grad.dtype == torch.float32
    torch.testing.assert_close(next(iter(got._local_tensors.values())), want, rtol=0.05, atol=0.05)


def test_they_train_as_the_plain_model_sharded_and_split() -> None:
    def build() -> nn.Module:
        return Mlp(CastsBias, True)

    layout = MeshLayout(1, 2, 2)
    assert_parity(build, lambda i: (IDS + i) % 11, layout, steps=1, fp32=False, tp_plan="auto")


@pytest.mark.parametrize(("kind", "bias"), WHOLE)
def test_what_stays_whole_is_said(kind: type[nn.Linear], bias: bool) -> None:
    model = Mlp(kind, bias)
    with pytest.warns(
        UserWarning,
        match=r"(?s)of the 5 linear .* stay whole .* up, down, head: ",
    ):
        source = derive_plan(model, 2)
    assert "up" not in source.rules
    assert f"up, down, head: {kind.__qualname__} has a forward of its own" in "\n".join(
        source.notes
    )


def test_an_embedding_that_stays_whole_is_said() -> None:
    class Own(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return F.embedding(input, self.weight) * 2

    model = Mlp(nn.Linear, True)
    model.tokens = Own(11, 16)
    with pytest.warns(UserWarning, match=r"(?s)of the 5 .* stay whole .* tokens: .*Own has"):
        assert "tokens" not in auto_plan(model, 2)


def test_a_head_that_casts_is_refused_under_loss_parallel() -> None:
    with local_world(2):
        mesh = build_mesh(MeshLayout(1, 1, 2), device_type="cpu")
        with pytest.raises(PlanError, match="'head', the model's output head, casts its weight"):
            parallelize(Mlp(Casts, False), mesh, "auto", loss_parallel=True)


def test_a_rule_for_one_that_does_more_is_refused() -> None:
    with pytest.raises(PlanError, match="with their own forward, not Normed"):
        resolve_plan(Mlp(Normed, False), {"up": "colwise", "down": "rowwise"}, 2)
