"""What conversions, loaded values and deep copies do to a unit, and buffers that nobody has filled."""

import copy
import weakref

import pytest
import torch
from _support.fsdp.lifetimes import collector_off
from _support.fsdp.wrapped import at_rest, build, cpu_mesh
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import nn

import parallel3d as p3d
from parallel3d import Parallel3dError, StateError, parallelize
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit, unit_of
from parallel3d.testing import fake_world, local_world, shards_of


class TestConversions:
    def test_to_empty_double_and_back(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            objects = [id(p) for p in model.parameters()]
            model.double()
            assert [id(p) for p in model.parameters()] == objects
            lm_loss(model, tokens(0)).backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.float64}
            assert at_rest(model)
            for unit in {unit_of(m) for m in model.modules()} - {None}:
                for bucket in unit.group.buckets:
                    assert not bucket.adopt()  # locals are views of the buffer again

    def test_a_unit_of_several_modules(self) -> None:
        """They are converted one after the other: norm and head of ``parallelize`` share a buffer."""
        with fake_world(0, 2):
            model = parallelize(Lm(), cpu_mesh())
            before = [p.to_local().clone() for p in model.parameters()]
            model.double()
            assert unit_of(model.norm) is unit_of(model.head)
            for old, p in zip(before, model.parameters(), strict=True):
                assert torch.equal(old.double(), p.to_local())
            lm_loss(model, tokens(0)).backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.float64}
            model.head.float()  # half of it only
            with pytest.raises(Parallel3dError, match="convert the whole unit"):
                model(tokens(0))

    @pytest.mark.parametrize("assign", [False, True])
    def test_load_state_dict(self, assign) -> None:
        with local_world(2) as world:
            model, _ = build()
            state = {k: v.clone() + 1 for k, v in model.state_dict().items()}
            objects = [id(p) for p in model.parameters()]
            model.load_state_dict(state, assign=assign)
            assert [id(p) for p in model.parameters()] == objects
            for name, p in model.named_parameters():
                for a, b in zip(world.per_rank(p), world.per_rank(state[name]), strict=True):
                    assert torch.equal(a, b), name
            model.layers[0].unshard()  # the buffer has them too
            whole = state["layers.0.up.weight"].full_tensor()
            pairs = zip(
                world.per_rank(whole), world.per_rank(model.layers[0].up.weight.data), strict=True
            )
            assert all(torch.equal(a, b) for a, b in pairs)
            model.layers[0].reshard()
            assert at_rest(model)

    def test_assign_whole_tensors(self) -> None:
        """A plain state dict, assigned: each rank keeps its shard of it."""
        torch.manual_seed(1)
        state = Lm(layers=2).state_dict()
        with local_world(2) as world:
            model, _ = build()
            model.load_state_dict(state, assign=True)
            model.layers[1].unshard()
            for got in world.per_rank(model.layers[1].up.weight.data):
                assert torch.equal(got, state["layers.1.up.weight"])
            model.layers[1].reshard()


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_parameter_that_replaces_another_brings_its_gradient(with_gradient: bool) -> None:
    with local_world(2):
        model, _ = build()
        lm_loss(model, tokens(0)).backward()
        layer = model.layers[0]
        name, old = next(iter(layer.named_parameters()))
        new = nn.Parameter(torch.zeros(old.shape))
        if with_gradient:
            values = torch.arange(1.0, 1.0 + new.numel()).view(new.shape)
            new.grad = values.clone()
        holder, _, last = name.rpartition(".")
        setattr(layer.get_submodule(holder), last, new)
        with torch.no_grad():
            model(tokens(0))
        grad = old.grad
        assert dict(layer.named_parameters())[name] is old
        if with_gradient:
            for _, box, part in shards_of(grad):
                assert torch.equal(part, values[box])
        else:
            assert grad is None


# -- copy.deepcopy -------------------------------------------------------------------------------------


parity = pytest.mark.parity


def step(model, ids=None):
    model.zero_grad()
    loss = lm_loss(model, tokens(0) if ids is None else ids)
    loss.backward()
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


@parity("fault n: copy.deepcopy")
@pytest.mark.parametrize("mesh_shape", [(1, 2, 1), (2, 2, 1), (1, 3, 1)])
def test_copy_trains_on_its_own(mesh_shape):
    """torch's fully_shard refuses deepcopy with an AssertionError."""
    size = mesh_shape[0] * mesh_shape[1]
    with local_world(size):
        model, _ = build(mesh_shape)
        grads = step(model)  # the original has run and has a context
        twin = copy.deepcopy(model)
        assert at_rest(twin) and type(twin) is type(model)
        units = {id(unit_of(m)) for m in model.modules()} & {id(unit_of(m)) for m in twin.modules()}
        assert units <= {id(None)}
        assert all(a is not b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        for name, grad in step(twin).items():
            torch.testing.assert_close(grad, grads[name], rtol=0, atol=0)
        before = [p.full_tensor().clone() for p in model.parameters()]
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        for old, p, q in zip(before, model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(old, p.full_tensor(), rtol=0, atol=0)
            assert not torch.equal(q.full_tensor(), old)
        step(twin)
        assert at_rest(twin) and at_rest(model)


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_unit_of_two_modules_and_ties_are_copied_together():
    with local_world(2):
        model = TiedHead()
        fully_shard([model.embed, model.head], mesh=cpu_mesh())
        twin = copy.deepcopy(model)
        assert twin.embed.weight is twin.head.weight is not model.embed.weight
        assert unit_of(twin.embed) is unit_of(twin.head) is not unit_of(model.embed)
        ids = torch.tensor([1, 2])
        twin(ids).sum().backward()
        model(ids).sum().backward()
        assert torch.equal(
            twin.embed.weight.grad.full_tensor(), model.embed.weight.grad.full_tensor()
        )


def test_users_hooks_are_copied_and_ours_are_not_doubled():
    with local_world(2):
        model, _ = build()
        calls = []
        model.register_forward_hook(lambda *_: calls.append(1))
        twin = copy.deepcopy(model)
        assert len(twin._forward_hooks) == len(model._forward_hooks) == 2
        with torch.no_grad():
            lm_loss(twin, tokens(0))
        assert calls == [1]


def test_settings_are_copied():
    with local_world(2):
        model, _ = build()
        model.set_requires_gradient_sync(False)
        model.layers[0].set_unshard_in_backward(False)
        twin = copy.deepcopy(model)
        assert not get_unit(twin).sync
        assert not get_unit(twin.layers[0]).unshard_in_backward


def test_parallelized_model_with_tp():
    with local_world(4) as world:
        torch.manual_seed(0)
        model = parallelize(Lm(layers=1), cpu_mesh(1, 2, 2), LM_PLAN, activation_checkpointing=True)
        ids = world.map(lambda rank: tokens(rank // 2))  # ranks of one tp group read the same
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # the copy must not compute with the original's weights
        grads = step(twin, ids)
        assert any(grad.abs().max() > 0 for grad in grads.values())


def test_copy_is_freed_at_once():
    with local_world(2):
        model, _ = build()
        with collector_off():
            twin = copy.deepcopy(model)
            step(twin)
            refs = [weakref.ref(p) for p in twin.parameters()]
            refs += [weakref.ref(m) for m in twin.modules()]
            del twin
            assert not [ref for ref in refs if ref() is not None]


def test_inside_a_forward_is_refused():
    with local_world(2):
        model, _ = build()
        model.layers[0].register_forward_hook(lambda *_: copy.deepcopy(model) and None)
        with pytest.raises(ValueError, match="between steps"):
            lm_loss(model, tokens(0))


@pytest.mark.parametrize("copied", ["", "embed", "head"])
def test_of_a_unit_inside_another_that_a_tie_has_joined(copied):
    """The embedding is a unit, and its weight is the head's, which is of the root's: they are one unit."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.block = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(self.embed(ids)))

    with local_world(2):
        mesh = cpu_mesh()
        model = Tied()
        for unit in (model.embed, model.block, model):
            fully_shard(unit, mesh=mesh)
        ids = torch.arange(5)
        model(ids).sum().backward()
        twin = copy.deepcopy(model)
        assert twin.head.weight is twin.embed.weight
        assert twin.head.weight is not model.head.weight
        for p, q in zip(inner_tensors(twin(ids)), inner_tensors(model(ids)), strict=True):
            assert torch.equal(p, q)
        model.zero_grad()
        twin.zero_grad()
        for each in (twin, model):
            each(ids).square().sum().backward()
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            for a, b in zip(
                inner_tensors(p.grad.to_local()), inner_tensors(q.grad.to_local()), strict=True
            ):
                assert torch.equal(a, b)
        part = copy.deepcopy(model.get_submodule(copied))
        assert [n for n, _ in part.named_parameters()] == [
            n for n, _ in model.get_submodule(copied).named_parameters()
        ]


# -- buffers without values ----------------------------------------------------------------------------


X = torch.linspace(-1, 1, 8).view(2, 4)


class Tables(nn.Module):
    """Buffers of three dtypes that no state dict has, and one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.register_buffer("order", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
        self.register_buffer("mean", torch.ones(4))

    def reset_parameters(self) -> None:
        for name, value in (("scale", 1), ("order", 0), ("mask", True), ("mean", 1)):
            getattr(self, name).fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x[:, self.order]) * self.scale - self.mean
        return torch.where(self.mask, x, 0.0)


def on_meta(root_alone: bool = False) -> nn.Module:
    """A sharded model on meta."""
    with torch.device("meta"):
        model = nn.Sequential(Tables(), nn.Linear(4, 2))
    mesh = cpu_mesh()
    for unit in (model,) if root_alone else (model[0], model):
        fully_shard(unit, mesh=mesh)
    return model


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(t, device="cpu") for n, t in model.state_dict().items()}


@pytest.mark.parametrize("root_alone", [False, True])
@pytest.mark.parametrize("runs", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_to_empty_and_a_state_dict(root_alone: bool, runs) -> None:
    with fake_world(0, 2):
        model = on_meta(root_alone)
        model.to_empty(device="cpu")
        model.load_state_dict(state_of(model))
        for _ in range(2):
            with (
                runs(),
                pytest.raises(StateError, match=r"buffers 0\.scale, 0\.order, 0\.mask have memory"),
            ):
                model(X)
        model[0].scale.data.copy_(torch.ones(4))  # which no version counter shows
        with pytest.raises(StateError, match=r"buffers 0\.order, 0\.mask have memory"):
            model(X)
        model[0].reset_parameters()
        assert torch.isfinite(model(X)).all()
        options = unit_of(model).context.options
        assert "BuffersAreFilled" not in {type(option).__name__ for option in options}


def test_a_module_alone_and_a_new_buffer() -> None:
    """The unit inside is converted before there is a root; its buffers are made anew, as torchtitan does."""
    with fake_world(0, 2):
        model = on_meta()
        model[0].to_empty(device="cpu")
        model[1].to_empty(device="cpu")
        nn.init.zeros_(model[0].linear.weight)
        with pytest.raises(
            StateError, match=r"buffers .*scale, .*order, .*mask, .*mean have memory"
        ):
            model(X)
        for name, buffer in Tables().named_buffers():
            setattr(model[0], name, buffer)
        model(X)


def test_persistent_ones_that_nothing_has_loaded() -> None:
    with fake_world(0, 2):
        model = on_meta()
        model.to_empty(device="cpu")
        for name in ("scale", "order", "mask"):
            getattr(model[0], name).fill_(1)
        with pytest.raises(StateError, match=r"buffers 0\.mean have memory from to_empty"):
            model(X)
        model.load_state_dict(state_of(model))
        model(X)


def test_still_on_meta() -> None:
    """``load_state_dict(assign=True)`` gives parameters their values and leaves the other buffers on meta."""
    with fake_world(0, 2):
        model = on_meta()
        model.load_state_dict(state_of(model), assign=True)
        with pytest.raises(StateError, match=r"buffers scale, order, mask are still on the meta"):
            model(X)
        for name, buffer in Tables().named_buffers():
            setattr(model[0], name, buffer)
        model(X)


def test_what_has_values_is_left_alone() -> None:
    with fake_world(0, 2):
        model = on_meta()
        p3d.materialize(model)
        model.double().float()
        model(X)
        assert all(not hasattr(b, "_parallel3d_no_values") for b in model.buffers())
