"""On an accelerator the waits of the stream that computes are what counts, by stand-ins for its streams."""

from typing import Any

import pytest

from parallel3d.observability import ExposedTime, StreamClock
from parallel3d.observability.exposed import StreamPatch


class Device:
    """What ``torch.cuda`` is to the clock; ``now`` is the moment that a stream has come to, in ms."""

    def __init__(self) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.enable_timing, self.at = enable_timing, -1.0

            def record(self, stream: Any) -> None:
                self.at = stream.now

            def elapsed_time(self, later: Any) -> float:
                assert self.enable_timing and later.enable_timing and later.at >= self.at >= 0
                return later.at - self.at

            def synchronize(self) -> None:
                device.synchronized = self

        class Stream:
            def __init__(self, name: str) -> None:
                self.name, self.now = name, 0.0

            def record_event(self, event: Any = None) -> Any:
                event = event if event is not None else Event()
                event.record(self)
                return event

            def wait_event(self, event: Any) -> None:
                self.now = max(self.now, event.at)

            def wait_stream(self, stream: Any) -> None:
                self.wait_event(stream.record_event())

        self.Event, self.Stream = Event, Stream
        self.synchronized: Any = None
        self.compute, self.gather, self.copy = Stream("compute"), Stream("gather"), Stream("copy")
        self.current = self.compute

    def current_stream(self) -> Any:
        return self.current


@pytest.fixture
def device() -> Any:
    return Device()


def test_waits_for_an_event_of_a_stream_that_communicates(device: Any) -> None:
    clock, patch = StreamClock(device), StreamPatch()
    before = dict(vars(device.Stream))
    clock.patches(patch)
    clock.begin()
    device.current = device.gather  # the engine issues an all-gather there
    started = clock.start()
    clock.issued("shard")
    clock.stop(started, "shard")
    device.gather.now = 7.0
    gathered = device.gather.record_event()
    device.copy.now = 50.0
    copied = device.copy.record_event()  # nothing was communicated there
    device.current = device.compute
    device.compute.now = 4.0
    device.compute.wait_event(gathered)  # 3 ms with nothing to do
    device.compute.now = 9.0
    device.compute.wait_event(gathered)  # over already
    device.gather.wait_event(copied)
    device.compute.wait_event(copied)  # a wait, but for no collective
    patch.undo()
    total, seconds = clock.take()
    assert seconds == {"shard": pytest.approx(0.003)} and total == pytest.approx(0.05)
    assert device.synchronized is not None
    assert dict(vars(device.Stream)) == before


def test_wait_stream_and_an_event_of_the_callers(device: Any) -> None:
    clock, patch = StreamClock(device), StreamPatch()
    clock.patches(patch)
    clock.begin()
    device.current = device.gather
    clock.issued("replicate")
    device.current = device.compute
    device.gather.now = 2.0
    device.compute.wait_stream(device.gather)
    mine = device.Event(enable_timing=True)
    assert device.gather.record_event(mine) is mine
    device.gather.now = 5.0
    device.compute.wait_event(device.gather.record_event())
    patch.undo()
    assert clock.take()[1] == {"replicate": pytest.approx(0.005)}


def test_collectives_on_the_stream_that_computes(device: Any) -> None:
    clock = StreamClock(device)
    clock.begin()
    started = clock.start()
    device.compute.now = 6.0  # a synchronous all-reduce of tensor parallelism
    clock.stop(started, "tp")
    assert clock.take() == (pytest.approx(0.006), {"tp": pytest.approx(0.006)})
    clock.begin()
    assert clock.take()[1] == {}


def test_an_error_is_not_held_up(device: Any) -> None:
    """After one the stream may wait for ever for ranks that don't come."""
    with pytest.raises(ZeroDivisionError), ExposedTime(clock=StreamClock(device)) as meter:
        1 / 0  # noqa: B018
    assert device.synchronized is None and meter.seconds == {}
