"""When units are gathered ahead of their use, and how many at a time."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from _support.fsdp.noted_streams import Device, find, happens_before
from _support.fsdp.wrapped import held_bytes, shard_blocks
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch as TorchBackwardPrefetch

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp import BackwardPrefetch, reduction
from parallel3d.fsdp.collectives import ScatterWork
from parallel3d.fsdp.inspect import Bucket, get_unit, unit_of
from parallel3d.fsdp.reduction import BucketSettings, CpuComm, Reducer, Reduction, stages_of
from parallel3d.fsdp.schedule import Prefetch, PrefetchSettings
from parallel3d.testing import assert_parity, fake_world, record_collectives

PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
FSDP = MeshLayout(1, 4, 1)


def all_ahead(model: nn.Module) -> None:
    """Each block names all that come after it, in forward and in backward."""
    blocks = list(model.layers)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 :])
        block.set_modules_to_backward_prefetch(blocks[:index][::-1])


def scheduled(
    model: nn.Module,
    mesh,
    *,
    backward: BackwardPrefetch | None = PRE,
    forward: bool = True,
    limit: int | None = None,
    greedy: bool = False,
) -> nn.Module:
    """parallel3d's own TP where the mesh has a tp axis."""
    model = parallelize(model, mesh, LM_PLAN if mesh["tp"].size() > 1 else None)
    model.set_backward_prefetch(backward)
    model.set_forward_prefetch(forward)
    model.set_limit_all_gathers(limit)
    if greedy:
        all_ahead(model)
    return model


SCHEDULES = {
    "post": {"backward": POST},
    "none": {"backward": None, "forward": False},
    "limit": {"limit": 1, "greedy": True},
    "post, limit": {"backward": POST, "limit": 2, "greedy": True},
}


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (MeshLayout(2, 2, 1), "post"),
        (MeshLayout(2, 2, 1), "none"),
        (MeshLayout(2, 1, 2), "none"),
        (MeshLayout(2, 2, 1), "limit"),
        (MeshLayout(1, 2, 2), "post, limit"),
    ],
    ids=str,
)
def test_the_numbers_are_the_plain_models(layout, name):
    apply = functools.partial(scheduled, **SCHEDULES[name])
    build = functools.partial(Lm, layers=3)
    result = assert_parity(build, tokens, layout, loss=lm_loss, apply=apply, steps=2, fp32=False)
    assert result.grads["float64"] < 1e-12


# ---- what happens when ----


def noted(device: Device, layers: int = 3, **options) -> list:
    """The log of a second step, with the computation of each block."""
    with fake_world(0, 4):
        model = scheduled(Lm(layers=layers), build_mesh(FSDP, device_type="cpu"), **options)
        for layer in model.layers:
            layer.norm.register_forward_pre_hook(
                lambda m, _, layer=layer: device.now.put(f"compute {unit_of(layer).label}")
            )
            layer.down.register_full_backward_pre_hook(
                lambda m, _, layer=layer: device.now.put(f"backward {unit_of(layer).label}")
            )
        lm_loss(model, tokens(0)).backward()
        device.log.clear()
        lm_loss(model, tokens(0)).backward()
    return list(device.log)


def order(log: list, *kinds: str) -> list[str]:
    return [what for what, _, _ in log if what.split()[0] in kinds and "layers" in what]


BACKWARDS = {
    PRE: "all_gather 1, backward 2, reduce_scatter 2, all_gather 0, backward 1",
    POST: "backward 2, all_gather 1, reduce_scatter 2, backward 1, all_gather 0",
    None: "backward 2, reduce_scatter 2, all_gather 1, backward 1, reduce_scatter 1",
}


@pytest.mark.parametrize("backward", BACKWARDS, ids=str)
def test_backward_prefetch(device, backward):
    log = order(noted(device, backward=backward), "all_gather", "backward", "reduce_scatter")
    after_forward = log[3:]  # its three gathers
    first = after_forward.index("all_gather layers.2") + 1
    shown = ", ".join(after_forward[first : first + 5]).replace("layers.", "")
    assert shown == BACKWARDS[backward]


@pytest.mark.parametrize("forward", [True, False])
def test_forward_prefetch(device, forward):
    log = order(noted(device, forward=forward), "all_gather", "compute")[:6]
    gathers = [log.index(f"all_gather layers.{i}") for i in (1, 2)]
    computes = [log.index(f"compute layers.{i}") for i in (0, 1)]
    assert all((a < b) == forward for a, b in zip(gathers, computes, strict=True))


def test_post_is_on_demand_where_ranks_may_use_different_parameters(device):
    """There backwards end in another order on each rank, and gathers must not."""
    with fake_world(0, 4):
        model = scheduled(Lm(layers=2), build_mesh(FSDP, device_type="cpu"), backward=POST)
        model.set_reduce_scatter_unused_params(True)
        lm_loss(model, tokens(0)).backward()
    log = order(device.log, "all_gather", "reduce_scatter")
    assert log[-3:] == ["reduce_scatter layers.1", "all_gather layers.0", "reduce_scatter layers.0"]


# ---- the limit ----


def most_held(monkeypatch, layers: int = 6, **options) -> tuple[int, int]:
    """The most blocks that have gathered memory at once, in a second step's forward and backward."""
    most: list[int] = []
    with fake_world(0, 4):
        model = scheduled(Lm(layers=layers), build_mesh(FSDP, device_type="cpu"), **options)
        blocks = [get_unit(block).group.buckets[0] for block in model.layers]

        def counted(name: str) -> None:
            original = getattr(Bucket, name)

            def wrapper(self, *args):
                result = original(self, *args)
                held = [
                    b
                    for b in blocks
                    if held_bytes(b.precision.unsharded) or held_bytes(b.precision.gathered)
                ]
                most.append(len(held))
                return result

            monkeypatch.setattr(Bucket, name, wrapper)

        counted("gather_buffers")
        counted("copy_out")
        lm_loss(model, tokens(0)).backward()
        most.clear()
        loss = lm_loss(model, tokens(0))
        forward = max(most)
        most.clear()
        loss.backward()
    return forward, max(most)


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({}, (2, 2)),
        ({"backward": None, "forward": False}, (1, 1)),
        ({"backward": POST}, (2, 1)),
        ({"limit": None, "greedy": True}, (6, 6)),
        ({"limit": 3, "greedy": True}, (4, 4)),
        ({"limit": 1, "greedy": True}, (2, 2)),
    ],
    ids=str,
)
def test_memory(monkeypatch, options, held):
    """Of what is in use and ``limit`` more, however many the user names."""
    assert most_held(monkeypatch, **options) == held


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_limit_holds_although_the_cpu_runs_ahead(device, limit):
    """The memory of a gather is taken by a stream that has waited for the block ``limit + 1`` before it,
    and no longer than needed: not for the one after that."""
    log = noted(device, layers=5, limit=limit, greedy=True)
    casts = [find(log, f"gather_buffers layers.{i}") for i in range(5)]
    for direction in (0, 1):
        kind = ("compute", "backward")[direction]
        places = range(5) if direction == 0 else range(4, -1, -1)
        gathers = [casts[place][direction] for place in places]
        computed = [find(log, f"{kind} layers.{place}")[0] for place in places]
        for at, gather in enumerate(gathers):
            for before, compute in enumerate(computed):
                waits = limit is not None and at - before > limit
                assert happens_before(compute, gather) == (waits or False), (at, before)


def test_a_forward_that_breaks_off_leaves_nothing_put_off():
    with fake_world(0, 4):
        model = scheduled(Lm(layers=5), build_mesh(FSDP, device_type="cpu"), limit=1, greedy=True)

        def explode(*_: object) -> None:
            raise KeyError("the user's own")

        handle = model.layers[1].norm.register_forward_pre_hook(explode)
        with pytest.raises(KeyError):
            model(tokens(0))
        handle.remove()
        model.reset_iter_state()
        with record_collectives() as recorder:
            lm_loss(model, tokens(0)).backward()
        assert recorder.count("all_gather") == 2 * 5 + 2  # embedding, norm and head: once
        units = [call.unit for call in recorder.select("all_gather") if "layers" in call.unit]
        assert units == [f"layers.{i}" for i in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0)]


# ---- arguments ----


def test_the_usual_costs_nothing():
    with fake_world(0, 4):
        model = shard_blocks(Lm(), build_mesh(FSDP, device_type="cpu"))
        model.set_limit_all_gathers(2)
        model.set_backward_prefetch(None)
        model(tokens(0))
        context = get_unit(model).context
        assert context.schedule.settings == PrefetchSettings(True, Prefetch.NEVER, 2)
        model.set_limit_all_gathers(None)
        model.set_forward_prefetch(True)
        model.set_backward_prefetch(TorchBackwardPrefetch.BACKWARD_PRE)
        assert get_unit(model).prefetch is None
        assert context.schedule.settings == PrefetchSettings()


def test_what_is_refused():
    with fake_world(0, 4):
        model = shard_blocks(Lm(), build_mesh(FSDP, device_type="cpu"))
        for wrong in (0, -1, True, 1.5, "2"):
            with pytest.raises(Parallel3dError, match="at least 1"):
                model.set_limit_all_gathers(wrong)
        for wrong in ("BACKWARD_PRE", True, 1):
            with pytest.raises(Parallel3dError, match="BACKWARD_POST"):
                model.set_backward_prefetch(wrong)
        with pytest.raises(Parallel3dError, match="True or False"):
            model.set_forward_prefetch("yes")
        model.layers[0].set_limit_all_gathers(1)  # it may still become a root
        with pytest.raises(StateError, match="was given a schedule"):
            model(tokens(0))
        model.layers[0].set_limit_all_gathers(None)
        model(tokens(0))
        with pytest.raises(StateError, match="the outermost unit"):
            model.layers[0].set_limit_all_gathers(1)


def test_copies_have_a_schedule_of_their_own():
    with fake_world(0, 4):
        model = shard_blocks(Lm(), build_mesh(FSDP, device_type="cpu"))
        model.set_limit_all_gathers(2)
        other = copy.deepcopy(model)
        model.set_limit_all_gathers(3)
        assert get_unit(other).prefetch.limit == 2
        other(tokens(0))
        assert torch.is_tensor(other.head.weight)


def test_an_input_that_is_freed_early_issues_nothing_over_tp(monkeypatch) -> None:
    """Half-way is elsewhere on a tp rank with other sizes, where tp's own collectives come in between."""
    sums: list[object] = []
    monkeypatch.setattr(reduction, "sum_over_tp", lambda bucket, *_: sums.append(bucket))
    scatter = ScatterWork(None, torch.full((2,), 3.0))
    monkeypatch.setattr(Reducer, "reduce_scatter", lambda *_, unit, scale: scatter)
    bucket = SimpleNamespace(
        unit="",
        tp_group=object(),
        scatter_group=object(),
        settings=BucketSettings(),
        reducer=Reducer(),
    )
    job = Reduction(bucket, [torch.ones(4)], [0], 0.5)
    job.stages = stages_of(job, (), ())
    finished: list[Reduction] = []
    bucket.grads = SimpleNamespace(
        start=lambda all_reduce: job, finish=finished.append, in_flight=None
    )
    comm = CpuComm()
    comm.reduce(bucket, all_reduce=True)
    comm.free_inputs()
    assert job.inputs == [] and sums == []
    comm.finish()
    assert sums == [bucket] and finished == [job]
    torch.testing.assert_close(job.tensor, torch.full((2,), 1.5))
