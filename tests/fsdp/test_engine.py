"""What holds between calls: the at-rest rule, unshard and reshard, order, odd uses of modules."""

import copy
import functools
import gc

import pytest
import torch
from _support.fsdp.wrapped import at_rest, build, shard_blocks
from _support.models import Block, Lm, lm_loss, tokens
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d import MeshLayout, build_mesh
from parallel3d.fsdp import FSDPModule, fully_shard
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import assert_parity, fake_world, local_world


class TestAtRest:
    @pytest.mark.parametrize("reshard", [True, False, None])
    def test_parameters_are_the_same_objects_always(self, reshard) -> None:
        with fake_world(0, 2):
            model, _ = build(reshard_after_forward=reshard)
            objects = [id(p) for p in model.parameters()]
            loss = lm_loss(model, tokens(0))
            assert [id(p) for p in model.parameters()] == objects  # between forward and backward
            loss.backward()
            assert [id(p) for p in model.parameters()] == objects
            assert at_rest(model)

    def test_global_shapes_and_names_are_the_plain_models(self) -> None:
        plain = Lm(layers=2)
        with fake_world(1, 8):
            model, _ = build((2, 4, 1))
            assert {n: p.shape for n, p in plain.named_parameters()} == {
                n: p.shape for n, p in model.named_parameters()
            }
            assert list(plain.state_dict()) == list(model.state_dict())

    def test_evaluation_leaves_nothing_gathered(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            with torch.no_grad():
                model(tokens(0))
            assert at_rest(model)
            with torch.inference_mode():
                model(tokens(0))
            assert at_rest(model)
            lm_loss(model, tokens(0)).backward()
            assert at_rest(model)

    def test_forward_frees_blocks_but_not_the_root(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            loss = lm_loss(model, tokens(0))
            sizes = [
                sum(
                    b.precision.unsharded.untyped_storage().size() for b in unit_of(m).group.buckets
                )
                for m in (*model.layers, model)
            ]
            assert sizes[0] == sizes[1] == 0 < sizes[2]
            loss.backward()

    def test_a_block_run_alone_again_and_again(self) -> None:
        """Outside the root's forward a unit takes no part in the order of forwards."""
        with fake_world(0, 2):
            model, _ = build()
            lm_loss(model, tokens(0)).backward()
            order = unit_of(model).context.schedule.order
            before = len(order)
            for _ in range(5):
                model.layers[0](torch.randn(2, 12)).sum().backward()
            assert len(order) == before
            assert at_rest(model)

    def test_class_and_repr(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            assert isinstance(model, FSDPModule) and isinstance(model, Lm)
            assert type(model).__name__ == "FSDPLm"
            assert type(model.layers[0]) is type(model.layers[1])


def test_steps_leave_no_garbage() -> None:
    """With the collector off, the number of objects stays what it was: no cycle is made per step."""
    with fake_world(0, 8):
        model, _ = build((2, 4, 1))
        # Not AdamW: its numbers differ at each step, and torch 2.11 then makes garbage in planning DTensors.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            lm_loss(model, tokens(0)).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            for _ in range(20):
                step()
            grown = len(gc.get_objects()) - before
        finally:
            gc.enable()
        assert grown < 20  # less than one a step


class TestUnshard:
    @pytest.mark.parametrize("async_op", [False, True])
    def test_values_and_back(self, async_op) -> None:
        torch.manual_seed(0)
        plain = Lm(layers=2)
        with local_world(2) as world:
            model, _ = build()
            handle = model.layers[0].unshard(async_op=async_op)
            if async_op:
                assert isinstance(model.layers[0].up.weight, DTensor)  # not before wait()
                handle.wait()
                handle.wait()  # a second wait does nothing
            for name, want in plain.layers[0].named_parameters():
                for got in world.per_rank(model.layers[0].get_parameter(name).data):
                    assert torch.equal(got, want), name
            assert isinstance(model.layers[1].up.weight, DTensor)  # not recursive
            model.layers[0].reshard()
            assert isinstance(model.layers[0].up.weight, DTensor)

    @pytest.mark.parametrize("async_op", [False, True])
    def test_unshard_before_the_root_has_run(self, async_op) -> None:
        """A unit gathered by hand stays so when the root's first forward finds it."""

        def loss(model, x):
            if isinstance(model, FSDPModule):
                model.layers[0].unshard(async_op=async_op)
            return lm_loss(model, x)

        parity(shard_blocks, loss=loss)

    def test_changes_of_shards_are_gathered(self) -> None:
        with local_world(2) as world:
            model, _ = build()
            model.layers[0].unshard()
            model.layers[0].reshard()
            with torch.no_grad():
                for p in model.layers[0].parameters():
                    p.fill_(3.0)
            model.layers[0].unshard()
            for got in world.per_rank(model.layers[0].up.bias.data):
                assert (got == 3.0).all()


def parity(apply, loss=lm_loss, **options):
    """Parity in float64 on simulated ranks, 2 x 2 data ranks."""
    layout = options.pop("layout", MeshLayout(2, 2, 1))
    build_model = options.pop("build", functools.partial(Lm, layers=2))
    return assert_parity(
        build_model, tokens, layout, loss=loss, apply=apply, steps=2, fp32=False, **options
    )


class TestUses:
    @pytest.mark.parametrize("reshard", [True, False, None])
    def test_reshard_after_forward(self, reshard) -> None:
        parity(functools.partial(shard_blocks, reshard_after_forward=reshard))

    def test_root_only(self) -> None:
        parity(lambda model, mesh: fully_shard(model, mesh=mesh))

    def test_nested_units(self) -> None:
        def apply(model, mesh):
            for layer in model.layers:
                fully_shard(layer.up, mesh=mesh)
            return shard_blocks(model, mesh)

        parity(apply)

    def test_modules_as_one_unit(self) -> None:
        def apply(model, mesh):
            fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
            return shard_blocks(model, mesh)

        parity(apply)

    def test_units_without_a_root(self) -> None:
        """Only the blocks are units; the rest has plain gradients, different on each rank."""
        torch.manual_seed(0)
        plain = Block()
        model = copy.deepcopy(plain)
        x = torch.randn(3, 12)
        plain(x).sum().backward()
        with local_world(2):
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            fully_shard(model.up, mesh=mesh)
            fully_shard(model.down, mesh=mesh)
            model(torch.empty(3, 12).copy_(x)).sum().backward()
            full = model.up.weight.grad.full_tensor()
            assert torch.allclose(full.reconcile(), plain.up.weight.grad)

    def test_several_forwards_before_one_backward(self) -> None:
        parity(shard_blocks, loss=lambda m, x: lm_loss(m, x) + lm_loss(m, x.flip(0)) * 2)

    def test_one_block_called_twice(self) -> None:
        class Twice(Lm):
            def forward(self, ids):
                x = self.embed(ids)
                for layer in (self.layers[0], self.layers[1], self.layers[0]):
                    x = layer(x)
                return self.head(self.norm(x))

        parity(shard_blocks, build=functools.partial(Twice, layers=2))

    def test_two_backwards_of_two_forwards(self) -> None:
        class Loss:
            def __call__(self, model, x):
                first = lm_loss(model, x)
                second = lm_loss(model, x.flip(0))
                (first / x_scale(model)).backward()
                return second

        def x_scale(model):
            return 4 if not isinstance(model, FSDPModule) else 1

        parity(shard_blocks, loss=Loss())

    def test_backward_of_one_of_two_outputs(self) -> None:
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.trunk = nn.Linear(5, 6)
                self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 4)

            def forward(self, x):
                h = self.trunk(x)
                return self.a(h), self.b(h)

        def batch(i):
            return torch.randn(2, 5, generator=torch.Generator().manual_seed(i))

        assert_parity(
            Two,
            batch,
            MeshLayout(1, 2, 1),
            loss=lambda m, x: m(x)[1].square().mean(),
            apply=lambda m, mesh: fully_shard(m, mesh=mesh),
            steps=2,
            fp32=False,
        )

    def test_unused_block(self) -> None:
        class Skips(Lm):
            def forward(self, ids):
                return self.head(self.norm(self.layers[1](self.embed(ids))))

        parity(shard_blocks, build=functools.partial(Skips, layers=2))

    def test_frozen_parameters(self) -> None:
        def frozen():
            model = Lm(layers=3)
            for name, p in model.named_parameters():
                p.requires_grad_("layers.1" in name or "bias" in name)
            return model

        parity(shard_blocks, build=frozen)

    def test_all_frozen_but_the_first(self) -> None:
        """Frozen units after the trained one: backward passes through them and frees them."""

        def frozen():
            model = Lm(layers=2)
            for name, p in model.named_parameters():
                p.requires_grad_("embed" in name)
            return model

        parity(shard_blocks, build=frozen)

    def test_freezing_and_unfreezing_between_steps(self) -> None:
        """Also for units that the step before has taught to be prefetched."""

        class Loss:
            calls = 0

            def __call__(self, model, x):
                # The plain model sees all four data ranks' samples, the parallel one all at once.
                step = self.calls if isinstance(model, FSDPModule) else self.calls // 4
                self.calls += 1
                for p in model.layers[1].parameters():
                    p.requires_grad_(step % 3 != 2)
                return lm_loss(model, x)

        plain, parallel = Loss(), Loss()

        def loss(model, x):
            return (parallel if isinstance(model, FSDPModule) else plain)(model, x)

        assert_parity(
            functools.partial(Lm, layers=2),
            tokens,
            MeshLayout(2, 2, 1),
            loss=loss,
            apply=shard_blocks,
            steps=6,
            fp32=False,
        )

    def test_submodule_before_root(self) -> None:
        """torch 2.13: RuntimeError, already lazily initialized."""

        def loss(model, x):
            with torch.no_grad():
                model.layers[0](torch.zeros(1, 12, dtype=model.norm.weight.dtype))
            return lm_loss(model, x)

        parity(shard_blocks, loss=loss)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoint_around_units(self, reentrant) -> None:
        class Checkpointed(Lm):
            def forward(self, ids):
                x = self.embed(ids)
                for layer in self.layers:
                    x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
                return self.head(self.norm(x))

        parity(shard_blocks, build=functools.partial(Checkpointed, layers=2))

    def test_checkpoint_around_several_units(self) -> None:
        class Checkpointed(Lm):
            def forward(self, ids):
                def run(x):
                    for layer in self.layers:
                        x = layer(x)
                    return x

                x = torch.utils.checkpoint.checkpoint(run, self.embed(ids), use_reentrant=False)
                return self.head(self.norm(x))

        parity(shard_blocks, build=functools.partial(Checkpointed, layers=3))

    def test_scalar_parameter(self) -> None:
        class Scaled(Lm):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.scale = nn.Parameter(torch.tensor(1.5))

            def forward(self, ids):
                return super().forward(ids) * self.scale

        parity(shard_blocks, build=functools.partial(Scaled, layers=1))

    def test_ignored_parameters_stay(self) -> None:
        with fake_world(0, 2):
            mesh = build_mesh(MeshLayout(1, 2, 1), device_type="cpu")
            model = Block()
            keep = model.norm.weight
            fully_shard(model, mesh=mesh, ignored_params={keep})
            assert model.norm.weight is keep
            model(torch.randn(2, 12)).sum().backward()
            assert type(keep.grad) is torch.Tensor
