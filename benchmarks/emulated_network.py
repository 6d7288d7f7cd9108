"""EmulatedNetwork: one process acts as one rank of many, and its collectives take the time of a network.

links = {"nic": Link(latency=20e-6, bandwidth=50e9), "nvlink": Link(latency=5e-6, bandwidth=450e9)}
axes = {"replicate": "nic", "shard": "nic", "tp": "nvlink"}
with EmulatedNetwork(world_size=64, links=links, axes=axes) as network:
    mesh = p3d.build_mesh(p3d.MeshLayout(2, 16, 2), device_type="cpu")
    ...  # any engine: this one, torch's fully_shard, DDP
    print(network)
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._torch.dtensor import axis_groups
from parallel3d._torch.fake import add_fake_backend, cuda_sleep, plain_group
from parallel3d._torch.groups import COLLECTIVES
from parallel3d._torch.v2_11 import fake_outputs_written
from parallel3d._util.recorder import op_of
from parallel3d._util.trace import issuing
from parallel3d._util.trees import tensors_in
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.mesh.axes import axis_named
from parallel3d.testing.worlds import check_no_group, check_rank, destroy_group

_SPIN = 2e-4  # seconds before the end of a wait in which time.sleep is not precise enough


@dataclass(slots=True)
class Transfer:
    """One collective on an emulated link. Times are seconds of the network's clock.

    Attributes:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ... as in ``Collective.op``.
        unit: the unit that the engine issued it for; ``""`` for other callers.
        axis: mesh axis of its group; ``"world"`` for the default group.
        link: name of the link.
        bytes: number of bytes that this rank sends through the link.
        issued: time of the call.
        started: time at which the link was free for it.
        ended: time at which it was complete.
        waited: seconds that callers spent blocked in ``wait``; 0 on a GPU, where ``wait`` does not block.
    """

    op: str
    unit: str
    axis: str
    link: str
    bytes: int
    issued: float
    started: float
    ended: float
    waited: float = 0.0
    events: Any = field(default=None, repr=False, compare=False)


class WallClock:
    """Real time. A caller that waits sleeps, which leaves the CPU to other threads."""

    def __init__(self) -> None:
        self.now = time.perf_counter
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def sleep_until(self, moment: float) -> None:
        """Sleeps, then spins shortly before ``moment``: a sleep alone ends 50 us late or more."""
        left = moment - self.now()
        if left > _SPIN:
            time.sleep(left - _SPIN)
        while self.now() < moment:
            pass

    def rewind_to(self, moment: float) -> None:
        """Does nothing: real time can't be set back."""

    def call_at(self, moment: float, function: Callable[[], None]) -> None:
        """Calls ``function`` at ``moment`` on another thread, or now if that is past."""
        delay = moment - self.now()
        if delay <= 0:
            function()
            return

        def wait() -> None:
            self._closed.wait(delay)
            function()

        thread = threading.Thread(target=wait, daemon=True, name="emulated network")
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def close(self) -> None:
        """Makes all pending calls now, and returns when they are done."""
        self._closed.set()
        for thread in self._threads:
            thread.join()


class VirtualClock:
    """A clock that a wait moves forward, without sleeping.

    ``VirtualClock()`` changes in no other way: compute takes the time by which the model advances it, and the
    times of a schedule are exact. ``VirtualClock(time.process_time)`` also counts this process's CPU time, so
    that times of real compute do not depend on other processes. A ``torch.futures.Future`` (DDP uses them) is
    complete at once.

    Args:
        runs_with: returns seconds; the clock advances as they do. By default they are constant.
    """

    def __init__(self, runs_with: Callable[[], float] = lambda: 0.0) -> None:
        self._runs_with = runs_with
        self._offset = -runs_with()

    def now(self) -> float:
        """Returns the seconds since the clock was made."""
        return self._runs_with() + self._offset

    def advance(self, seconds: float) -> None:
        """Adds ``seconds``, such as the time of a computation."""
        self._offset += seconds

    def sleep_until(self, moment: float) -> None:
        """Moves the clock forward to ``moment``, never back."""
        self._offset += max(0.0, moment - self.now())

    def rewind_to(self, moment: float) -> None:
        """Moves the clock back to ``moment``: what ran since then does not count."""
        self._offset -= max(0.0, self.now() - moment)

    def call_at(self, moment: float, function: Callable[[], None]) -> None:
        """Calls ``function`` now."""
        function()

    def close(self) -> None:
        """Does nothing."""


Clock = WallClock | VirtualClock

# A line carries the transfers of one link one after another: there is one per link for tensors on the CPU,
# and one per link and GPU.


class CpuLine:
    """Carries tensors on the CPU: a transfer starts when all before it have ended."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free = 0.0

    def values(self) -> AbstractContextManager[Any]:
        """Returns the context manager within which a collective writes its output; here it does nothing."""
        return nullcontext()

    def begin(self, transfer: Transfer, seconds: float) -> None:
        """Queues ``transfer``, which takes ``seconds``."""
        transfer.started = max(transfer.issued, self.free)
        transfer.ended = self.free = transfer.started + seconds

    def is_over(self, transfer: Transfer) -> bool:
        """Whether ``transfer`` is complete."""
        return self.clock.now() >= transfer.ended

    def wait(self, transfer: Transfer) -> None:
        """Blocks the caller until ``transfer`` is complete."""
        now = self.clock.now()
        if now < transfer.ended:
            self.clock.sleep_until(transfer.ended)
            transfer.waited += self.clock.now() - now


class CudaLine:
    """Carries tensors on a GPU: a stream sleeps for a transfer's time, and ``wait`` is a wait for its event.

    The stream itself keeps the transfers in order. Their times are read from events, which synchronizes, and
    converted to those of ``clock``. ``sleep`` occupies the current stream for a number of cycles. The methods
    are those of ``CpuLine``, and ``resolve``.
    """

    def __init__(
        self, clock: Clock, device: Any, sleep: Callable[[int], None] = cuda_sleep
    ) -> None:
        self.device, self.sleep = device, sleep
        self.stream = device.Stream()
        self.cycles_per_second = self._calibrate()
        self.zero = device.Event(enable_timing=True)
        device.synchronize()
        self.zero.record()
        self.zero_time = clock.now()

    def _calibrate(self) -> float:
        """Measures the second of two sleeps: the first also wakes the GPU up."""
        cycles = 20_000_000
        begin, end = (self.device.Event(enable_timing=True) for _ in range(2))
        self.sleep(cycles)
        begin.record()
        self.sleep(cycles)
        end.record()
        self.device.synchronize()
        return cycles / (begin.elapsed_time(end) * 1e-3)

    def values(self) -> AbstractContextManager[Any]:
        self.stream.wait_stream(self.device.current_stream())  # which has made the input
        return self.device.stream(self.stream)

    def begin(self, transfer: Transfer, seconds: float) -> None:
        start, end = (self.device.Event(enable_timing=True) for _ in range(2))
        with self.device.stream(self.stream):
            start.record()
            self.sleep(round(seconds * self.cycles_per_second))
            end.record()
        transfer.events = (start, end)

    def is_over(self, transfer: Transfer) -> bool:
        return bool(transfer.events[1].query())

    def wait(self, transfer: Transfer) -> None:
        """Lets the current stream wait, not the CPU."""
        self.device.current_stream().wait_event(transfer.events[1])

    def resolve(self, transfer: Transfer) -> None:
        """Fills in the times of ``transfer``."""
        self.device.synchronize()
        start, end = transfer.events
        transfer.started = self.zero_time + self.zero.elapsed_time(start) * 1e-3
        transfer.ended = self.zero_time + self.zero.elapsed_time(end) * 1e-3
        transfer.events = None


Line = CpuLine | CudaLine

# EmulatedGroup: a process group whose collectives run on torch's fake backend and take time on a link.

BACKEND = "emulated"
WORLD_AXIS = "world"
_CPU = torch.device("cpu")


class EmulatedWork(dist.Work):
    """The handle of transfers. It holds their tensors until ``wait``, as a real one must."""

    def __init__(
        self,
        line: Line,
        transfers: list[Transfer],
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self.line, self.transfers, self.outputs, self.inputs = line, transfers, outputs, inputs

    def wait(self, timeout: Any = None) -> bool:
        """Blocks the caller, or the current stream on CUDA, until the transfers are complete."""
        for transfer in self.transfers:
            self.line.wait(transfer)
        self.outputs, self.inputs = [], []
        return True

    def is_completed(self) -> bool:
        return all(self.line.is_over(transfer) for transfer in self.transfers)

    is_success = is_completed  # a transfer can't fail

    def get_future(self) -> Any:
        """Returns a future of the outputs, complete with the transfers; on CUDA at once, on their stream."""
        line = self.line
        if isinstance(line, CpuLine):
            future: Any = torch.futures.Future()
            outputs = self.outputs
            end = max((transfer.ended for transfer in self.transfers), default=0.0)
            line.clock.call_at(end, lambda: future.set_result(outputs))
            return future
        future = torch.futures.Future(devices=[line.device.current_device()])
        with line.device.stream(line.stream):  # the stream that a reader of the future waits for
            future.set_result(self.outputs)
        return future


class EmulatedGroup(ProcessGroup):
    """The process group of an ``EmulatedNetwork``. C++ code such as DDP's reducer can call it too.

    Each collective is also called on ``inner``, an ordinary group on torch's fake backend, so that values are
    the fake backend's and a dispatch mode sees the collective; not if the network writes no values.
    """

    def __init__(self, network: EmulatedNetwork, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        add_fake_backend(self)
        self.inner = plain_group(options.store, options.group_rank, options.group_size)
        self.network = network
        self.axis = ""
        self._coalesced: list[EmulatedWork] | None = None

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)  # type: ignore[arg-type]
        self.inner._set_group_name(name)  # type: ignore[arg-type]

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self.axis = description.removeprefix("mesh_") if description.startswith("mesh_") else ""
        if description in ("default_pg", "mesh_default"):
            self.axis = WORLD_AXIS
        if self.axis and self.size() > 1:
            self.network.check_axis(self.axis)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> EmulatedWork:
        works, self._coalesced = self._coalesced or [], None
        return EmulatedWork(
            works[0].line if works else self.network.line(self.axis, device),
            [transfer for work in works for transfer in work.transfers],
            [tensor for work in works for tensor in work.outputs],
            [tensor for work in works for tensor in work.inputs],
        )

    def run(self, method: str, op: str, *args: Any, **kwargs: Any) -> EmulatedWork:
        """Calls ``method`` of the inner group and sends the bytes of ``op`` through the link."""
        network, n = self.network, self.size()
        issued = network.clock.now()
        outputs, inputs = list(tensors_in(args[:1])), list(tensors_in(args[1:2]))
        tensors = outputs + inputs
        line = network.line(self.axis, tensors[0].device if tensors else _CPU)
        with line.values():  # also without values: a transfer starts after its input is made
            if network.values:
                getattr(self.inner, method)(*args, **kwargs)
        network.clock.rewind_to(issued)
        transfers = []
        if n > 1:
            size = max(sum(tensor.nbytes for tensor in side) for side in (outputs, inputs))
            share = _RING_FACTORS[op] * ((n - 1) / n) if op in _RING_FACTORS else 1
            transfers = [network.begin(line, op, self.axis, math.ceil(size * share), issued)]
        work = EmulatedWork(line, transfers, outputs, inputs)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


# A rank of n sends this factor times (n - 1) / n of the whole tensor in a ring, which sends least: the
# factors of "bus bandwidth" in NVIDIA's nccl-tests (doc/PERFORMANCE.md), after Patarasuk and Yuan, "Bandwidth
# optimal all-reduce algorithms for clusters of workstations", 2009. Broadcast and the others send all of it.
_RING_FACTORS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}


def _collective(method: str) -> Callable[..., EmulatedWork]:
    op = op_of(method)
    return lambda group, *args, **kwargs: group.run(method, op, *args, **kwargs)


for _method in COLLECTIVES:
    if hasattr(ProcessGroup, _method) and _method not in vars(EmulatedGroup):
        setattr(EmulatedGroup, _method, _collective(_method))


@dataclass(frozen=True, kw_only=True)
class Link:
    """Carries the collectives of one or several mesh axes, one after another.

    Attributes:
        latency: seconds that a collective takes beside the time for its bytes.
        bandwidth: bytes per second, one way.

    Raises:
        Parallel3dError: ``latency`` is below 0, or ``bandwidth`` is not above 0.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        if not self.latency >= 0 or self.latency == float("inf"):
            raise Parallel3dError(f"latency={self.latency!r}: give seconds, 0 or more")
        if not self.bandwidth > 0:
            raise Parallel3dError(f"bandwidth={self.bandwidth!r}: give bytes a second, more than 0")

    def seconds(self, size: int) -> float:
        """Returns the time of ``size`` bytes: latency + size / bandwidth."""
        return self.latency + size / self.bandwidth


class EmulatedNetwork:
    """This process becomes rank ``rank`` of ``world_size``; meshes made within have emulated groups.

    In a group of n ranks a collective sends what a ring algorithm sends (the factors of NVIDIA's nccl-tests,
    doc/PERFORMANCE.md): (n - 1) / n of the whole tensor in an all-gather, reduce-scatter or all-to-all, twice
    that in an all-reduce, all of it in a broadcast. It starts when all collectives before it on its link have
    ended, takes ``Link.seconds``, and uses no CPU for that time. ``wait`` sleeps until the end for tensors on
    the CPU; on a GPU a stream of the link is busy until then and ``wait`` lets the current stream wait.

    Values are those of torch's fake process group: finite, but not what ranks would exchange. A gather
    repeats this rank's part, a reduction leaves its input unchanged. They are written when the collective is
    called, which takes real time of the CPU (or of the link's stream, one copy for each rank and tensor).
    Make transfers long compared with it; or use a ``VirtualClock``, which does not count it; or give
    ``values=False``.

    Args:
        world_size: number of ranks.
        rank: the rank that this process becomes.
        links: name -> link.
        axes: mesh axis -> name of its link; all axes longer than 1 must be listed. Without it all axes are on
            the first link. ``shard_cp``, shard and cp as one, is on shard's unless listed. A mesh of one axis
            as long as the world uses torch's default group, which does not know its axis: it is ``"world"``,
            on the first link unless ``axes`` lists it, until ``attach``.
        clock: ``VirtualClock()`` for times that do not depend on the machine; by default real time.
        values: whether collectives write values. Without, they only take time: an output stays as it was
            allocated, which may be anything, and neither a dispatch mode nor ``record_collectives`` sees the
            calls. For measurements of time and memory. It may be changed between steps.

    Attributes:
        timeline: the transfers so far, in the order they were issued.

    Raises:
        Parallel3dError: there are no links, or an axis has an unknown link or none.
        MeshError: ``rank`` or ``world_size`` is out of range.
        StateError: on entering, a default process group is already initialised.
    """

    def __init__(
        self,
        *,
        world_size: int,
        links: Mapping[str, Link],
        axes: Mapping[str, str] | None = None,
        rank: int = 0,
        clock: VirtualClock | None = None,
        values: bool = True,
    ) -> None:
        check_rank(rank, world_size)
        if not links:
            raise Parallel3dError("links: give at least one, such as {'nic': Link(bandwidth=50e9)}")
        for axis, name in (axes or {}).items():
            if name not in links:
                raise Parallel3dError(
                    f"axes: {axis!r} is on link {name!r}, but the links are {_quoted(links)}"
                )
        self.rank, self.world_size = rank, world_size
        self.links, self.axes = dict(links), axes if axes is None else dict(axes)
        self.clock: Clock = clock or WallClock()
        self.values = values
        self._lines: dict[tuple[str, torch.device], Line] = {}
        self._timeline: list[Transfer] = []

    def __enter__(self) -> EmulatedNetwork:
        check_no_group("EmulatedNetwork")
        if not hasattr(dist.Backend, BACKEND.upper()):
            dist.Backend.register_backend(
                BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"]
            )
        with ExitStack() as stack:
            _entered.append(self)
            stack.callback(_entered.pop)
            stack.enter_context(fake_outputs_written())
            stack.callback(setattr, sys, "excepthook", sys.excepthook)
            dist.init_process_group(
                BACKEND, rank=self.rank, world_size=self.world_size, store=dist.HashStore()
            )
            stack.callback(destroy_group)
            stack.callback(self.clock.close)
            self._undo = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def attach(self, mesh: dist.DeviceMesh) -> None:
        """Assigns the default group to the axis of ``mesh`` that uses it, and so to that axis's link."""
        for axis, group in axis_groups(mesh).items():
            if isinstance(group, EmulatedGroup) and group.axis == WORLD_AXIS and group.size() > 1:
                self.check_axis(axis)
                group.axis = axis

    @property
    def timeline(self) -> list[Transfer]:
        """See the class. On a GPU, reading it synchronizes."""
        for transfer in self._timeline:
            if transfer.events is not None:
                line = self._lines[transfer.link, transfer.events[0].device]
                assert isinstance(line, CudaLine)
                line.resolve(transfer)
        return self._timeline

    def clear(self) -> None:
        """Empties the timeline. Transfers that have not ended go on."""
        self._timeline = []

    def busy(self, link: str) -> float:
        """Returns the sum of the seconds that the transfers on ``link`` take.

        Raises:
            Parallel3dError: there is no such link.
        """
        if link not in self.links:
            raise Parallel3dError(f"link {link!r}: the links are {_quoted(self.links)}")
        return sum(t.ended - t.started for t in self.timeline if t.link == link)

    def __str__(self) -> str:
        head = f"{'issued':>10} {'started':>10} {'ended':>10} {'waited':>8}  ms  link axis op bytes unit"
        zero = self.timeline[0].issued if self.timeline else 0.0
        rows = []
        for t in self.timeline:
            times = [(moment - zero) * 1e3 for moment in (t.issued, t.started, t.ended)]
            rows.append(
                " ".join(f"{ms:10.3f}" for ms in times)
                + f" {t.waited * 1e3:8.3f}  {t.link} {t.axis or '-'} {t.op} {t.bytes:,} {t.unit or '-'}"
            )
        return "\n".join([head, *rows])

    # -- called by the groups --------------------------------------------------------------------------

    def check_axis(self, axis: str) -> None:
        """Raises Parallel3dError if mesh axis ``axis`` is on no link."""
        if self.axes is not None and self._listed(axis) is None and axis != WORLD_AXIS:
            raise Parallel3dError(
                f"mesh axis {axis!r} is on no link: axes names {_quoted(self.axes) or 'none'}; "
                f"add {axis!r} with one of the links {_quoted(self.links)}"
            )

    def link_of(self, axis: str) -> str:
        """Returns the name of the link of ``axis``."""
        return self._listed(axis) or next(iter(self.links))

    def _listed(self, axis: str) -> str | None:
        known = axis_named(axis)  # shard_cp is shard's
        names = (axis,) if known is None else (axis, known.name)
        return (
            next((self.axes[name] for name in names if name in self.axes), None)
            if self.axes
            else None
        )

    def line(self, axis: str, device: torch.device) -> Line:
        """Returns the line that carries tensors of ``device`` for groups of ``axis``."""
        on_gpu = device.type == "cuda"
        key = (self.link_of(axis), device if on_gpu else _CPU)
        if key not in self._lines:
            line = CudaLine(self.clock, torch.cuda) if on_gpu else CpuLine(self.clock)
            self._lines[key] = line
        return self._lines[key]

    def begin(self, line: Line, op: str, axis: str, size: int, issued: float) -> Transfer:
        """Queues ``size`` bytes on ``line``."""
        link = self.link_of(axis)
        transfer = Transfer(op, issuing.unit, axis, link, size, issued, issued, issued)
        line.begin(transfer, self.links[link].seconds(size))
        self._timeline.append(transfer)
        return transfer


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


_entered: list[EmulatedNetwork] = []  # at most one: there is one default group


def _make_group(options: Any, _: Any) -> EmulatedGroup:
    if not _entered:
        raise MeshError(f"backend {BACKEND!r} is that of EmulatedNetwork: enter one")
    return EmulatedGroup(_entered[-1], options)
