"""What FSDP1's MixedPrecision has beyond FSDP2's: each policy beside plain models that do it by hand."""

import copy

import pytest
import torch
from _support.fsdp.precision_twins import DIM, Net, Twins
from torch import nn

from parallel3d import MeshLayout
from parallel3d._torch.autograd import follows_grad_dtype
from parallel3d.fsdp.inspect import get_unit
from parallel3d.optim import accumulate
from parallel3d.testing import local_world, record_collectives

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
LONG = torch.int64
# Computing in float64 with float32 at rest, all is exact but for what is rounded at rest.
UP = {"param_dtype": FP64, "reduce_dtype": FP64}
# Layouts of the cases: with tp, and HSDP.
LAYOUTS = [(2, 2, 1), (1, 2, 2)]


def low_precision_grads(world, layout):
    """Kept as they were reduced, over two micro-batches with one all-reduce, and added to later ones."""
    twins = Twins(world, layout, **UP, keep_low_precision_grads=True)
    for batch in accumulate(twins.model, range(2)):
        assert twins.step(batch) < 1e-12
        if world is not None and batch == 0 and layout.replicate > 1:
            assert twins.model.head.weight.grad.dtype is FP64  # a sum that waits
    assert twins.of_gradients() < 1e-12
    twins.model.set_requires_gradient_sync(False)
    twins.step(2)  # what is there is folded into this rank's own sum
    twins.model.set_requires_gradient_sync(True)
    twins.step(3)
    assert twins.of_gradients() < 1e-12
    assert {(p.dtype, p.grad.dtype) for p in twins.model.parameters()} == {(FP32, FP64)}
    assert twins.of_weights(lr=0.1) < 1e-6  # float32 at rest
    weight = twins.model.head.weight
    weight.grad = weight.grad.float()  # for an optimizer that wants it so


def full_precision_in_eval(world, layout):
    """train -> eval -> train, also with groups that stay gathered; outputs and gradients in both."""
    twins = Twins(
        world,
        layout,
        own=FP64,
        param_dtype=FP32,
        buffer_dtype=FP32,
        full_precision_in_eval=True,
        options={"reshard_after_forward": False},
    )
    seen = twins.model.layers[1].seen

    def both(train):
        for model in (twins.model, *twins.plains):
            model.train(train)

    assert 1e-12 < twins.step(0, FP64) < 1e-5 and seen[-1] == (FP32, FP32, FP32, LONG)
    both(train=False)
    with torch.no_grad():
        for batch in range(2):
            assert twins.difference(twins.outputs(batch, FP64)) < 1e-12
    assert seen[-1] == (FP64, FP64, FP64, LONG)
    twins.zero_grad()
    assert twins.step(1, FP64) < 1e-12 and twins.of_gradients() < 1e-12  # reduced in it too
    both(train=True)
    twins.zero_grad()
    assert 1e-12 < twins.step(2, FP64) < 1e-5 and 1e-12 < twins.of_gradients() < 1e-5
    assert {b.precision.compute_dtype for b in get_unit(twins.model.layers[0]).group.buckets} == {
        FP32
    }
    # An evaluation between forward and backward; then both precisions in one backward.
    twins.zero_grad()
    trained = twins.outputs(3, FP64)
    with twins.paused():
        sum(e.square().mean() for e in twins.expected).div(len(twins.plains)).backward()
    both(train=False)
    with torch.no_grad():
        twins.model(twins.inputs(4, FP64))
    evaluated = twins.outputs(5, FP64)
    assert twins.difference(evaluated) < 1e-12
    with twins.paused():
        sum(e.square().mean() for e in twins.expected).div(len(twins.plains)).backward()
    both(train=True)
    (trained.square().mean() + evaluated.square().mean()).backward()
    assert twins.of_gradients() < 1e-5


def buffers(world, layout):
    """Cast while it runs, as they were at rest; what forward writes comes back."""
    twins = Twins(world, layout, lambda: Net(writes=True), **UP, buffer_dtype=FP64)
    model = twins.model
    before = dict(model.named_buffers())
    for batch in range(3):  # two forwards, a backward
        twins.outputs(batch)
        assert twins.step(batch + 10) < 1e-12
        assert twins.of_buffers() == 0
    assert all(dict(model.named_buffers())[name] is buffer for name, buffer in before.items())
    state = model.state_dict()
    assert {state[f"layers.0.{name}"].dtype for name in ("gain", "mean")} == {FP32}
    assert model.layers[0].seen[-1] == (FP64, FP64, FP64, LONG)
    # Loaded ones are seen, and a copy has buffers of its own.
    twin = copy.deepcopy(model)
    before = dict(twin.named_buffers())
    with twins.paused():
        for plain in twins.plains:
            plain.layers[0].gain.mul_(2)
    state["layers.0.gain"] = state["layers.0.gain"] * 2
    given = {key: torch.clone(value) if key in before else value for key, value in state.items()}
    model.load_state_dict(given, assign=True)
    assert twins.step(20) < 1e-12
    inputs = twins.inputs(20)
    assert twins.difference(twin(inputs)) > 1e-3
    twin.load_state_dict(given)
    assert all(buffer is before[name] for name, buffer in twin.named_buffers())
    # As what was assigned, it has been written to since.
    assert twins.difference(twin(inputs)) > 1e-3
    twin.load_state_dict(state)
    assert twins.difference(twin(inputs)) < 1e-12


def recomputed(world, layout):
    """Activation checkpointing sees the cast buffers and the dtypes of the first time."""
    options = {"activation_checkpointing": True}
    policy = {"buffer_dtype": FP64, "full_precision_in_eval": True}
    twins = Twins(world, layout, **UP, **policy, options=options, keep_low_precision_grads=True)
    assert twins.step(0) < 1e-12 and twins.of_gradients() < 1e-12
    assert twins.model.layers[0].seen == [(FP64, FP64, FP64, LONG)] * 2
    twins.model.eval()
    twins.model(twins.inputs(0)).sum().backward()
    assert twins.model.layers[0].seen[2:] == [(FP32, FP32, FP32, LONG)] * 2


def kept_modules(world, layout):
    """Norms in float64 within a float32 model."""
    keep = {"full_precision_modules": (nn.LayerNorm,)}
    twins = Twins(
        world, layout, own=FP64, compute=FP32, param_dtype=FP32, buffer_dtype=FP32, **keep
    )

    def by_hand(norm):
        norm.double()
        norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        norm.register_forward_hook(lambda _, args, output: output.float())

    for plain in twins.plains:
        for layer in plain.layers:
            by_hand(layer.norm)
    dtypes = []
    twins.model.layers[0].norm.register_forward_hook(
        lambda module, args, output: dtypes.append((module.weight.dtype, output.dtype))
    )
    with record_collectives(twins.mesh) as recorder:
        assert twins.step(0, FP64) < 1e-5
    assert twins.of_gradients() < 1e-5 and dtypes == [(FP64, FP32)]
    unit = "layers.0"
    gathers = [c.bytes for c in recorder.select("all_gather", "shard", unit)]
    norm = 2 * DIM * 8  # weight and bias, in their own dtype
    assert norm in gathers[: len(gathers) // 2]
    buckets = get_unit(twins.model.layers[0]).group.buckets
    reduced = FP64 if follows_grad_dtype else FP32  # without a reduce_dtype, from torch 2.15 on
    assert {(b.precision.compute_dtype, b.precision.reduce_dtype) for b in buckets} == {
        (FP32, reduced),
        (FP64, FP64),
    }


class Asks(Net):
    """Notes the dtype that the root's forward is given."""

    def forward(self, x):
        self.given = x.dtype
        return super().forward(x.double())


def root_inputs(world, layout):
    """The root's cast and the others', apart from each other."""
    twins = Twins(
        world, layout, Asks, **UP, cast_forward_inputs=False, cast_root_forward_inputs=True
    )
    assert twins.step(0) < 1e-12 and twins.model.given is FP64
    twins = Twins(world, layout, Asks, **UP, cast_root_forward_inputs=False)
    assert twins.step(0) < 1e-12 and twins.model.given is FP32
    assert twins.model.layers[0].seen[0][0] is FP64


CASES = [
    low_precision_grads,
    full_precision_in_eval,
    buffers,
    recomputed,
    kept_modules,
    root_inputs,
]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_simulated_ranks(case, sizes) -> None:
    with local_world(4) as world:
        case(world, MeshLayout(*sizes))
