"""Streams and events that take notes: who waits for whom on an accelerator, shown without one."""

from contextlib import contextmanager

from parallel3d.fsdp import bucket, comm, reduction
from parallel3d.fsdp.inspect import Bucket
from parallel3d.fsdp.options import hfsdp, offload

__all__ = ["Device", "Event", "Stream", "find", "happens_before", "note"]


class Event:
    """A point in a stream."""

    def __init__(self, stream: "Stream") -> None:
        self.device, self.clock = stream.device, dict(stream.clock)

    def synchronize(self) -> None:
        """The CPU waits."""
        self.device.cpu.wait_event(self)

    def wait(self) -> None:
        """The current stream waits."""
        self.device.now.wait_event(self)


class Stream:
    """Takes notes of what is put on it; ``clock`` says what it has waited for."""

    def __init__(self, device: "Device", name: str) -> None:
        self.device, self.name = device, name
        self.count = 0
        self.clock: dict[str, int] = {}

    def put(self, what: str) -> None:
        self.count += 1
        self.clock[self.name] = self.count
        self.device.log.append((what, self.name, dict(self.clock)))

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        for name, count in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Device:
    """What ``torch.cuda`` is to the engine."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, dict[str, int]]] = []
        self.made = 0
        self.compute = Stream(self, "compute")
        self.cpu = Stream(self, "cpu")  # what the CPU does has seen, not what it puts on streams
        self.now = self.compute
        self.priorities: list[int] = []

    def Stream(self, priority: int = 0) -> Stream:
        names = ("copy_in", "gather", "scatter", "replicate", "over_tp")
        self.priorities.append(priority)
        self.made += 1
        return Stream(self, names[self.made - 1])

    def current_stream(self) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


def note(device: Device, monkeypatch) -> None:
    """The engine on noting streams: each step of a bucket's life is put on the current one."""

    def noting(owner, name, label):
        original = getattr(owner, name)

        def wrapper(*args, **kwargs):
            units = (getattr(getattr(arg, "bucket", arg), "unit", "") for arg in args)
            unit = kwargs.get("unit") or next(filter(None, units), "")
            device.now.put(f"{label} {unit}".strip())
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    for name in ("gather_buffers", "copy_out", "free_gathered"):
        noting(Bucket, name, name)
    for module in (bucket, hfsdp):
        noting(module, "all_gather", "all_gather")
    for name in ("reduce_scatter", "all_reduce"):
        noting(reduction.Reducer, name, name)
    noting(reduction, "sum_over_tp", "sum_over_tp")
    noting(offload.CopyToHost, "finish", "copy_to_host")
    monkeypatch.setattr(
        "parallel3d.fsdp.context.make_comm",
        lambda device_type: comm.StreamComm(device),
    )


def find(log: list, what: str) -> list[tuple[str, str, dict[str, int]]]:
    return [entry for entry in log if entry[0] == what]


def happens_before(first: tuple, second: tuple) -> bool:
    """Whether the stream of ``second`` had waited for ``first``."""
    _, stream, clock = first
    return second[2].get(stream, 0) >= clock[stream]
