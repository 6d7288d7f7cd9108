"""What the engine isn't told of: backwards by tensors it has not seen, weights that change unseen.

Each is the plain model's numbers, or an error that names the unit; never other numbers.
"""

import copy
from collections import UserDict, deque
from contextlib import nullcontext

import pytest
import torch
from _support.fsdp.random_models import OUTPUTS as RETURNED
from _support.fsdp.random_models import WRAPS, held_in
from _support.fsdp.wrapped import cpu_mesh, equal_grads
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallel3d.errors import StateError
from parallel3d.fsdp import fully_shard
from parallel3d.testing import local_world

LOST: list[torch.Tensor] = []  # no module and no output refers to it


ATTRIBUTES = WRAPS | {"deque": lambda t: deque([t])}
OUTPUTS = ATTRIBUTES | RETURNED | {"mapping": lambda t: UserDict(held=t), "set": lambda t: {t}}


class Block(nn.Module):
    """``probe`` is read early in backward, before the gradient of the output has come back here."""

    def __init__(self, wrap, where, elementwise):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.probe = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.wrap, self.where, self.elementwise = wrap, where, elementwise
        self.aux = None

    def forward(self, h):
        h = torch.tanh(self.up(h))
        aux = h * self.scale if self.elementwise else self.probe(h)
        aux = aux.square().mean()
        if self.where == "attribute":
            self.aux = self.wrap(aux)
        elif self.where == "lost":
            LOST.append(aux)
        else:
            return h, self.wrap(aux)
        return h, None


class Model(nn.Module):
    def __init__(self, wrap=None, where="attribute", elementwise=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(wrap, where, elementwise) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, h):
        self.found = []
        for block in self.blocks:
            h, aux = block(h)
            self.found.append(aux)
        return self.head(h).square().mean()

    def loss(self, x):
        loss = self(x)
        for block, found in zip(self.blocks, self.found, strict=True):
            if block.where == "attribute":
                found = block.aux
            loss = loss + 10 * held_in(LOST.pop(0) if block.where == "lost" else found)
        return loss


def shard(model, mesh=None, **options):
    mesh = mesh or cpu_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


class TestUnseenTensors:
    @pytest.mark.parametrize("elementwise", [False, True], ids=["matmul", "elementwise"])
    @pytest.mark.parametrize("wrap", ATTRIBUTES.values(), ids=ATTRIBUTES)
    def test_on_an_attribute(self, wrap, elementwise):
        self.check(wrap, "attribute", elementwise)

    @pytest.mark.parametrize("wrap", OUTPUTS.values(), ids=OUTPUTS)
    def test_in_an_output(self, wrap):
        self.check(wrap, "output", elementwise=True)

    def check(self, wrap, where, elementwise):
        torch.manual_seed(0)
        plain = Model(wrap, where, elementwise)
        model = copy.deepcopy(plain)
        inputs = torch.randn(3, 2, 8)
        with local_world(2) as world:
            shard(model)
            for x in inputs:
                model.loss(x).backward()
                with world.paused():
                    plain.loss(x).backward()
            equal_grads(model, plain)

    @pytest.mark.parametrize("elementwise", [False, True], ids=["matmul", "elementwise"])
    def test_nobody_can_see_is_an_error_that_names_the_unit(self, elementwise):
        LOST.clear()
        with local_world(2):
            model = shard(Model(None, "lost", elementwise))
            model(torch.ones(2, 8))
            with pytest.raises(StateError, match=r"unit .*blocks\.0.*: a backward reads .* freed"):
                LOST[0].backward()
            LOST.clear()
            for block in model.blocks:
                block.where = "attribute"
                block.wrap = ATTRIBUTES["tensor"]
            model.zero_grad()
            model.loss(torch.ones(2, 8)).backward()  # and goes on

    @pytest.mark.parametrize("layout", [(1, 2), (2, 1)], ids=["shard", "replicate"])
    def test_nobody_can_see_and_recomputed(self, layout):
        class Recomputed(Block):
            def forward(self, h):
                return checkpoint(super().forward, h, use_reentrant=False)

        LOST.clear()
        with local_world(2):
            model = Model(None, "lost")
            for block in model.blocks:
                block.__class__ = Recomputed
            shard(model, cpu_mesh(*layout))
            model(torch.ones(2, 8))
            with pytest.raises(StateError, match=r"unit blocks\.0: a backward reads .* freed"):
                LOST[0].backward()
            LOST.clear()
            for block in model.blocks:
                block.where, block.wrap = "output", ATTRIBUTES["tensor"]
            model.zero_grad()
            model.loss(torch.ones(2, 8)).backward()  # and goes on

    def test_a_second_backward_by_an_attribute(self):
        """After the first one has freed the unit."""
        torch.manual_seed(0)
        plain = Model(ATTRIBUTES["tensor"])
        model = copy.deepcopy(plain)
        with local_world(2) as world:
            shard(model, reshard_after_forward=False)
            x = torch.ones(2, 8)
            model(x).backward(retain_graph=True)
            model.blocks[0].aux.backward()
            with world.paused():
                plain(x).backward(retain_graph=True)
                plain.blocks[0].aux.backward()
            equal_grads(model, plain)

    def test_what_stays_on_an_attribute_is_watched_once(self):
        with local_world(2):
            model = shard(Model(ATTRIBUTES["list"]))
            kept = [[], [], []]
            for block, mine in zip(model.blocks, kept, strict=True):
                block.wrap = lambda t, mine=mine: mine.append(t) or mine
            for _ in range(3):
                model(torch.ones(2, 8))
            assert all(len(t._backward_hooks) == 1 for mine in kept for t in mine)


def masked(y):
    y[..., :2] = 0


def by_a_view(y):
    y.flatten().add_(1.0)


CHANGES = {
    "add": lambda y: y.add_(torch.linspace(0, 1, 8, dtype=y.dtype)),
    "relu": torch.relu_,
    "mask": masked,
    "view": by_a_view,
    "twice": lambda y: y.mul_(2.0).tanh_(),
}


class Changed(nn.Module):
    """What its blocks have made, views among it, is changed in place outside of them.

    Attributes:
        where: "output", "attribute", "part" (one of two outputs, views of the same), "inside" (its block
            changes it before) or "input" (a block changes what it is given, and returns it).
    """

    def __init__(self, change, where):
        super().__init__()
        self.blocks = nn.ModuleList(View(where) for _ in range(3))
        self.change, self.where = change, where

    def forward(self, h):
        others = []
        for block in self.blocks:
            out = block(h)
            y = block.aux if self.where == "attribute" else out
            if self.where == "part":
                y, other = out
                others.append(other.sum())
            self.change(y)
            h = y + out if self.where == "attribute" else y
        return h.square().mean() + sum(others)


class View(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.where, self.aux = where, None

    def forward(self, h):
        y = self.down(torch.tanh(self.up(h)))
        if self.where == "attribute":
            self.aux = y
            return torch.sin(self.up(h))
        if self.where == "part":
            return y[..., :], y.transpose(0, 1)
        if self.where == "inside":
            y = y.view(y.shape)
            y.mul_(self.down.bias + 2)
        if self.where == "input":
            h = h * 1
            v = h.view(h.shape)
            v.add_(y)
            return v
        return y


@pytest.mark.parametrize("where", ["output", "attribute", "part", "inside", "input"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_in_place(change, where):
    """A linear's output of three dims is a view."""
    torch.manual_seed(0)
    plain = Changed(change, where).double()
    model = copy.deepcopy(plain)
    inputs = torch.randn(2, 2, 2, 8, dtype=torch.float64)
    with local_world(2) as world:
        shard(model)
        for x in inputs:
            model(world.map(lambda _, x=x: x)).backward()
            with world.paused():
                plain(x).backward()
        equal_grads(model, plain)


class TestChangedWeights:
    @pytest.mark.parametrize("how", ["in place", "SGD", "foreach SGD"])
    def test_between_forward_and_backward(self, how):
        with local_world(2):
            model = shard(Model(ATTRIBUTES["tensor"]))
            model.loss(torch.ones(2, 8)).backward()
            loss = model.loss(torch.ones(2, 8))
            change(model, how)
            with pytest.raises(StateError, match=r"unit blocks\.\d: .*changed .*before|between"):
                loss.backward()
            model.zero_grad()
            model.loss(torch.ones(2, 8)).backward()

    def test_what_the_forward_used_is_kept_where_it_does_not_reshard(self):
        torch.manual_seed(0)
        plain = Model(ATTRIBUTES["tensor"])
        model = copy.deepcopy(plain)
        with local_world(2) as world:
            shard(model, reshard_after_forward=False)
            loss = model.loss(torch.ones(2, 8))
            change(model, "in place")
            loss.backward()
            with world.paused():
                plain.loss(torch.ones(2, 8)).backward()
            equal_grads(model, plain)

    def test_another_models_optimizer_is_none_of_it(self):
        with local_world(2):
            mesh = cpu_mesh()
            model, other = (shard(Model(ATTRIBUTES["tensor"]), mesh) for _ in range(2))
            other.loss(torch.ones(2, 8)).backward()
            loss = model.loss(torch.ones(2, 8))
            torch.optim.SGD(other.parameters(), lr=0.1).step()
            loss.backward()

    @pytest.mark.parametrize("how", ["data", "foreach", "in place"])
    @pytest.mark.parametrize(
        "options",
        [{}, {"reshard_after_forward": False}, {"shard_optimizer_over_replicate": True}],
        ids=["freed", "kept", "hfsdp"],
    )
    def test_between_forwards(self, how, options):
        torch.manual_seed(0)
        plain = Model(ATTRIBUTES["tensor"])
        model = copy.deepcopy(plain)
        x = torch.ones(2, 8)
        with local_world(4) as world, torch.no_grad():
            shard(model, cpu_mesh(2, 2), **options)
            model(x)
            change(model, how)
            got = model(x)
            with world.paused():
                for p in plain.parameters():
                    p.mul_(2)
                want = plain(x)
            torch.testing.assert_close(world.per_rank(got)[0], want)


def change(model, how):
    params = list(model.parameters())
    if "SGD" in how:
        torch.optim.SGD(params, lr=0.1, foreach="foreach" in how).step()
    elif how == "data":
        for p in params:
            p.data.mul_(2)
    elif how == "foreach":
        torch._foreach_mul_([p.detach() for p in params], 2.0)
    else:
        with torch.no_grad():
            for p in params:
                p.mul_(2)


class TestInputs:
    @pytest.mark.parametrize("call", ["backward", "grad"])
    @pytest.mark.parametrize("layout", [(1, 2), (2, 1)], ids=["shard", "replicate"])
    def test_sharded_parameters_are_refused(self, call, layout):
        with local_world(2):
            model = shard(Model(ATTRIBUTES["tensor"]), cpu_mesh(*layout))
            loss = model.loss(torch.ones(2, 8))
            params = list(model.blocks[0].parameters())
            with pytest.raises(
                StateError, match=r"parameter .* of unit blocks\.0 as one of its inp"
            ):
                if call == "backward":
                    loss.backward(inputs=params)
                else:
                    torch.autograd.grad(loss, params, allow_unused=True)
            loss.backward()

    def test_a_loss_of_the_sharded_parameter_itself(self):
        with local_world(2):
            model = shard(Model(ATTRIBUTES["tensor"]))
            weight = model.head.weight
            (got,) = torch.autograd.grad(weight.square().sum(), weight)
            torch.testing.assert_close(got.to_local(), 2 * weight.to_local())


class TestChangedWhereNothingIsGathered:
    """On a replicate axis alone, and without dims: forward computes with the weights themselves."""

    @pytest.mark.parametrize("how", ["in place", "SGD", "foreach SGD"])
    @pytest.mark.parametrize("recomputed", [None, False, True], ids=["plain", "again", "reentrant"])
    def test_between_forward_and_backward(self, how, recomputed):
        class Recomputed(Block):
            def forward(self, h):
                if recomputed is None:
                    return super().forward(h)
                return checkpoint(super().forward, h, use_reentrant=recomputed)

        torch.manual_seed(0)
        plain = Model(ATTRIBUTES["tensor"], "output")
        for block in plain.blocks:
            block.__class__ = Recomputed
        model = copy.deepcopy(plain)
        x = torch.ones(2, 8)
        with local_world(2) as world:
            shard(model, cpu_mesh(2, 1))
            model.loss(x).backward()
            model.zero_grad()
            loss = model.loss(x)
            change(model, how)
            with pytest.raises(StateError, match=r"unit [\w.]+: .*changed .*before|between"):
                loss.backward()
            model.zero_grad()
            change(plain, how)
            model.loss(x).backward()
            with world.paused():
                plain.loss(x).backward()
            if how == "in place":
                equal_grads(model, plain)

    def test_what_the_backward_does_not_read_may_change(self):
        """Two losses of one forward, a step between their backwards."""
        torch.manual_seed(0)
        plain = Model(ATTRIBUTES["tensor"])
        model = copy.deepcopy(plain)
        x = torch.ones(2, 8)
        with local_world(2) as world:
            shard(model, cpu_mesh(2, 1))
            for each, off in ((model, False), (plain, True)):
                with world.paused() if off else nullcontext():
                    each(x).backward(retain_graph=True)
                    with torch.no_grad():
                        each.head.weight.mul_(2)
                    each.blocks[0].aux.backward()
            equal_grads(model, plain)

    def test_a_parameter_without_dims_beside_sharded_ones(self):
        class Scaled(nn.Linear):
            def __init__(self):
                super().__init__(8, 8)
                self.scale = nn.Parameter(torch.tensor(2.0))

            def forward(self, x):
                return super().forward(x) * self.scale

        with local_world(2):
            model = fully_shard(nn.Sequential(Scaled(), Scaled()), mesh=cpu_mesh())
            model(torch.ones(2, 8)).sum().backward()
            loss = model(torch.ones(2, 8)).sum()
            with torch.no_grad():
                model[0].scale.mul_(2)
            with pytest.raises(StateError, match=r"unit Sequential: .*changed"):
                loss.backward()


class Again(nn.Module):
    """Two blocks of one unit, the first of which runs once more when both have."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (Block(lambda aux: aux, "attribute", True) for _ in range(2))

    def forward(self, h):
        for block in (self.first, self.second, self.first):
            h, _ = block(h)
        return h.square().mean()


def test_on_an_attribute_of_a_unit_whose_forward_has_not_ended():
    """Backwards of two forwards, each from what the first block has left last."""
    torch.manual_seed(0)
    plain = Again()
    model = copy.deepcopy(plain)
    inputs = torch.randn(2, 2, 8)
    with local_world(2) as world:
        fully_shard([model.first, model.second], mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())

        def train(each):
            each(inputs[0])  # makes the order known
            losses = [each(x) * 0 + each.first.aux for x in inputs]
            for loss in losses:
                loss.backward()

        train(model)
        with world.paused():
            train(plain)
        equal_grads(model, plain)
