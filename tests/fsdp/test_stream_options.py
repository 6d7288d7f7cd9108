"""Who waits for whom on an accelerator, with the options about communication."""

import pytest
from _support.fsdp.noted_streams import Device, FakeEvent, find, happens_before, note
from _support.fsdp.wrapped import shard_blocks
from _support.models import Lm, lm_loss, tokens

from parallel3d import MeshLayout, build_mesh
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import get_unit, units_of
from parallel3d.testing import fake_world

parity = pytest.mark.parity
FSDP, HSDP = MeshLayout(1, 4, 1), MeshLayout(2, 2, 1)


def wrapped(layout: MeshLayout, wrap=shard_blocks) -> Lm:
    return wrap(Lm(layers=3), build_mesh(layout, device_type="cpu"))


def step(device: Device, model: Lm) -> list:
    """The log of one step."""
    device.log.clear()
    lm_loss(model, tokens(0)).backward()
    device.compute.put("optimizer")
    return list(device.log)


class TestInputBuffers:
    @parity("method: set_reduce_scatter_max_input_buffers")
    @pytest.mark.parametrize("limit", [1, 2])
    def test_compute_waits_for_the_oldest_only_if_there_are_more(self, device, limit):
        with fake_world(0, 4):
            model = wrapped(FSDP)
            model.set_reduce_scatter_max_input_buffers(limit)
            step(device, model)
            log = step(device, model)
        (scatter,) = find(log, "reduce_scatter layers.2")
        copy_out = find(log, "copy_out layers.0")[-1]  # in backward, after layers.1 is reduced
        assert log.index(find(log, "reduce_scatter layers.1")[0]) < log.index(copy_out)
        assert happens_before(scatter, copy_out) == (limit == 1)

    def test_inputs_are_let_go(self, device):
        with fake_world(0, 4):
            model = wrapped(FSDP)
            model.set_reduce_scatter_max_input_buffers(2)
            held = []
            comm = get_unit(model).ready_context().comm
            reduce = comm.reduce

            def noted(bucket, *, all_reduce):
                reduce(bucket, all_reduce=all_reduce)
                held.append(sum(flight.source is not None for flight in comm.in_flight))

            comm.reduce = noted
            step(device, model)
            assert held == [1, 2, 2, 2] and not comm.holding


class TestAllReduceHook:
    @pytest.mark.parametrize("own_stream", [False, True], ids=["", "own stream"])
    @parity("method: set_all_reduce_hook")
    def test_follows_the_reduce_scatter_and_precedes_the_optimizer(self, device, own_stream):
        stream = device.new_stream("users") if own_stream else None
        with fake_world(0, 4):
            model = wrapped(FSDP)
            for module in (*model.layers, model):
                module.set_all_reduce_hook(lambda _: device.now.put("hook"), stream=stream)
            step(device, model)
            log = step(device, model)
        hooks = find(log, "hook")
        scatters = [entry for entry in log if entry[0].startswith("reduce_scatter")]
        assert {name for _, name, _ in hooks} == {"users" if own_stream else "replicate"}
        assert all(happens_before(a, b) for a, b in zip(scatters, hooks, strict=True))
        assert not happens_before(hooks[0], scatters[1])  # the next one goes on beside it
        assert all(happens_before(hook, find(log, "optimizer")[0]) for hook in hooks)

    @parity("method: set_all_reduce_hook")
    def test_with_hsdp_it_follows_the_all_reduce(self, device):
        with fake_world(0, 4):
            model = wrapped(HSDP)
            for module in (*model.layers, model):
                module.set_all_reduce_hook(lambda _: device.now.put("hook"))
            step(device, model)
            log = step(device, model)
        reductions = [entry for entry in log if entry[0].startswith("all_reduce")]
        hooks = find(log, "hook")
        assert all(happens_before(a, b) for a, b in zip(reductions, hooks, strict=True))
        assert all(happens_before(hook, find(log, "optimizer")[0]) for hook in hooks)


@parity("method: set_post_optim_event")
def test_post_optim_event_is_what_the_first_gather_waits_for():
    """And not for what the current stream was given after the optimizer; once."""
    for given in (False, True):
        device = Device()
        with pytest.MonkeyPatch.context() as monkeypatch, fake_world(0, 4):
            note(device, monkeypatch)
            model = wrapped(FSDP)
            step(device, model)
            optimizer = device.log[-1]
            event: FakeEvent = device.compute.record_event()
            device.compute.put("unrelated")
            if given:
                model.set_post_optim_event(event)
            log = step(device, model)
            again = step(device, model)
        unrelated = ("unrelated", "compute", {"compute": optimizer[2]["compute"] + 1})
        first = next(entry for entry in log if entry[0].startswith("gather_buffers"))
        assert happens_before(optimizer, first)
        assert happens_before(unrelated, first) != given
        later = next(entry for entry in again if entry[0].startswith("gather_buffers"))
        assert happens_before(find(log, "optimizer")[0], later)


@parity("argument: reshard_after_forward=int")
def test_part_is_there_before_it_is_gathered_and_read_before_it_is_freed(device, monkeypatch):
    from parallel3d.fsdp.bucket import PostForwardGroup

    for name in ("keep", "drop"):
        original = getattr(PostForwardGroup, name)

        def noted(self, name=name, original=original):
            device.now.put(name)
            return original(self)

        monkeypatch.setattr(PostForwardGroup, name, noted)

    def wrap(model, mesh):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        return fully_shard(model, mesh=mesh)

    with fake_world(0, 4):
        model = wrapped(FSDP, wrap)
        step(device, model)
        log = step(device, model)
    keeps, drops = find(log, "keep"), find(log, "drop")
    gathers = [find(log, f"all_gather layers.{i}")[-1] for i in range(3)]
    assert {name for _, name, _ in keeps + drops} == {"compute"}
    assert all(happens_before(a, b) for a, b in zip(keeps, gathers, strict=True))
    assert all(happens_before(a, b) for a, b in zip(gathers, reversed(drops), strict=True))


class TestNobodyWaits:
    """Reductions in flight after a backward."""

    @parity("reliability: exceptions at every hook")
    def test_abandoned_after_an_exception(self, device):
        """Compute waits for all streams: what they still read and write is theirs until then."""
        with fake_world(0, 4):
            model = wrapped(HSDP)

            def hook(_):
                device.now.put("hook")
                raise KeyError("the user's own")

            model.layers[1].set_all_reduce_hook(hook)
            with pytest.raises(KeyError):
                step(device, model)
            log = list(device.log)
            model.reset_iter_state()
            device.compute.put("after")
            after = device.log[-1]
            kinds = ("all_gather", "reduce_scatter", "all_reduce", "hook")
            entries = [entry for entry in log if entry[0].startswith(kinds)]
            assert len(entries) > 8 and all(happens_before(entry, after) for entry in entries)
            comm = get_unit(model).context.comm
            assert not comm.in_flight and not comm.holding
            buckets = [b for unit in units_of(model, True) for b in unit.group.buckets]
            assert all(b.grads.in_flight is None and b.gathering is None for b in buckets)
