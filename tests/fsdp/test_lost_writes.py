"""Writes to unsharded parameters, which would be lost when these are freed, are errors.

``param.data = tensor`` of a sharded Parameter takes effect.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import parallel3d as p3d
from parallel3d import Parallel3dError, StateError
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import full_params, fully_shard
from parallel3d.testing import fake_world, local_world

X = torch.linspace(-1, 1, 24).view(4, 6)


class Writer(nn.Module):
    """Calls ``write(self)`` in each forward, before the weight is used, unless ``write`` is None."""

    def __init__(self, write: Callable | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))
        self.codes = nn.Parameter(torch.ones(6), requires_grad=False)
        self.inner = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.write is not None:
            self.write(self)
        return self.inner(F.linear(x, self.weight)) + self.codes


def no_grad(write: Callable) -> Callable:
    return torch.no_grad()(write)


def zero_data(module: nn.Module, *_) -> None:
    module.weight.data.zero_()


def multiply_data(module: nn.Module) -> None:
    module.weight.data *= 0.5


def assign_data(module: nn.Module) -> None:
    module.weight.data = module.weight.data.clamp(max=0.2)


def restore_data(module: nn.Module) -> None:
    kept = module.weight.data.clone()
    module.weight.data.zero_()
    module.weight.data.copy_(kept)


WRITES: dict[str, tuple[Callable, str]] = {
    "in place": (no_grad(lambda m: m.weight.clamp_(-0.2, 0.2)), "weight"),
    "copy_": (no_grad(lambda m: m.weight.copy_(F.normalize(m.weight))), "weight"),
    "data in place": (lambda m: m.weight.data.clamp_(-0.2, 0.2), "weight"),
    "a view of data": (lambda m: m.weight.data[0].zero_(), "weight"),
    "data *=": (multiply_data, "weight"),
    "data =": (assign_data, "weight"),
    "data and back": (restore_data, "weight"),
    "detached": (lambda m: m.weight.detach().clamp_(-0.2, 0.2), "weight"),
    "init": (lambda m: nn.init.zeros_(m.inner.bias), "inner.bias"),
    "without gradient": (no_grad(lambda m: m.codes.lerp_(torch.zeros(6), 0.1)), "codes"),
    "foreach": (
        no_grad(lambda m: torch._foreach_mul_([m.weight, m.codes], 0.5)),
        "weight, codes|codes, weight",
    ),
    "max_norm": (lambda m: F.embedding(torch.arange(6), m.weight, max_norm=0.1), "weight"),
}


def sharded(write: Callable | None, mesh=None, **options) -> nn.Module:
    model = nn.Sequential(Writer(write), nn.Linear(6, 3))
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh or cpu_mesh(), **options)
    return model


def lost(names: str):
    return pytest.raises(StateError, match=f"unit 0: ({names}) was changed .* would be lost")


def check_usable(model: nn.Module) -> None:
    """The error has left nothing behind."""
    model[0].write = None
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_in_forward_is_an_error(name: str) -> None:
    write, names = WRITES[name]
    with fake_world(0, 2):
        model = sharded(write)
        for grad in (True, False):
            with torch.set_grad_enabled(grad), lost(names):
                model(X)
        check_usable(model)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {}], ids=["kept", "freed"])
@pytest.mark.parametrize("layout", [(2, 1), (2, 2), (4, 1)], ids=str)
def test_on_meshes(options: dict, layout: tuple[int, int]) -> None:
    shard, replicate = layout
    with fake_world(0, shard * replicate):
        model = sharded(WRITES["data in place"][0], cpu_mesh(replicate, shard), **options)
        with lost("weight"):
            model(X)
        check_usable(model)


def test_of_a_hook_in_the_unit_and_of_a_module_inside() -> None:
    with fake_world(0, 2):
        model = sharded(None)
        model[0].inner.register_forward_pre_hook(zero_data)
        with lost("inner.weight"):
            model(X)


def test_in_inference_mode_and_recomputed() -> None:
    with fake_world(0, 2):
        model = sharded(WRITES["in place"][0])
        with torch.inference_mode(), lost("weight"):
            model(X)
        with lost("weight"):
            checkpoint(model, X, use_reentrant=False)


def test_in_backward() -> None:
    with fake_world(0, 2):
        model = sharded(None)
        model[0].inner.register_full_backward_hook(zero_data)
        with lost("inner.weight"):
            model(X.requires_grad_()).sum().backward()
        X.requires_grad_(False)


def test_after_unshard() -> None:
    with fake_world(0, 2):
        model = sharded(None)
        model(X).sum().backward()
        model[0].unshard()
        model[0].weight.data.zero_()
        with lost("weight"):
            model[0].reshard()
        model[0].unshard()
        model[0].reshard()
        check_usable(model)


def test_of_a_dtensor_in_forward() -> None:
    """torch's parallel styles compute with DTensors, whose ``.data`` has another counter too."""
    with fake_world(0, 4):
        mesh = cpu_mesh(tp=2)
        model = nn.Sequential(nn.Linear(6, 6))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh)
        model(X)
        model[0].register_forward_pre_hook(zero_data)
        with pytest.raises(StateError, match=r"0\.weight was changed"):
            model(X)


@pytest.mark.parametrize("name", ["in place", "data in place", "data ="])
def test_in_a_compiled_unit(name: str) -> None:
    torch._dynamo.reset()
    with fake_world(0, 2):
        model = nn.Sequential(Writer(WRITES[name][0]), nn.Linear(6, 3))
        model[0].compile(backend="aot_eager")
        for unit in (model[0], model):
            fully_shard(unit, mesh=cpu_mesh())
        with lost("weight"):
            model(X)


def test_what_is_no_write() -> None:
    """Reading ``.data``, changing a clone of it, writing to a buffer."""

    def read(module: nn.Module) -> None:
        module.seen.copy_(module.weight.data.norm(dim=1))
        F.normalize(module.weight.data.clone(), out=None).zero_()

    with fake_world(0, 2):
        model = sharded(read)
        model(X).sum().backward()
        whole = copy.deepcopy(model[0])
        model[0].unshard()
        parameter = copy.deepcopy(model[0].weight)
        model[0].reshard()
        parameter.data = torch.zeros(2)  # the copy is nobody's
        assert type(parameter) is nn.Parameter and len(list(whole.parameters())) == 4


class TestReplicas:
    """What a forward writes in place stays, as the parameters are not freed; other memory would not."""

    @pytest.mark.parametrize("name", [n for n in WRITES if n not in ("data =", "init")])
    def test_in_place(self, name: str) -> None:
        with fake_world(0, 2):
            model = sharded(WRITES[name][0], cpu_mesh(2, 1))
            plain = nn.Sequential(Writer(WRITES[name][0]))
            for _ in range(2):
                model(X)
                plain(X)
            for attribute in ("weight", "codes"):
                param, other = getattr(model[0], attribute), getattr(plain[0], attribute)
                torch.testing.assert_close(param.full_tensor(), other)

    def test_other_memory(self) -> None:
        with fake_world(0, 2):
            model = sharded(assign_data, cpu_mesh(2, 1))
            with lost("weight"):
                model(X)
            check_usable(model)


# -- at rest ------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)))


WHOLE = torch.linspace(0, 1, 30).view(5, 6)
LAYOUTS = [(2, 1), (1, 2), (2, 2), (3, 1)]


@pytest.fixture(params=LAYOUTS, ids=str)
def pair(request):
    """(sharded, plain) in a world of simulated ranks."""
    shard, replicate = request.param
    torch.manual_seed(0)
    plain = Net()
    with local_world(shard * replicate):
        model = copy.deepcopy(plain)
        for unit in (model.first, model):
            fully_shard(unit, mesh=cpu_mesh(replicate, shard))
        yield model, plain


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    model(X).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def check_equal(model: nn.Module, plain: nn.Module) -> None:
    with torch.no_grad():
        out = plain(X)
        for of_rank in inner_tensors(model(X)):
            torch.testing.assert_close(of_rank, out)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        for of_rank in inner_tensors(param.full_tensor()):
            torch.testing.assert_close(of_rank, other)


def scaled(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.detach().clone() * 2


def increased(model: nn.Module) -> None:
    for param in model.parameters():
        param.data += 1


def swapped_and_back(model: nn.Module) -> None:
    """As evaluations with averaged weights do."""
    average = [param.detach() * 0.5 for param in model.parameters()]
    kept = []
    for param, other in zip(model.parameters(), average, strict=True):
        kept.append(param.data)
        param.data = other
    model(X)
    for param, other in zip(model.parameters(), kept, strict=True):
        param.data = other


def looked_ahead(model: nn.Module) -> None:
    slow = [param.data.clone() for param in model.parameters()]
    step(model)
    for param, other in zip(model.parameters(), slow, strict=True):
        other.add_(param.data - other, alpha=0.5)
        param.data = other


@pytest.mark.parametrize("change", [scaled, increased, swapped_and_back, looked_ahead])
def test_data_assigned_at_rest(pair, change: Callable) -> None:
    model, plain = pair
    objects = [id(param) for param in model.parameters()]
    for before in (False, True):
        for each in pair:
            if before:
                step(each)
            change(each)
        check_equal(model, plain)
    for each in pair:
        step(each)
    check_equal(model, plain)
    assert [id(param) for param in model.parameters()] == objects


def test_a_whole_tensor_and_a_part(pair) -> None:
    model, plain = pair
    for each in pair:
        each.first.weight.data = WHOLE
    check_equal(model, plain)
    with full_params(model):
        for of_rank in inner_tensors(model.first.weight.detach()):
            torch.testing.assert_close(of_rank, plain.first.weight.detach())


def test_what_an_evaluation_has_kept_is_gathered_again() -> None:
    torch.manual_seed(0)
    plain = Net()
    with local_world(2):
        model = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh(), reshard_after_forward=False)
        model.set_keep_between_forwards(True)
        check_equal(model, plain)
        for each in (model, plain):
            scaled(each)
        check_equal(model, plain)


@pytest.mark.parametrize("local", [False, True])
def test_steps_after_it(local: bool) -> None:
    """An optimizer steps on what was assigned, before a forward has come to it."""
    with fake_world(0, 2):
        model = sharded(None)
        trained = [p for p in model.parameters() if p.requires_grad]
        make = partial(p3d.optim.local, torch.optim.AdamW) if local else torch.optim.AdamW
        optimizer = make(trained, lr=0.1)
        for _ in range(2):
            model(X).sum().backward()
            for param in trained:
                param.data = param.detach() * 0.5
            given = [param.to_local().clone() for param in trained]
            optimizer.step()
            stepped = [param.to_local().clone() for param in trained]
            assert not any(map(torch.equal, stepped, given))
            model(X)
            assert all(map(torch.equal, (param.to_local() for param in trained), stepped))


@pytest.mark.parametrize(
    ("ranks", "said"), [(2, "its parameters"), (1, "parameters that its forward has computed with")]
)
def test_between_forward_and_backward(ranks: int, said: str) -> None:
    """On one rank the parameters that compute are those at rest."""
    with fake_world(0, ranks):
        model = sharded(None, cpu_mesh(1, ranks))
        loss = model(X).sum()
        model[0].weight.data = model[0].weight.detach() * 2
        with pytest.raises(StateError, match=f"unit 0: {said} were changed"):
            loss.backward()


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 6),
        torch.zeros(6, 6, dtype=torch.float64),
        torch.zeros(6, 6, device="meta"),
        3,
    ],
    ids=["shape", "dtype", "device", "no tensor"],
)
def test_other_kinds_of_data_are_errors(value) -> None:
    with fake_world(0, 2):
        model = sharded(None)
        before = model[0].weight.to_local().clone()
        with pytest.raises(
            Parallel3dError, match=r"parameter weight of .*\(6, 6\).*was given .data"
        ):
            model[0].weight.data = value
        assert torch.equal(model[0].weight.to_local(), before)
