"""``reshard_after_forward=k``: between forward and backward k ranks hold the parameters once."""

import pytest
import torch
from _support.fsdp.beside_plain import Net, Trial
from _support.fsdp.wrapped import cpu_mesh, held_bytes
from torch import nn
from torch.distributed.tensor import Shard

from parallel3d import MeshLayout, MixedPrecisionPolicy
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit
from parallel3d.testing import fake_world, local_world, record_collectives

parity = pytest.mark.parity


def cut_columns(param: nn.Parameter) -> Shard | None:
    """Dim 1 of matrices: 6, 9 and 3 columns on 4 ranks."""
    return Shard(1) if param.ndim > 1 else None


def wrap_over(k, **options):
    def wrap(model, mesh):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=k, **options)
        return fully_shard(model, mesh=mesh, **options)

    return wrap


def buckets_of(model):
    return [b for layer in model.layers for b in get_unit(layer).group.buckets]


@parity("argument: reshard_after_forward=int")
@parity("fault a: reshard to a smaller world with Shard(1)")
@pytest.mark.parametrize(
    ("layout", "k", "placement"),
    [
        (MeshLayout(1, 4, 1), 2, None),
        (MeshLayout(1, 6, 1), 3, cut_columns),
        (MeshLayout(2, 4, 1), 2, cut_columns),
        (MeshLayout(1, 4, 2), 2, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gradients_and_steps_are_the_plain_models(layout, k, placement):
    """Uneven rows and columns; torch 2.13: IndexError with Shard(1)."""
    with local_world(layout.world_size) as world:
        trial = Trial(world, layout, wrap_over(k, shard_placement_fn=placement))
        trial.backward(0)
        trial.check([0])
        trial.step()  # the next forward must gather what the optimizer wrote
        trial.backward(1)
        trial.check([1])


@parity("argument: reshard_after_forward=int")
def test_backward_gathers_among_k_and_forward_among_all():
    with local_world(4) as world:
        trial = Trial(world, MeshLayout(1, 4, 1), wrap_over(2))
        trial.backward(0)
        with record_collectives(trial.mesh) as recorder:
            loss = trial.forward(1)
            forward = recorder.select("all_gather")
            recorder.clear()
            loss.backward()
            backward = recorder.select("all_gather")
        layers = [call for call in forward if call.unit.startswith("layers")]
        assert {call.group_size for call in layers} == {4} and len(layers) == 2
        assert [call.unit for call in backward] == ["layers.1", "layers.0"]
        assert {call.group_size for call in backward} == {2}
        assert sorted(c.bytes for c in backward) == sorted(c.bytes for c in layers)


def test_memory_between_forward_and_backward_is_the_part():
    """A rank keeps n/k shards, in the compute dtype; nothing once they are gathered."""
    with local_world(4) as world:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        trial = Trial(world, MeshLayout(1, 4, 1), wrap_over(2, mp_policy=policy))
        loss = trial.forward(0)
        buckets = [b for b in buckets_of(trial.model) if b.shard_group is not None]
        for bucket in buckets:
            assert held_bytes(bucket.precision.unsharded) == 0
            # Ranks, rows, bf16.
            assert held_bytes(bucket.post_forward_shard) == 4 * 2 * bucket.layout.numel * 2
        loss.backward()
        for bucket in buckets:
            assert (
                bucket.post_forward_shard is None
                and held_bytes(bucket.precision.post_forward.buffer) == 0
            )


def test_scalars_are_not_sharded_and_keep_nothing():
    with local_world(4) as world:
        trial = Trial(world, MeshLayout(1, 4, 1), wrap_over(2))
        trial.forward(0)
        whole = [b for b in buckets_of(trial.model) if b.shard_group is None]
        assert len(whole) == 2 and all(b.post_forward_shard is None for b in whole)


def test_two_forwards_before_the_backward():
    with local_world(4) as world:
        trial = Trial(world, MeshLayout(1, 4, 1), wrap_over(2))
        first, second = trial.forward(0), trial.forward(1)
        (first + second).backward()
        trial.check([0, 1])


def test_eval_then_optimizer_then_forward_sees_the_new_weights():
    """A part of an evaluation's forward is never gathered from."""
    with local_world(4) as world:
        trial = Trial(world, MeshLayout(1, 4, 1), wrap_over(2))
        trial.forward(0)  # with a part, and no backward
        with torch.no_grad():
            for model in (trial.model, trial.plain):
                for param in model.parameters():
                    param.mul_(0.5)
        trial.backward(1)
        trial.check([1])


def test_one_small_mesh_for_all_units():
    """Process groups are made once per mesh and number of ranks, not per unit."""
    with fake_world(0, 8):
        model = wrap_over(2)(Net(), cpu_mesh(2, 4))
        model(torch.randn(2, 6)).sum()
        groups = {
            id(b.precision.post_forward.group)
            for b in buckets_of(model)
            if b.precision.post_forward is not None
        }
        assert len(groups) == 1


@pytest.mark.parametrize("rank", [0, 5])
def test_mesh_without_names(rank):
    with fake_world(rank, 8):
        mesh = torch.distributed.init_device_mesh("cpu", (8,))
        model = wrap_over(4)(Net(), mesh)
        model(torch.randn(2, 6)).sum()
        small = next(
            b.precision.post_forward
            for b in buckets_of(model)
            if b.precision.post_forward is not None
        )
        assert (small.group.size(), small.rank) == (4, rank % 4)
