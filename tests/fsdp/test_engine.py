"""What holds between calls: the at-rest rule, unshard and reshard, order, odd uses of modules."""

import functools
import gc

import pytest
import torch
from _support.fsdp.wrapped import at_rest, build, shard_blocks
from _support.models import Lm, lm_loss, tokens

from parallel3d import MeshLayout
from parallel3d.fsdp import FSDPModule
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import assert_parity, fake_world


class TestAtRest:
    def test_global_shapes_and_names_are_the_plain_models(self) -> None:
        plain = Lm(layers=2)
        with fake_world(1, 8):
            model, _ = build((2, 4, 1))
            assert {n: p.shape for n, p in plain.named_parameters()} == {
                n: p.shape for n, p in model.named_parameters()
            }
            assert list(plain.state_dict()) == list(model.state_dict())

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
    def test_unshard_before_the_root_has_run(self, async_op) -> None:
        """A unit gathered by hand stays so when the root's first forward finds it."""

        def loss(model, x):
            if isinstance(model, FSDPModule):
                model.layers[0].unshard(async_op=async_op)
            return lm_loss(model, x)

        parity(shard_blocks, loss=loss)


def parity(apply, loss=lm_loss, **options):
    """Parity in float64 on simulated ranks, 2 x 2 data ranks."""
    layout = options.pop("layout", MeshLayout(2, 2, 1))
    build_model = options.pop("build", functools.partial(Lm, layers=2))
    return assert_parity(
        build_model, tokens, layout, loss=loss, apply=apply, steps=2, fp32=False, **options
    )


class TestUses:
    def test_unused_block(self) -> None:
        class Skips(Lm):
            def forward(self, ids):
                return self.head(self.norm(self.layers[1](self.embed(ids))))

        parity(shard_blocks, build=functools.partial(Skips, layers=2))

    def test_all_frozen_but_the_first(self) -> None:
        """Frozen units after the trained one: backward passes through them and frees them."""

        def frozen():
            model = Lm(layers=2)
            for name, p in model.named_parameters():
                p.requires_grad_("embed" in name)
            return model

        parity(shard_blocks, build=frozen)
