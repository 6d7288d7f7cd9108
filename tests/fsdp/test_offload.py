"""CPU offload: shards, gradients and optimizer state on the CPU, compute elsewhere.

There is no other device here, so "elsewhere" is a second name of the CPU (``cpu:0`` is not ``cpu``): the
engine then copies to and fro as it would.
"""

import pytest
import torch
from _support.fsdp.beside_plain import Net, Trial
from _support.fsdp.noted_streams import Device, find, happens_before, note
from _support.fsdp.wrapped import cpu_mesh, shard_blocks
from _support.models import Lm, lm_loss, tokens
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh
from parallel3d.fsdp import bucket as bucket_module
from parallel3d.fsdp.inspect import get_unit
from parallel3d.fsdp.options import memory
from parallel3d.testing import fake_world, local_world

parity = pytest.mark.parity
CPU, ELSEWHERE = torch.device("cpu"), torch.device("cpu", 0)
HSDP = MeshLayout(2, 2, 1)


@pytest.fixture
def elsewhere(monkeypatch):
    """Buckets with an offload policy live on ``cpu`` and compute on ``cpu:0``."""
    monkeypatch.setattr(
        memory.CpuOffload, "places", lambda self, given, mesh: (ELSEWHERE, CPU, False)
    )


def wrap(model, mesh, **options):
    return shard_blocks(model, mesh, offload_policy=CPUOffloadPolicy(), **options)


def buckets(model):
    return [b for m in [*model.layers, model] for b in get_unit(m).group.buckets]


@pytest.mark.parametrize("policy", [CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])
def test_where_things_are(policy):
    class Mesh:
        device_type = "cuda"

    cuda, meta = torch.device("cuda", 1), torch.device("meta")
    at_home = (CPU, policy.pin_memory)
    places = memory.CpuOffload(policy).places
    assert places(cuda, Mesh) == (cuda, *at_home)
    assert places(CPU, Mesh) == (torch.device("cuda"), *at_home)
    assert places(meta, Mesh) == (meta, meta, False)


@pytest.mark.parametrize("layout", [MeshLayout(1, 2, 1), MeshLayout(2, 2, 1)], ids=str)
def test_gradients_are_at_home_and_the_plain_models(elsewhere, layout):
    """Reduced, put off by both switches, and accumulated."""
    with local_world(layout.world_size) as world:
        trial = Trial(world, layout, wrap)
        assert all(bucket.reads_host for bucket in buckets(trial.model))
        trial.play("0 -sync 1 +sync -all 2 +all 3")
        trial.check([0, 1, 2, 3])


def test_one_rank_only(elsewhere):
    """Nothing to gather, but to fetch."""
    with local_world(1) as world:
        trial = Trial(world, MeshLayout(1, 1, 1), wrap)
        for bucket in buckets(trial.model):
            assert bucket.precision.unsharded is not bucket.flat
        trial.backward(0)
        trial.check([0])


class TestStreams:
    """Who waits for whom."""

    @pytest.fixture
    def device(self, monkeypatch, elsewhere) -> Device:
        device = Device()
        note(device, monkeypatch)
        return device

    def step(self, device: Device, layout: MeshLayout = HSDP):
        """The log of a second step; what the CPU does after backward is noted as ``optimizer``."""
        with fake_world(0, layout.world_size):
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            mesh = build_mesh(layout, device_type="cpu")
            model = wrap(Lm(layers=3), mesh, mp_policy=policy)
            for _ in range(2):
                device.log.clear()
                lm_loss(model, tokens(0)).backward()
                device.host.put("optimizer")
            return device.log, model

    def test_gradients_are_copied_home_by_the_stream_that_finished_them(self, device):
        log, _ = self.step(device)
        home = [entry for entry in log if entry[0].startswith("copy_to_host")]
        assert len(home) == 4 and {stream for _, stream, _ in home} == {"replicate"}
        reductions = [entry for entry in log if entry[0].startswith("all_reduce")]
        assert all(happens_before(a, b) for a, b in zip(reductions, home, strict=True))

    def test_without_a_replicate_axis_that_is_the_reduce_scatters(self, device):
        log, _ = self.step(device, MeshLayout(1, 4, 1))
        home = [entry for entry in log if entry[0].startswith("copy_to_host")]
        assert len(home) == 4 and {stream for _, stream, _ in home} == {"scatter"}

    def test_cpu_waits_for_every_copy_before_the_gradients_are_there(self, device, monkeypatch):
        places = []
        finish = bucket_module.BucketGradients.finish

        def noted(grads, job):
            device.host.put(f"grad {job.bucket.unit}")
            places.append(job.tensor.dtype)
            finish(grads, job)

        monkeypatch.setattr(bucket_module.BucketGradients, "finish", noted)
        log, model = self.step(device)
        (optimizer,) = find(log, "optimizer")
        homes = [entry for entry in log if entry[0].startswith("copy_to_host")]
        grads = [entry for entry in log if entry[0].startswith("grad")]
        assert len(homes) == len(grads) == 4
        assert all(happens_before(a, b) for a, b in zip(homes, grads, strict=True))
        assert all(happens_before(home, optimizer) for home in homes)
        assert set(places) == {torch.float32}  # cast before the copy
        assert all(p.grad is not None for p in model.parameters())

    def test_sums_that_wait_come_home_in_the_reduce_dtype(self, device, monkeypatch):
        """The parameters' own, which gradients have, would lose digits before the all-reduce."""
        seen = []
        finish = bucket_module.BucketGradients.finish
        monkeypatch.setattr(
            bucket_module.BucketGradients,
            "finish",
            lambda grads, job: (seen.append(job.tensor.dtype), finish(grads, job)),
        )
        with fake_world(0, 4):
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            mesh = build_mesh(HSDP, device_type="cpu")
            model = wrap(Lm(layers=1).bfloat16(), mesh, mp_policy=policy)
            for final in (False, True):
                model.set_requires_all_reduce(final)
                lm_loss(model, tokens(0)).backward()
                assert set(seen) == {torch.bfloat16 if final else torch.float32}
                seen.clear()

    def test_cpu_waits_until_the_shards_have_been_read(self, device):
        """The optimizer writes to the memory that the gathers read."""
        log, _ = self.step(device)
        (optimizer,) = find(log, "optimizer")
        gathers = [entry for entry in log if entry[0].startswith("all_gather")]
        assert len(gathers) == 7  # the root isn't resharded
        assert all(happens_before(gather, optimizer) for gather in gathers)

    def test_one_rank_fetches_beside_the_compute(self, device):
        log, _ = self.step(device, MeshLayout(1, 1, 1))
        fetches = [entry for entry in log if entry[0].startswith("gather_buffers")]
        assert len(fetches) == 7 and {stream for _, stream, _ in fetches} == {"fetch"}
        for fetch, use in zip(fetches, find_all(log, "copy_out"), strict=True):
            assert happens_before(fetch, use)

    @parity("behaviour: CPU offload with pinned memory")
    def test_what_is_at_home_is_pinned_and_copied_without_blocking(self, device, monkeypatch):
        """Shards and gradients, and nothing else; nobody but the CPU's own wait blocks it."""
        pinned, blocking = [], []

        def note_pins(name):
            make = getattr(torch, name)

            def wrapper(*args, pin_memory=False, **kwargs):
                tensor = make(*args, **kwargs)
                if pin_memory:
                    pinned.append(tensor)
                return tensor

            monkeypatch.setattr(torch, name, wrapper)

        note_pins("zeros")
        note_pins("empty")
        copy = memory.torch.Tensor.copy_

        def noted_copy(self, source, non_blocking=False):
            if any(self is each for each in pinned):
                blocking.append(not non_blocking)
            return copy(self, source, non_blocking)

        monkeypatch.setattr(torch.Tensor, "copy_", noted_copy)
        monkeypatch.setattr(
            memory.CpuOffload, "places", lambda self, given, mesh: (ELSEWHERE, CPU, True)
        )
        _, model = self.step(device)
        flats = [bucket.flat for bucket in buckets(model)]
        assert len(flats) == 4 and all(any(f is p for p in pinned) for f in flats)
        assert len(pinned) == 4 + 2 * 4 and blocking == [False] * 8  # shards; two steps' gradients


def find_all(log, prefix):
    return [entry for entry in log if entry[0].startswith(prefix)]


def test_conversions_stay_at_home(elsewhere):
    with local_world(2) as world:
        trial = Trial(world, MeshLayout(1, 2, 1), wrap)
        trial.model.float().double()
        assert all(b.flat.device == CPU and b.reads_host for b in buckets(trial.model))


def test_meta_parameters_come_home_when_they_are_made(elsewhere, monkeypatch):
    """``to_empty(device="cuda")`` of a meta model would be the same: the policy decides."""
    monkeypatch.setattr(
        memory.CpuOffload,
        "places",
        lambda self, given, mesh: (
            (given, given, False) if given.type == "meta" else (ELSEWHERE, CPU, False)
        ),
    )
    with fake_world(0, 2):
        with torch.device("meta"):
            model = Net()
        wrap(model, cpu_mesh())
        assert not any(bucket.reads_host for bucket in buckets(model))
        model.to_empty(device="cpu")
        assert all(bucket.reads_host for bucket in buckets(model))
        model(torch.randn(2, 6)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
