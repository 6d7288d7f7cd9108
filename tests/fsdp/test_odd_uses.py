"""What users do to a model between and around steps; each of these once went wrong."""

import copy
import functools
from typing import Any

import pytest
import torch
from _support.fsdp.wrapped import at_rest, cpu_mesh, held_bytes, shard_blocks
from _support.models import Block, Lm, lm_loss, tokens
from torch import nn
from torch.nn import functional as F

from parallel3d import MeshLayout, Parallel3dError, StateError, build_mesh, materialize, parallelize
from parallel3d.fsdp import FSDPModule, fully_shard
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import assert_parity, fake_world, local_world, record_collectives

DATA = MeshLayout(2, 2, 1)


def parity(build, apply=shard_blocks, loss=lm_loss, layout=DATA, batch=tokens) -> None:
    """Float64, three steps."""
    assert_parity(build, batch, layout, loss=loss, apply=apply, steps=3, fp32=False)


def is_parallel(model: nn.Module) -> bool:
    return any(isinstance(m, FSDPModule) for m in model.modules())


def floats(index: int) -> torch.Tensor:
    return torch.randn(2, 12, generator=torch.Generator().manual_seed(index))


class Stack(nn.Module):
    """Blocks and nothing else."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class TestFrozen:
    def test_frozen_before_trained_in_a_root_with_integer_inputs(self) -> None:
        class Probe(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(19, 12)
                self.frozen, self.head = nn.Linear(12, 12), nn.Linear(12, 19)
                self.frozen.requires_grad_(False)

            def forward(self, ids):
                return self.head(self.frozen(self.embed(ids)))

        def apply(model, mesh):
            fully_shard(model.embed, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        parity(Probe, apply)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_frozen_for_an_evaluation_before_the_backward(self, mode) -> None:
        """As adapters are switched for a reference: the backward to come trains what its forward had."""

        def loss(model, x):
            value = mean_square(model, x)
            trained = list(model.layers[1].parameters())
            for param in trained:
                param.requires_grad_(False)
            with mode():
                model(x)
            for param in trained:
                param.requires_grad_(True)
            return value

        for layout in (DATA, MeshLayout(2, 1, 1)):
            parity(Stack, loss=loss, batch=floats, layout=layout)

    def test_two_backwards_through_one_graph(self) -> None:
        def build():
            model = Stack()
            for layer in model.layers:
                layer.norm.requires_grad_(False)
                layer.up.requires_grad_(False)
            return model

        def loss(model, x):
            value = mean_square(model, x)
            parts = 4 if not is_parallel(model) else 1
            (value / parts).backward(retain_graph=True)
            return value

        parity(build, loss=loss, batch=floats)

    def test_list_unit_whose_second_input_needs_the_gradient(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.a = nn.Linear(12, 12), nn.Linear(12, 12)
                self.b = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
                self.a.requires_grad_(False)
                self.b[0].requires_grad_(False)

            def forward(self, x):
                return self.a(x) + self.b(self.first(x))

        def apply(model, mesh):
            fully_shard([model.a, model.b], mesh=mesh)
            return fully_shard(model, mesh=mesh)

        parity(Two, apply, loss=mean_square, batch=floats)

    def test_frozen_unit_is_freed_before_the_backward_ends(self) -> None:
        held = []

        def build():
            model = Stack(3)
            model.layers[1].requires_grad_(False)
            return model

        with fake_world(0, 2):
            model = shard_blocks(build(), cpu_mesh())
            (bucket,) = unit_of(model.layers[1]).group.buckets
            model.layers[0].norm.register_full_backward_hook(
                lambda *_: held.append(held_bytes(bucket.precision.unsharded))
            )
            model(floats(0)).sum().backward()
        assert held == [0]

    @pytest.mark.parity("behaviour: frozen buckets hold no gradient or reduce buffers (LoRA)")
    @pytest.mark.parametrize("sync", [True, False])
    def test_frozen_buckets_have_no_gradient_buffers(self, sync) -> None:
        """Looked at in the middle of a backward, where the trained bucket has its own."""
        with fake_world(0, 2):
            block = Block()
            block.up.requires_grad_(False)
            fully_shard(block, mesh=cpu_mesh())
            block.set_requires_gradient_sync(sync)
            seen = {}

            def look(*_):
                for bucket in unit_of(block).group.buckets:
                    grads = bucket.grads
                    buffers = [
                        grads.input,
                        grads.sums.unsharded,
                        grads.sums.scattered,
                    ]
                    seen[bucket.params[0].requires_grad] = [b is not None for b in buffers]

            block.norm.register_full_backward_hook(look)
            block(floats(0).requires_grad_()).sum().backward()
        assert seen[False] == [False, False, False]
        assert seen[True] == [sync, not sync, False]


class TestModules:
    def test_embedding_that_computes_with_its_table(self) -> None:
        class Normalized(nn.Embedding):
            def forward(self, ids):
                return F.embedding(ids, F.normalize(self.weight))

        def build():
            model = Lm(layers=1)
            model.embed = Normalized(19, 12)
            return model

        parity(build, parallelize)

    def test_block_that_writes_to_a_list_and_a_dict(self) -> None:
        class Writes(Block):
            def forward(self, x, notes, cache):
                y = super().forward(x)
                notes.append(y.mean())
                cache[len(cache)] = y
                return y

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Writes() for _ in range(3))

            def forward(self, x):
                notes, cache = [x.sum()], {}
                for layer in self.layers:
                    x = layer(x, notes, cache=cache)
                return x + sum(notes) + sum(cache.values())

        parity(Model, loss=mean_square, batch=floats)

    def test_tail_of_which_only_the_norm_runs(self) -> None:
        class Features(Lm):
            def forward(self, ids):
                x = self.embed(ids)
                for layer in self.layers:
                    x = layer(x)
                return self.norm(x)

        def loss(model, ids):
            value = mean_square(model, ids)
            if is_parallel(model):
                assert type(model.head.weight.data).__name__ == "DTensor"
            return value

        parity(functools.partial(Features, layers=1), parallelize, loss=loss)

    def test_head_read_outside_of_it_and_an_evaluation_before_the_backward(self) -> None:
        """As TRL's losses do: the backward finds what its forward has left, if that is kept."""

        class Fused(Lm):
            def forward(self, ids):
                x = self.embed(ids)
                for layer in self.layers:
                    x = layer(x)
                return F.linear(self.norm(x), self.head.weight, self.head.bias)

        def loss(model, ids):
            if is_parallel(model):
                model.set_keep_between_forwards(True)
            value = mean_square(model, ids)
            with torch.no_grad():
                model(ids)
            return value

        parity(functools.partial(Fused, layers=1), parallelize, loss=loss)

    def test_weight_also_used_detached_and_inputs_in_a_list(self) -> None:
        """The gradient of a weight is complete before its detached use is done with it."""

        class Odd(Block):
            def forward(self, inputs):
                (x,) = inputs
                x = F.linear(F.linear(x, self.up.weight.detach()), self.down.weight.detach())
                return [super().forward(x)]

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Odd() for _ in range(2))
                self.first = nn.Linear(12, 12)

            def forward(self, x):
                values = [self.first(x)]
                for layer in self.layers:
                    values = layer(values)
                return values[0]

        parity(Model, loss=mean_square, batch=floats)

    @pytest.mark.parametrize("how", ["fully_shard", "parallelize", "convert", "materialize"])
    def test_made_sharded_and_run_in_inference_mode(self, how) -> None:
        """A state dict can be made there, and the model trained later."""
        with fake_world(0, 2):
            mesh = cpu_mesh()
            x = floats(0).double() if how == "convert" else floats(0)
            with torch.inference_mode():
                with torch.device("meta" if how == "materialize" else "cpu"):
                    model = Stack()
                if how == "fully_shard":
                    shard_blocks(model, mesh)
                else:
                    parallelize(model, mesh)
                if how == "convert":
                    model.double()
                if how == "materialize":
                    materialize(model, device="cpu", seed=0)
                for _ in range(2):
                    model(x)
                assert [*model.state_dict()] == [*Stack().state_dict()]
            assert not any(p.is_inference() for p in model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x).sum().backward()
            optimizer.step()
            model(x).sum().backward()

    def test_gradients_with_a_graph_are_an_error(self) -> None:
        """Derivatives of derivatives by the inputs are none: see test_transforms."""
        with fake_world(0, 2):
            model = shard_blocks(Stack(), cpu_mesh())
            x = floats(0).requires_grad_()
            with pytest.raises(StateError, match="create_graph"):
                model(x).sum().backward(create_graph=True)
            model(x).sum().backward()
            assert at_rest(model)

    def test_two_roots_that_share_units(self) -> None:
        class Other(nn.Module):
            def __init__(self, layers) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, x):
                for layer in reversed(self.layers):
                    x = layer(x)
                return x

        torch.manual_seed(0)
        plain = Stack()
        model = copy.deepcopy(plain)
        x = floats(0)
        want = (plain(x).sum() + Other(plain.layers)(x).square().sum()).detach()
        with local_world(2) as world:
            mesh = cpu_mesh()
            shard_blocks(model, mesh)
            other = fully_shard(Other(model.layers), mesh=mesh)
            ids = world.map(lambda r: x)
            for _ in range(3):
                first, second = model(ids), other(ids)
                got = (first.sum() + second.square().sum()).detach()
                for value in world.per_rank(got):
                    torch.testing.assert_close(value, want)
                first.sum().backward()
                second.square().sum().backward()

    def test_evaluation_that_skips_a_prefetched_block(self) -> None:
        class Skips(Stack):
            skip = False

            def forward(self, x):
                for layer in self.layers[:1] if self.skip else self.layers:
                    x = layer(x)
                return x

        with fake_world(0, 2):
            model = shard_blocks(Skips(), cpu_mesh())
            model(floats(0)).sum().backward()
            model.skip = True
            with torch.no_grad():
                model(floats(0))
            for layer in model.layers:
                (bucket,) = unit_of(layer).group.buckets
                assert bucket.precision.gathered.untyped_storage().size() == 0


def multi_grad(model: nn.Module, mode: str) -> Any:
    weights = [layer.up.weight for layer in model.layers[1:]]
    return torch.autograd.graph.register_multi_grad_hook(weights, lambda grads: None, mode=mode)


TENSOR_HOOKS = {
    "register_hook": lambda model: model.layers[1].up.weight.register_hook(lambda grad: grad * 2),
    "all of several": functools.partial(multi_grad, mode="all"),
    "any of several": functools.partial(multi_grad, mode="any"),
}


class TestHooksAndCopies:
    @pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
    def test_parameter_with_a_hook_is_refused(self, kind) -> None:
        with fake_world(0, 2):
            mesh = cpu_mesh()
            block = Block()
            getattr(block.up.weight, kind)(lambda *_: None)
            with pytest.raises(Parallel3dError, match=r"up\.weight has a hook"):
                fully_shard(block, mesh=mesh)

    @pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 1), (1, 1, 1)], ids=str)
    @pytest.mark.parametrize("when", ["before the forward", "after it"])
    @pytest.mark.parametrize("how", TENSOR_HOOKS)
    def test_hook_that_autograd_does_not_call(self, how, when, shape) -> None:
        """An error before anything is reduced; without the hook the next step is a normal one."""
        torch.manual_seed(0)
        plain = Stack()
        model = copy.deepcopy(plain)
        with fake_world(0, shape[0] * shape[1]):
            shard_blocks(model, cpu_mesh(*shape))
            if when == "before the forward":
                handle = TENSOR_HOOKS[how](model)
            loss = mean_square(model, floats(0))
            if when == "after it":
                handle = TENSOR_HOOKS[how](model)
            pattern = r"up\.weight of unit layers\.1 has a hook.*register_post_accumulate_grad_hook"
            with record_collectives() as recorded, pytest.raises(StateError, match=pattern):
                loss.backward()
            assert not recorded.calls
            assert all(param.grad is None for param in model.parameters())
            handle.remove()
            mean_square(model, floats(0)).backward()
            assert all(param.grad is not None for param in model.parameters())
            assert at_rest(model)
            if shape == (1, 1, 1):
                mean_square(plain, floats(0)).backward()
                for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(param.grad.to_local(), expected.grad)

    def test_hook_on_the_sharded_parameter_sees_the_reduced_gradient(self) -> None:
        seen = []
        with fake_world(0, 4):
            mesh = build_mesh(DATA, device_type="cpu")
            block = fully_shard(Block(), mesh=mesh)
            block.up.weight.register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.placements == p.placements)
            )
            block.set_requires_all_reduce(False)
            block(floats(0)).sum().backward()
            assert seen == []
            block.set_requires_all_reduce(True)
            block(floats(0)).sum().backward()
            assert seen == [True]

    def test_forward_sees_the_attributes_of_a_parameter(self) -> None:
        class Scaled(Block):
            def forward(self, x):
                return super().forward(x) * self.up.weight.scale

        block = Scaled()
        block.up.weight.scale = 3.0
        want = block(floats(0))
        with fake_world(0, 1):
            fully_shard(block, mesh=cpu_mesh(1, 1))
            assert torch.equal(block(floats(0)), want)
            assert block.up.weight.scale == 3.0

    @pytest.mark.parametrize("view", [lambda w: w, torch.Tensor.t, torch.Tensor.detach])
    @pytest.mark.parametrize("static", [False, True])
    @pytest.mark.parametrize("trains", [False, True])
    def test_returning_a_parameter_is_an_error(self, view, static, trains) -> None:
        """Its memory is freed when the unit is: reading it would crash, or show what is there then."""

        class Leaks(Block):
            def forward(self, x):
                return super().forward(x), view(self.up.weight)

        with fake_world(0, 2), torch.set_grad_enabled(trains):
            block = fully_shard(Leaks(), mesh=cpu_mesh(), reshard_after_forward=True)
            block.set_static_memory(static)
            with pytest.raises(Parallel3dError, match=r"returns a parameter of its own.*clone"):
                block(floats(0))
