"""Other dtypes, loaded values: what ``_apply``, ``load_state_dict`` and mixed precision do to a unit."""

import pytest
import torch
from _support.fsdp.wrapped import at_rest, build, cpu_mesh
from _support.models import Lm, lm_loss, tokens
from torch import nn

from parallel3d import (
    Parallel3dError,
    parallelize,
)
from parallel3d.fsdp.inspect import unit_of
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
