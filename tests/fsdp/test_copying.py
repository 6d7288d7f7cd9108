"""copy.deepcopy of sharded models: independent units with the same weights."""

import copy
import gc
import weakref

import pytest
import torch
from _support.fsdp.wrapped import at_rest, build, cpu_mesh
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import nn

from parallel3d import parallelize
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit, unit_of
from parallel3d.testing import local_world

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
        gc.collect()
        gc.disable()
        try:
            twin = copy.deepcopy(model)
            step(twin)
            refs = [weakref.ref(p) for p in twin.parameters()]
            refs += [weakref.ref(m) for m in twin.modules()]
            del twin
            assert not [ref for ref in refs if ref() is not None]
        finally:
            gc.enable()


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
