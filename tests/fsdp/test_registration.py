"""Parameters assigned and modules put in after sharding: trained as in the plain model, or an error."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout, Parallel3dError, StateError, build_mesh
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import full_params, fully_shard
from parallel3d.testing import local_world

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
LAYOUTS = [MeshLayout(1, 2, 1), MeshLayout(2, 1, 1)]


class Net(nn.Module):
    """``mid`` is no unit, ``lstm`` has a ``__setattr__`` of its own, ``twin`` is tied to ``first``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.mid = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh())
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.twin = nn.Linear(6, 6)
        self.twin.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lstm(self.mid(self.first(x))[:, None])[0][:, 0]
        return self.head(self.twin(x))


@pytest.fixture(params=LAYOUTS, ids=str)
def pair(request):
    """(sharded, plain) in a world of simulated ranks."""
    torch.manual_seed(0)
    plain = Net()
    with local_world(request.param.replicate * request.param.shard):
        yield shard(copy.deepcopy(plain), build_mesh(request.param, device_type="cpu")), plain


def shard(model: Net, mesh: DeviceMesh) -> Net:
    for unit in (model.first, model.lstm, model.head, model):
        fully_shard(unit, mesh=mesh)
    return model


def mesh_of(model: Net) -> DeviceMesh:
    return model.head.weight.device_mesh


def train(model: nn.Module, steps: int = 2) -> nn.Module:
    """The optimizer is made now; under simulated ranks a plain parameter gets a gradient for each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        for p in model.parameters():
            if p.grad is not None and not isinstance(p, DTensor):
                p.grad = next(iter(inner_tensors(p.grad)))
        optimizer.step()
    return model


def check_equal(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), (other, q) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == other
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        for of_rank in inner_tensors(whole):
            torch.testing.assert_close(of_rank, q, msg=name)


def value(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, steps=torch.Size(shape).numel()).view(shape))


class TestAssigned:
    @pytest.mark.parametrize("before", [0, 1])
    def test_trains(self, pair, before: int) -> None:
        model, plain = pair
        objects = [id(p) for p in model.parameters()]
        for each in pair:
            if before:
                train(each)
            each.head.weight = value(3, 6)
            each.mid[0].register_parameter("weight", value(6, 6))
            each.lstm.weight_hh_l0 = value(24, 6)
            each.first.weight = each.twin.weight = value(6, 6)
            train(each)
        assert [id(p) for p in model.parameters()] == objects
        check_equal(model, plain)

    def test_after_it_was_deleted(self, pair) -> None:
        for each in pair:
            del each.head.weight
            each.head.weight = value(3, 6)
            train(each)
        check_equal(*pair)

    def test_frozen(self, pair) -> None:
        for each in pair:
            each.head.weight = value(3, 6).requires_grad_(False)
            train(each)
        check_equal(*pair)

    def test_quietly_and_not_reached_by_the_next_forward(self, pair) -> None:
        """Written into the module's dict, which no hook sees, before a forward that leaves the unit out."""
        for each in pair:
            train(each)
            each.head._parameters["weight"] = value(3, 6)
            head, each.forward = each.head, lambda x, each=each: each.twin(each.first(x))
            each(X)
            del each.forward
            assert each.head.weight is head.weight
        assert isinstance(dict(pair[0].named_parameters())["head.weight"], DTensor)
        check_equal(*pair)
        check_equal(*map(train, pair))

    def test_of_another_shape(self, pair) -> None:
        model, plain = pair
        with pytest.raises(Parallel3dError, match=r"weight of shape \(3, 6\).* shape \(5, 6\)"):
            model.head.weight = value(5, 6)
        check_equal(train(model), train(plain))  # nothing has happened

    def test_that_of_another_module(self, pair) -> None:
        model, plain = pair
        with pytest.raises(Parallel3dError, match="would tie the two; tie parameters before"):
            model.mid[0].weight = model.first.weight
        check_equal(train(model), train(plain))

    def test_while_unsharded(self, pair) -> None:
        model, plain = pair
        model.head.unshard()
        with pytest.raises(StateError, match=r"weight of unit .* while the unit's unsharded"):
            model.head.weight = value(3, 6)
        model.head.reshard()
        check_equal(train(model), train(plain))

    def test_in_full_params(self, pair) -> None:
        model, plain = pair
        with full_params(model):
            model.head.weight = value(3, 6)
        plain.head.weight = value(3, 6)
        check_equal(train(model), train(plain))


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)
        with torch.no_grad():
            for p in (self.down.weight, self.up.weight):
                p.copy_(value(*p.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt_by_setattr(model: Net) -> str:
    model.mid[0] = Adapter(model.mid[0])
    return "mid.0.down.weight"


def adapt_by_add_module(model: Net) -> str:
    model.mid.add_module("0", Adapter(model.mid[0]))
    return "mid.0.down.weight"


def adapt_in_the_dict(model: Net) -> str:
    model.mid._modules["0"] = Adapter(model.mid[0])
    return "mid.0.down.weight"


def adapt_a_unit(model: Net) -> str:
    model.first.lora = nn.Linear(6, 6)
    model.first.register_forward_hook(lambda module, args, out: out + module.lora(args[0]))
    return "first.lora.weight"


def give_a_bias(model: Net) -> str:
    model.mid[0].bias = value(6)
    return "mid.0.bias"


def give_a_bias_in_the_dict(model: Net) -> str:
    model.mid[0]._parameters["bias"] = value(6)
    return "mid.0.bias"


def new_head(model: Net) -> str:
    model.head = nn.Linear(6, 5)
    return "head.weight"


def thaw(model: Net) -> str:
    model.mid[0].scale = nn.Parameter(torch.ones(6), requires_grad=False)
    model(X)
    model.mid[0].scale.requires_grad_()
    return "mid.0.scale"


def parametrize(model: Net) -> str:
    nn.utils.parametrizations.orthogonal(model.mid[0])
    return "mid.0.parametrizations.weight.original"


NEW = [
    adapt_by_setattr,
    adapt_by_add_module,
    adapt_in_the_dict,
    adapt_a_unit,
    give_a_bias,
    give_a_bias_in_the_dict,
    new_head,
    thaw,
    parametrize,
]


@pytest.mark.parametrize("change", NEW)
@pytest.mark.parametrize("before", [0, 1])
def test_a_new_trainable_parameter_is_an_error(pair, change, before: int) -> None:
    model, _ = pair
    if before:
        train(model)
    try:
        name = change(model)
    except (Parallel3dError, RuntimeError):  # orthogonal computes with the shard
        assert change is parametrize
        return
    for _ in range(2):
        with pytest.raises(
            Parallel3dError, match=f"parameter {name} of a .* in unit .*fully_shard"
        ):
            model(X)


class TestRemedies:
    """Each that the error names."""

    @pytest.mark.parametrize("before", [0, 1])
    def test_a_unit_of_its_own(self, pair, before: int) -> None:
        model, plain = pair
        for each in pair:
            if before:
                train(each)
            adapt_by_setattr(each)
        fully_shard([model.mid[0].down, model.mid[0].up], mesh=mesh_of(model))
        check_equal(train(model), train(plain))
        assert all(isinstance(p, DTensor) for p in model.parameters())

    def test_a_unit_around_old_and_new(self, pair) -> None:
        model, plain = pair
        for each in pair:
            adapt_by_setattr(each)
        fully_shard(model.mid[0], mesh=mesh_of(model))
        check_equal(train(model), train(plain))

    def test_before_fully_shard(self, pair) -> None:
        sharded, plain = pair
        model = copy.deepcopy(plain)
        for each in (model, plain):
            adapt_by_setattr(each)
        check_equal(train(shard(model, mesh_of(sharded))), train(plain))

    def test_ignored(self, pair) -> None:
        model, plain = pair
        for each in pair:
            adapt_by_setattr(each)
        new = [p for p in model.mid[0].parameters() if not isinstance(p, DTensor)]
        fully_shard(model.mid[0], mesh=mesh_of(model), ignored_params=new)
        train(model)
        train(plain)
        check_equal(model.head, plain.head)
        twin = copy.deepcopy(model)
        twin(X)

    def test_frozen(self, pair) -> None:
        for each in pair:
            train(each)
            adapt_by_setattr(each)
            each.mid[0].down.requires_grad_(False)
            each.mid[0].up.requires_grad_(False)
            train(each)
        check_equal(*pair)
