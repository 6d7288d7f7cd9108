"""FSDPModule's methods about communication: what is reduced when, by what, and divided by what."""

import warnings

import pytest
import torch
from _support.engine.twins import (
    Twins,
    device_mesh,
    floats,
    shard_layers,
    train,
)
from _support.fsdp.counted_collectives import Gather, Scatter
from _support.models import Block, Lm
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from parallel3d.testing import fake_world, record_collectives


def accumulation(engine, shape) -> None:
    """Without reduction, with reduce-scatter only, and with both; of the model or of one unit."""
    mesh = device_mesh(*shape)
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, mesh))
    model = twins.sharded
    defer = [model.set_requires_gradient_sync]
    if len(shape) == 2:
        defer.append(model.set_requires_all_reduce)
    for step, set_requires in enumerate(defer):
        with record_collectives(mesh) as recorder:
            for micro_batch in range(3):
                last = micro_batch == 2
                set_requires(last)
                recorder.clear()
                twins.backward(3 * step + micro_batch)
                reduced = step == 1 or last
                scattered = recorder.count("reduce_scatter") + recorder.count("all_to_all")
                assert (scattered > 0) == reduced
                assert recorder.count("all_reduce", "replicate") == (
                    3 if last and len(shape) == 2 else 0
                )
        twins.check_grads()
        twins.step()
    layer = model.layers[0]
    layer.set_requires_gradient_sync(False, recurse=False)
    twins.backward(0)
    layer.set_requires_gradient_sync(True, recurse=False)
    twins.backward(1)
    twins.check_grads()
    twins.step()
    twins.check_weights()


@pytest.mark.parity(
    "method: set_requires_gradient_sync",
    "method: set_requires_all_reduce",
    "behaviour: gradient accumulation",
)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_accumulation(on_ranks, shape) -> None:
    on_ranks(accumulation, shape, size=4)


def is_last_backward(engine) -> None:
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh()))
    for step in range(2):
        for micro_batch in range(3):
            twins.sharded.set_is_last_backward(micro_batch == 2)
            twins.backward(3 * step + micro_batch)
        twins.check_grads()
        twins.step()
    twins.check_weights()


@pytest.mark.smoke
@pytest.mark.parity("method: set_is_last_backward", "behaviour: gradient accumulation")
def test_set_is_last_backward(on_ranks) -> None:
    """Several backwards whose reductions are waited for at the end of the last."""
    on_ranks(is_last_backward)


def divide_factor(engine, method, force_sum, shape, dtype=torch.float64) -> None:
    """Gradients are the ranks' sum over the factor; only in the modules that were told."""
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh(*shape)), dtype=dtype)
    model = twins.sharded
    told = [model.layers[0], model]
    for unit in told:
        if force_sum:
            unit.set_force_sum_reduction_for_comms(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(unit, method)(0.5)
    twins.backward()
    for name, p in twins.plain.named_parameters():
        if not name.startswith("layers.1"):
            p.grad *= dist.get_world_size() / 0.5
    twins.check_grads()


@pytest.mark.parity(
    "method: set_gradient_divide_factor",
    "method: set_force_sum_reduction_for_comms",
    "behaviour: gradient divide on gloo",
)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_gradient_divide_factor_by_sums(on_ranks, shape) -> None:
    on_ranks(divide_factor, "set_gradient_divide_factor", True, shape, size=4)


@pytest.mark.parity("method: set_gradient_divide_factor", "behaviour: gradient divide on gloo")
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.torch_fails("no gloo", match="PREMUL_SUM with Gloo")
def test_gradient_divide_factor(on_ranks, shape) -> None:
    """In float32, for which torch asks for an operation that gloo lacks."""
    on_ranks(divide_factor, "set_gradient_divide_factor", False, shape, torch.float32, size=4)


@pytest.mark.parity("method: set_reduce_scatter_divide_factor")
def test_reduce_scatter_divide_factor(on_ranks, engine) -> None:
    """The old name."""
    on_ranks(divide_factor, "set_reduce_scatter_divide_factor", True, (2,))
    with fake_world(0, 2):
        block = engine.fully_shard(Block(), mesh=device_mesh())
        with pytest.warns((DeprecationWarning, FutureWarning), match="set_gradient_divide_factor"):
            block.set_reduce_scatter_divide_factor(2.0)


def force_sum(engine) -> None:
    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh(2, 2))
        for unit in (*model.layers, model):
            unit.set_force_sum_reduction_for_comms(True)

    train(Lm(), wrap)


@pytest.mark.parity("method: set_force_sum_reduction_for_comms")
def test_force_sum_reduction(on_ranks) -> None:
    on_ranks(force_sum, size=4)


class Branches(nn.Module):
    """Of which each sample takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Two(), Two()])
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, which)
        return x


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.either, self.other = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return x + (self.other if which else self.either)(x)


def branch_loss(model: nn.Module, sample: int) -> torch.Tensor:
    return model(floats(sample), sample % 2).square().mean()


def unused_params(engine) -> None:
    """Ranks use different parameters; one no rank uses has a gradient of zeros."""

    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh())
        model.set_reduce_scatter_unused_params(True)

    twins = Twins(Branches(), wrap, branch_loss, int)
    for index in range(3):
        twins.backward(index)
        for p in twins.plain.unused.parameters():
            p.grad = torch.zeros_like(p)
        twins.check_grads()
        twins.step()
    twins.check_weights()


@pytest.mark.parity("method: set_reduce_scatter_unused_params")
def test_reduce_scatter_unused_params(on_ranks) -> None:
    on_ranks(unused_params)


def max_input_buffers(engine) -> None:
    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh())
        model.set_reduce_scatter_max_input_buffers(3)

    train(Lm(layers=4), wrap)


@pytest.mark.parity("method: set_reduce_scatter_max_input_buffers")
def test_reduce_scatter_max_input_buffers(on_ranks, engine) -> None:
    on_ranks(max_input_buffers)
    with fake_world(0, 2):
        block = engine.fully_shard(Block(), mesh=device_mesh())
        for wrong in (0, True, 1.5):
            with pytest.raises((TypeError, ValueError), match="max_input_buffers"):
                block.set_reduce_scatter_max_input_buffers(wrong)


def separate_group(engine) -> list[tuple[str, bool]]:
    mesh = device_mesh(2, 2)

    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, mesh)
        model.set_separate_reduce_scatter_group()

    twins = train(Lm(), wrap)
    seen = []
    for enable in (True, False):
        twins.sharded.set_separate_reduce_scatter_group(enable)
        with record_collectives(mesh) as recorder:
            twins.backward_sharded()
        for call in recorder.calls:
            if call.op in ("reduce_scatter", "all_to_all"):
                seen.append((enable, call.axis))
        assert {c.axis for c in recorder.select("all_gather")} == {"shard"}
    return seen


@pytest.mark.parity("method: set_separate_reduce_scatter_group")
def test_separate_reduce_scatter_group(on_ranks) -> None:
    """Reductions run on a group that is none of the mesh's, and on the mesh's again."""
    for seen in on_ranks(separate_group, size=4):
        assert set(seen) == {(True, None), (False, "shard")}


def own_hsdp(engine) -> None:
    """A hook that all-reduces over an axis the engine knows nothing of, and averages."""
    mesh = device_mesh(2, 2)
    group, calls = mesh.get_group("replicate"), []

    def hook(reduced: torch.Tensor) -> None:
        calls.append(reduced.numel())
        dist.all_reduce(reduced, group=group)
        reduced.div_(2)

    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, mesh["shard"])
        for unit in (*model.layers, model):
            unit.set_all_reduce_hook(hook)

    twins = train(Lm(), wrap)
    assert len(calls) == 3 * 3
    # With accumulation: the hook runs with the reduction.
    twins.sharded.set_requires_gradient_sync(False)
    twins.backward(7)
    assert len(calls) == 9
    twins.sharded.set_requires_gradient_sync(True)
    twins.backward(8)
    assert len(calls) == 12
    twins.check_grads()


@pytest.mark.smoke
@pytest.mark.parity("method: set_all_reduce_hook", "behaviour: own HSDP by set_all_reduce_hook")
def test_all_reduce_hook(on_ranks) -> None:
    on_ranks(own_hsdp, size=4)


def hook_after_native_all_reduce(engine) -> None:
    """With native HSDP the hook gets what is all-reduced already, and may change it."""

    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh(2, 2))
        for unit in (*model.layers, model):
            unit.set_all_reduce_hook(lambda reduced: reduced.mul_(3))

    twins = Twins(Lm(), wrap)
    twins.backward()
    for p in twins.plain.parameters():
        p.grad *= 3
    twins.check_grads()


@pytest.mark.parity("method: set_all_reduce_hook")
def test_all_reduce_hook_with_native_hsdp(on_ranks, engine) -> None:
    on_ranks(hook_after_native_all_reduce, size=4)
    with fake_world(0, 4):
        block = engine.fully_shard(Block(), mesh=device_mesh(2, 2))
        with pytest.raises(ValueError, match="stream"):
            block.set_all_reduce_hook(lambda reduced: None, stream=object())


def custom_collectives(engine) -> None:
    gather, scatter = Gather(), Scatter()

    def wrap(model: nn.Module) -> None:
        shard_layers(engine, model, device_mesh())
        model.layers[0].set_custom_all_gather(gather)
        model.layers[0].set_custom_reduce_scatter(scatter)
        model.layers[1].set_custom_reduce_scatter(scatter)

    train(Lm(), wrap)
    assert len(gather.ops) == 3 * 2  # forward and backward of three steps
    assert len(scatter.ops) == 3 * 2  # two units


@pytest.mark.parity("method: set_custom_all_gather", "method: set_custom_reduce_scatter")
def test_custom_collectives(on_ranks) -> None:
    on_ranks(custom_collectives)


@pytest.mark.parity(
    "method: set_custom_all_gather",
    "method: set_custom_reduce_scatter",
    "method: set_all_reduce_hook",
)
def test_custom_collectives_of_a_unit_on_two_meshes_are_refused(engine) -> None:
    """Nobody could say which mesh they are for."""
    with fake_world(0, 4):
        block, other = Block(), engine.mesh_info(device_mesh(2, 2))

        def place(p):
            chosen = p is block.up.weight
            return engine.ShardPlacementResult(Shard(0), other) if chosen else None

        engine.fully_shard(block, mesh=device_mesh(4), shard_placement_fn=place)
        for name, value in (
            ("set_custom_all_gather", Gather()),
            ("set_custom_reduce_scatter", Scatter()),
            ("set_all_reduce_hook", lambda reduced: None),
        ):
            with pytest.raises(ValueError, match="mesh"):
                getattr(block, name)(value)


@pytest.mark.parity(
    "method: set_allocate_memory_from_process_group_for_comm", "method: set_symm_mem_for_comm"
)
def test_custom_collectives_and_other_allocators_exclude_each_other(engine) -> None:
    with fake_world(0, 2):
        for name, value in (
            ("set_custom_all_gather", Gather()),
            ("set_custom_reduce_scatter", Scatter()),
        ):
            block = engine.fully_shard(Block(), mesh=device_mesh())
            getattr(block, name)(value)
            with pytest.raises((AssertionError, ValueError), match="custom"):
                block.set_allocate_memory_from_process_group_for_comm(True)
            with pytest.raises((AssertionError, ValueError), match="custom"):
                block.set_symm_mem_for_comm()


def no_symmetric_memory(engine) -> None:
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh()))
    with pytest.raises((RuntimeError, ValueError)):
        twins.sharded.set_symm_mem_for_comm()
    twins.train()
    twins.sharded.set_allocate_memory_from_process_group_for_comm(False)
    twins.train()


@pytest.mark.parity("method: set_symm_mem_for_comm")
def test_no_symmetric_memory_on_gloo(on_ranks) -> None:
    """Refused; the model goes on as before."""
    on_ranks(no_symmetric_memory)


def no_allocator(engine) -> None:
    twins = Twins(Lm(), lambda m: shard_layers(engine, m, device_mesh()))
    with pytest.raises(ValueError, match="gloo"):
        twins.sharded.set_allocate_memory_from_process_group_for_comm(True)
    twins.train()


@pytest.mark.parity("method: set_allocate_memory_from_process_group_for_comm")
@pytest.mark.torch_fails("silent", match="DID NOT RAISE")
def test_no_allocator_on_gloo(on_ranks) -> None:
    on_ranks(no_allocator)
