"""Uses that broke once: state while shown, own __setattr__, leaves in containers, backwards in forwards."""

import copy
import gc

import pytest
import torch
from _support.fsdp.wrapped import at_rest, build, cpu_mesh, equal_grads
from _support.models import Block, lm_loss, tokens
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d.fsdp import fully_shard, register_fsdp_forward_method
from parallel3d.optim import clip_grad_norm_
from parallel3d.testing import local_world


class TestStateWhileShown:
    def test_saving_reshards(self):
        with local_world(2):
            model, _ = build()
            for unit in (model, *model.layers):
                unit.unshard()
            state = nn.Sequential(model).state_dict()
            assert len(state) and all(isinstance(value, DTensor) for value in state.values())
            assert at_rest(model)

    def test_loading_from_around_reshards(self):
        with local_world(2):
            model, _ = build()
            state = {f"0.{k}": v.clone() for k, v in model.state_dict().items()}
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            for unit in (model, *model.layers):
                unit.unshard()
            nn.Sequential(model).load_state_dict(state)
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.full_tensor(), state[f"0.{name}"].full_tensor())
            assert at_rest(model)

    def test_a_list_that_ran_in_part(self):
        with local_world(2), torch.no_grad():
            a, _ = fully_shard([nn.Linear(4, 4), nn.Linear(4, 4)], mesh=cpu_mesh())
            a(torch.ones(1, 4))
            assert all(isinstance(value, DTensor) for value in a.state_dict().values())

    def test_copying_leaves_the_original_shown(self):
        with local_world(2):
            model = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh())
            model.unshard()
            twin = copy.deepcopy(model)
            assert not isinstance(model.weight, DTensor) and isinstance(twin.weight, DTensor)

    @pytest.mark.parametrize("to_none", [True, False])
    def test_gradients_are_clipped_and_cleared(self, to_none):
        """Those of the sharded parameters, which the module shows no more."""
        with local_world(2):
            model, _ = build()
            params = list(model.parameters())
            lm_loss(model, tokens(0)).backward()
            norm = clip_grad_norm_(model, 1e9)
            model.unshard()
            assert not isinstance(next(model.parameters()), DTensor)
            torch.testing.assert_close(clip_grad_norm_(nn.Sequential(model), 1e9), norm)
            model.zero_grad(to_none)
            left = [None if p.grad is None else p.grad.full_tensor() for p in params]
            assert all(grad is None if to_none else not grad.any() for grad in left)
            assert not isinstance(next(model.parameters()), DTensor)


class Mirror(nn.Linear):
    """Computes with what its ``__setattr__`` has noted, as ``nn.LSTM`` does."""

    def __setattr__(self, name, value):
        if name == "weight":
            vars(self)["noted"] = [value]
        super().__setattr__(name, value)

    def forward(self, x):
        return nn.functional.linear(x, self.noted[0], self.bias)


@pytest.mark.parametrize("make", [lambda: Mirror(4, 4), lambda: nn.LSTM(4, 4)], ids=["own", "lstm"])
def test_modules_with_a_setattr_of_their_own(make):
    torch.manual_seed(0)
    plain = make()
    x = torch.randn(3, 4)
    out = lambda model: (y[0] if isinstance(y := model(x), tuple) else y).square().sum()  # noqa: E731
    out(plain).backward()
    with local_world(2):
        model = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh())
        twin = copy.deepcopy(model)
        for each in (model, twin):
            out(each).backward()
            equal_grads(each, plain, rtol=1e-4, atol=1e-5)
            assert at_rest(each)
        if isinstance(model, Mirror):
            assert model.noted[0] is model.weight


class HandsOn(nn.Module):
    """Sets attributes on the module inside, as ``torch.compile(module)`` does."""

    def __init__(self, module):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.inner = module

    def __setattr__(self, name, value):
        if "inner" in vars(self).get("_modules", ()):
            setattr(self.inner, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, x):
        return self.inner(x * self.weight)


WRAPPERS = {
    "hands on": HandsOn,
    "twice": lambda module: HandsOn(HandsOn(module)),
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "compiled, handed on": lambda module: HandsOn(torch.compile(module, backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("where", ["blocks", "root"])
def test_modules_that_hand_attributes_on(wrap, where):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    plain = nn.Sequential(*map(wrap, layers)) if where == "blocks" else wrap(nn.Sequential(*layers))
    x = torch.randn(3, 4)
    with local_world(2) as world, torch.compiler.set_stance("force_eager"):
        model = copy.deepcopy(plain)
        for block in model if where == "blocks" else ():
            fully_shard(block, mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
        assert type(layers[0]) is nn.Linear
        model(x).square().sum().backward()
        with world.paused():
            plain(x).square().sum().backward()
        assert list(model.state_dict()) == list(plain.state_dict())
        equal_grads(model, plain, rtol=1e-4, atol=1e-5)
        assert at_rest(model)


class TakesDict(Block):
    def forward(self, inputs):
        return super().forward(inputs["x"] * inputs["scale"])


def test_hooks_on_leaves_in_containers_go_with_their_graph():
    gc.collect()
    with local_world(2):
        model = fully_shard(TakesDict(), mesh=cpu_mesh())
        scale = torch.ones(12, requires_grad=True)
        for step in range(4):
            loss = model({"x": torch.randn(2, 12), "scale": scale}).sum()
            if step % 2:
                loss.backward()
            del loss
        assert not scale._backward_hooks
        assert scale.grad is not None and at_rest(model)


class Trainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.linear(x).relu())

    def train_steps(self, x, optimizer):
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = self(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    def with_force(self, x):
        x = x.requires_grad_()
        energy = self.linear(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.last(force)


class TestBackwardsInForwards:
    def test_a_training_loop_as_a_forward_method(self):
        torch.manual_seed(0)
        plain = Trainer()
        x = torch.randn(3, 4)
        want = plain_losses = copy.deepcopy(plain)
        want = plain_losses.train_steps(x, torch.optim.SGD(plain_losses.parameters(), lr=0.1))
        with local_world(2):
            model = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh())
            register_fsdp_forward_method(model, "train_steps")
            got = model.train_steps(x, torch.optim.SGD(model.parameters(), lr=0.1))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b)
            model(x).sum().backward()
            assert at_rest(model)

    def test_a_derivative_inside_and_another_layer_after_it(self):
        torch.manual_seed(0)
        plain = Trainer()
        x = torch.randn(3, 4)
        plain.with_force(x.clone()).square().sum().backward()
        with local_world(2):
            model = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh())
            register_fsdp_forward_method(model, "with_force")
            model.with_force(x.clone()).square().sum().backward()
            for name, p in model.named_parameters():
                want = plain.get_parameter(name).grad
                if want is not None:
                    torch.testing.assert_close(p.grad.full_tensor(), want)
            assert at_rest(model)


class TestReplaced:
    def test_shape_is_checked(self):
        with local_world(2):
            model = fully_shard(nn.Linear(6, 4), mesh=cpu_mesh())
            with pytest.raises(ValueError, match=r"of shape \(4, 6\) was replaced.*\(2, 6\)"):
                model.weight = nn.Parameter(torch.zeros(2, 6))
            model._parameters["weight"] = nn.Parameter(torch.zeros(2, 6))  # which nothing sees
            with pytest.raises(ValueError, match=r"of shape \(4, 6\) was replaced.*\(2, 6\)"):
                model(torch.randn(1, 6))

    def test_frozen_stays_frozen(self):
        with local_world(2):
            model = fully_shard(nn.Linear(6, 4), mesh=cpu_mesh())
            model.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
            model(torch.randn(1, 6)).sum().backward()
            assert model.weight.grad is None and model.bias.grad is not None

    def test_removed_and_put_back(self):
        with local_world(2):
            model = fully_shard(nn.Linear(6, 4), mesh=cpu_mesh())
            bias, model.bias = model.bias, None
            model(torch.randn(1, 6)).sum().backward()
            model.bias = bias
            model(torch.randn(1, 6)).sum().backward()
            assert model.bias.grad is not None and at_rest(model)


def test_an_output_error_leaves_the_unit_usable():
    class Returns(nn.Linear):
        leak = True

        def forward(self, x):
            y = super().forward(x)
            return (y, self.weight) if self.leak else y

    with local_world(2):
        model = fully_shard(Returns(4, 4), mesh=cpu_mesh(), reshard_after_forward=True)
        with pytest.raises(ValueError, match="returns a parameter"):
            model(torch.randn(1, 4))
        model.leak = False
        model(torch.randn(1, 4)).sum().backward()
        assert at_rest(model)
