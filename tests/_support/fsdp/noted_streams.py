"""Streams and events that take notes: who waits for whom on an accelerator, shown without one."""

from parallel3d._util import dry_run
from parallel3d._util.streams import FakeEvent, FakeStream, Streams
from parallel3d.fsdp import bucket, collectives, reduction, wire
from parallel3d.fsdp.inspect import Bucket
from parallel3d.fsdp.options import hfsdp, memory

__all__ = ["Device", "FakeEvent", "FakeStream", "find", "happens_before", "note"]


class Device(Streams):
    """What ``torch.cuda`` is to the engine.

    ``log`` has what was put on streams: (what, name of the stream, its clock by names).
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str, dict[str, int]]] = []
        self.priorities: list[int] = []

    @property
    def now(self) -> FakeStream:
        return self.current_stream()

    def new_stream(self, name: str) -> FakeStream:
        same = sum(stream.name.split("#")[0] == name for stream in self.made.values())
        return super().new_stream(f"{name}#{same}" if same else name)

    def Stream(self, device: object = None, priority: int = 0, **more: object) -> FakeStream:
        self.priorities.append(priority)
        return self.new_stream(self.name_in_line(1))

    def on_put(self, stream: FakeStream, what: object) -> None:
        clock = {self.made[number].name: count for number, count in stream.clock.items()}
        self.log.append((str(what), stream.name, clock))


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
    for module in (bucket, hfsdp, collectives):
        noting(module, "all_gather", "all_gather")
    for reducer in (reduction.Reducer, wire.WireReducer):
        for name in ("reduce_scatter", "all_reduce"):
            noting(reducer, name, name)
    noting(reduction, "sum_over_tp", "sum_over_tp")
    noting(memory.CopyToHost, "finish", "copy_to_host")
    monkeypatch.setattr(dry_run, "played", device)


def find(log: list, what: str) -> list[tuple[str, str, dict[str, int]]]:
    return [entry for entry in log if entry[0] == what]


def happens_before(first: tuple, second: tuple) -> bool:
    """Whether the stream of ``second`` had waited for ``first``."""
    _, stream, clock = first
    return second[2].get(stream, 0) >= clock[stream]
