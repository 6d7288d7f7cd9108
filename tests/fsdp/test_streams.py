"""Who waits for whom on an accelerator, shown without one: streams and events that take notes."""

import functools

import pytest
import torch
from _support.fsdp.noted_streams import Device, find, happens_before
from _support.fsdp.wrapped import cpu_mesh
from _support.models import Lm, lm_loss, tokens

from parallel3d import MeshLayout, MixedPrecisionPolicy, parallelize
from parallel3d.fsdp import bucket, collectives, reduction
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import assert_parity, fake_world
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel


def train_step(device: Device, policy: MixedPrecisionPolicy | None = None) -> list:
    with fake_world(0, 4):
        model = parallelize(Lm(layers=3), cpu_mesh(2, 2), mp_policy=policy)
        for layer in model.layers:
            layer.register_forward_pre_hook(
                lambda m, _: device.now.put(f"compute {unit_of(m).label}")
            )
        lm_loss(model, tokens(0)).backward()
        device.compute.put("optimizer")
        device.log.clear()
        lm_loss(model, tokens(0)).backward()
        device.compute.put("optimizer")
    return device.log


def test_three_streams_and_their_priorities(device: Device) -> None:
    train_step(device)
    assert device.priorities == [-1, -1, 0]  # the all-reduce must not delay the others


def test_each_kind_of_work_has_its_stream(device: Device) -> None:
    streams: dict[str, set[str]] = {}
    for what, stream, _ in train_step(device):
        streams.setdefault(what.split()[0], set()).add(stream)
    del streams["compute"], streams["optimizer"], streams["free_gathered"]
    assert streams == {
        "gather_buffers": {"gather"},
        "all_gather": {"gather"},
        "reduce_scatter": {"scatter"},
        "all_reduce": {"replicate"},
        "copy_out": {"compute"},
    }


def test_gather_follows_its_cast_and_precedes_use(device: Device) -> None:
    log = train_step(device)
    for unit in ("layers.0", "layers.1", "layers.2"):
        cast, gather = find(log, f"gather_buffers {unit}"), find(log, f"all_gather {unit}")
        copy, compute = find(log, f"copy_out {unit}"), find(log, f"compute {unit}")
        assert len(cast) == len(gather) == len(copy) == 2  # forward and backward
        for a, b, c in zip(cast, gather, copy, strict=True):
            assert happens_before(a, b) and happens_before(b, c)
        assert happens_before(copy[0], compute[0])


def test_next_gather_does_not_wait_for_this_compute(device: Device) -> None:
    """Prefetch: the next unit's all-gather is ordered before this unit's compute on no stream."""
    log = train_step(device)
    for this, following in (("layers.0", "layers.1"), ("layers.1", "layers.2")):
        compute = find(log, f"compute {this}")[0]
        gather = find(log, f"all_gather {following}")[0]
        assert not happens_before(compute, gather)
        assert log.index(gather) < log.index(compute)  # issued first


def test_backward_gathers_the_previous_block_before_this_ones_backward(device: Device) -> None:
    """In backward order, each issued before the backward of the block after it has freed anything."""
    log = [what for what, _, _ in train_step(device)]
    backward = log[max(i for i, what in enumerate(log) if what.startswith("compute")) :]
    order = [what for what in backward if what.startswith(("all_gather", "reduce_scatter"))]
    assert order == [
        "all_gather layers.2",
        "reduce_scatter norm",
        "all_gather layers.1",
        "reduce_scatter layers.2",
        "all_gather layers.0",
        "reduce_scatter layers.1",
        "reduce_scatter layers.0",
        "reduce_scatter embed",
    ]


def test_all_reduce_overlaps_the_next_reduce_scatter(device: Device) -> None:
    log = train_step(device)
    for this, following in (("layers.2", "layers.1"), ("layers.1", "layers.0")):
        (scatter,) = find(log, f"reduce_scatter {this}")
        (reduce,) = find(log, f"all_reduce {this}")
        (next_scatter,) = find(log, f"reduce_scatter {following}")
        assert happens_before(scatter, reduce)
        assert not happens_before(reduce, next_scatter)


def test_optimizer_waits_for_every_reduction(device: Device) -> None:
    log = train_step(device, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    (optimizer,) = find(log, "optimizer")
    reductions = [e for e in log if e[0].startswith(("all_reduce", "reduce_scatter"))]
    assert len(reductions) == 10  # five units
    assert all(happens_before(entry, optimizer) for entry in reductions)


def test_gather_waits_for_the_optimizer(device: Device) -> None:
    """The shards that a step's first gathers read are those the optimizer wrote."""
    train_step(device)
    optimizer = device.log[-1]
    device.log.clear()
    with fake_world(0, 4):
        model = parallelize(Lm(layers=1), cpu_mesh(2, 2))
        model(tokens(0))
    for cast in (e for e in device.log if e[0].startswith("gather_buffers")):
        assert happens_before(optimizer, cast)


def test_memory_is_not_reused_under_a_reader(device: Device) -> None:
    """A gather's buffer is freed after copy-out, and its stream, which owns it, waits for compute."""
    log = train_step(device)
    frees = [e for e in log if e[0].startswith("free_gathered")]
    casts = [e for e in log if e[0].startswith("gather_buffers")]
    assert len(frees) == len(casts)
    for free in frees:
        later = [c for c in casts if log.index(c) > log.index(free)]
        assert all(happens_before(free, cast) for cast in later)


def test_collectives_module_is_what_comm_uses() -> None:
    """``note`` wraps the name that a bucket gathers by: it must be the one of ``collectives``."""
    assert bucket.all_gather is collectives.all_gather


PLAN = {
    "embed": VocabParallel(output="sequence"),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": Colwise(input="sequence"),
    "layers.*.down": Rowwise(output="sequence"),
    "norm": SequenceParallel(),
    "head": Colwise(input="sequence", output="replicate"),
}


@pytest.mark.parametrize("inputs", [1, 2])
def test_sum_over_tp_holds_up_no_layer(device: Device, monkeypatch, inputs) -> None:
    """It is on the communicator of the layers' own collectives, which runs one after another. When it is
    issued the computation has waited for the reduce-scatter whose result it sums, but at the end."""
    reduce = reduction.sum_over_tp

    def noting(bucket, *args):
        device.compute.put(f"meanwhile {bucket.unit}")
        reduce(bucket, *args)

    monkeypatch.setattr(reduction, "sum_over_tp", noting)
    with fake_world(0, 8):
        model = parallelize(Lm(layers=3, vocab=20), cpu_mesh(2, 2, 2), PLAN)
        model.set_reduce_scatter_max_input_buffers(inputs)
        batch = tokens(0, length=4, vocab=20)
        lm_loss(model, batch).backward()
        device.log.clear()
        lm_loss(model, batch).backward()
        device.compute.put("optimizer")
    log, waited = device.log, []
    units = [what.split()[1] for what, _, _ in log if what.startswith("sum_over_tp")]
    assert units == ["norm", "layers.2", "layers.1", "layers.0"]
    for unit in units:
        (scatter,), (total,) = find(log, f"reduce_scatter {unit}"), find(log, f"sum_over_tp {unit}")
        (replicas,), (meanwhile,) = find(log, f"all_reduce {unit}"), find(log, f"meanwhile {unit}")
        assert happens_before(scatter, total) and happens_before(total, replicas)
        assert happens_before(replicas, find(log, "optimizer")[0])
        waited.append(happens_before(scatter, meanwhile))
    assert all(waited[:-inputs])


@pytest.mark.parametrize("layout", [MeshLayout(1, 2, 2), MeshLayout(2, 2, 2)], ids=str)
@pytest.mark.parametrize("defer", ["nothing", "sync"])
def test_sums_over_tp_on_streams_are_right(device: Device, layout, defer) -> None:
    result = assert_parity(
        functools.partial(Lm, vocab=20),
        functools.partial(tokens, length=4, vocab=20),
        layout,
        loss=lm_loss,
        tp_plan=PLAN,
        defer=defer,
        micro_batches=1 if defer == "nothing" else 3,
        steps=2,
        fp32=False,
    )
    assert result.grads["float64"] < 1e-12
    assert any(what.startswith("sum_over_tp") for what, _, _ in device.log)
