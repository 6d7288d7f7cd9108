"""EmulatedNetwork: one process as one rank of many, whose collectives take the time a network would.

links = {"nic": Link(latency=20e-6, bandwidth=50e9), "nvlink": Link(latency=5e-6, bandwidth=450e9)}
axes = {"replicate": "nic", "shard": "nic", "tp": "nvlink"}
with EmulatedNetwork(world_size=64, links=links, axes=axes) as network:
    mesh = p3d.build_mesh(p3d.MeshLayout(2, 16, 2), device_type="cpu")
    ...  # any engine: ours, torch's fully_shard, DDP
    print(network)
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._torch.fake import add_fake_backend, cuda_sleep, fake_outputs_written, plain_group
from parallel3d._util.trace import issuing
from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.testing.worlds import check_no_group, check_rank, destroy_group

# Lines: what a transfer occupies for its time. One per link on the CPU, one per link and GPU
# beside it.

_SPIN = 2e-4  # seconds before the end in which sleeping is not precise enough


@dataclass(slots=True)
class Transfer:
    """One collective on an emulated link. Times are seconds of the network's clock.

    Attributes:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ... as ``Collective.op`` has it.
        unit: the unit our engine issued it for; ``""`` elsewhere.
        axis: mesh axis of its group; ``"world"`` for the default group.
        link: name of the link.
        bytes: what this rank sends through the link.
        issued: when it was called.
        started: when the link was free for it.
        ended: when it had gone through.
        waited: seconds that callers have spent in ``wait``; on a GPU, where callers don't, 0.
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
    """Real time. Whoever waits sleeps, and so leaves the CPU to others."""

    def __init__(self) -> None:
        self.now = time.perf_counter
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._open = True

    def sleep_until(self, moment: float) -> None:
        """Sleeps, and spins for the last moment: a sleep alone wakes 50 us late and more."""
        left = moment - self.now()
        if left > _SPIN:
            time.sleep(left - _SPIN)
        while self.now() < moment:
            pass

    def rewind_to(self, moment: float) -> None:
        """Real time doesn't."""

    def call_at(self, moment: float, what: Callable[[], None]) -> None:
        """Calls ``what`` on a thread of the clock's, which sleeps in between."""
        if moment <= self.now():
            what()
            return
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._numbers), what))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="emulated network"
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Calls all that is due at once."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._open and (not self._due or self._due[0][0] > self.now()):
                    self._changed.wait(self._due[0][0] - self.now() if self._due else None)
                if not self._due:
                    return
                _, _, what = heapq.heappop(self._due)
            what()


class VirtualClock:
    """A clock that waiting moves on at once: nobody sleeps.

    ``VirtualClock()`` stands still otherwise; compute takes what the model advances it by, and a schedule's
    figures are exact. ``VirtualClock(time.process_time)`` goes on with this process's CPU time: figures of
    real compute that don't depend on what else runs on the machine. A ``torch.futures.Future`` (DDP's) is
    complete at once.

    Args:
        runs_with: what it goes on with, in seconds; by default nothing.
    """

    def __init__(self, runs_with: Callable[[], float] = lambda: 0.0) -> None:
        self._runs_with = runs_with
        self._ahead = -runs_with()

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._runs_with() + self._ahead

    def advance(self, seconds: float) -> None:
        """What has computed for ``seconds``."""
        self._ahead += seconds

    def sleep_until(self, moment: float) -> None:
        """Moves the clock on, never back."""
        self._ahead += max(0.0, moment - self.now())

    def rewind_to(self, moment: float) -> None:
        """What was computed since ``moment`` was not this process's work."""
        self._ahead -= max(0.0, self.now() - moment)

    def call_at(self, moment: float, what: Callable[[], None]) -> None:
        """Calls it now."""
        what()

    def close(self) -> None:
        """Nothing is left to do."""


class CpuLine:
    """First come, first served: a transfer starts when all before it have ended."""

    def __init__(self, clock: WallClock | VirtualClock) -> None:
        self.clock = clock
        self.free = 0.0

    def values(self) -> AbstractContextManager[Any]:
        """Where the values are written."""
        return nullcontext()

    def begin(self, transfer: Transfer, seconds: float) -> None:
        """Puts ``transfer`` behind what is under way."""
        transfer.started = max(transfer.issued, self.free)
        transfer.ended = self.free = transfer.started + seconds

    def is_over(self, transfer: Transfer) -> bool:
        """Whether it has gone through by now."""
        return self.clock.now() >= transfer.ended

    def wait(self, transfer: Transfer) -> None:
        """Blocks the caller until it has."""
        now = self.clock.now()
        if now < transfer.ended:
            self.clock.sleep_until(transfer.ended)
            transfer.waited += self.clock.now() - now

    def resolve(self, transfer: Transfer) -> None:
        """Fills in times known by the device only."""


class CudaLine:
    """A stream that sleeps for a transfer's time: other streams go on; ``wait`` lets the current one wait.

    That the line is first come, first served is the stream's own doing. Times come from events, so reading
    them synchronizes.

    Args:
        clock: for the time at which the GPU's was taken.
        device: ``torch.cuda``, or what stands for it in a test.
        sleep: occupies the current stream for a number of cycles.
    """

    def __init__(
        self,
        clock: WallClock | VirtualClock,
        device: Any,
        sleep: Callable[[int], None] = cuda_sleep,
    ) -> None:
        self.device, self.sleep = device, sleep
        self.stream = device.Stream()
        self.cycles_per_second = self._calibrate()
        self.zero = device.Event(enable_timing=True)
        device.synchronize()
        self.zero.record()
        self.zero_time = clock.now()

    def _calibrate(self, cycles: int = 20_000_000) -> float:
        """By the second of two sleeps: the first also wakes the GPU up."""
        begin, end = (self.device.Event(enable_timing=True) for _ in range(2))
        self.sleep(cycles)
        begin.record()
        self.sleep(cycles)
        end.record()
        self.device.synchronize()
        return cycles / (begin.elapsed_time(end) * 1e-3)

    def values(self) -> AbstractContextManager[Any]:
        """See ``CpuLine``. The line waits for what has made the input."""
        self.stream.wait_stream(self.device.current_stream())
        return self.device.stream(self.stream)

    def begin(self, transfer: Transfer, seconds: float) -> None:
        """See ``CpuLine``."""
        start, end = (self.device.Event(enable_timing=True) for _ in range(2))
        with self.device.stream(self.stream):
            start.record()
            self.sleep(round(seconds * self.cycles_per_second))
            end.record()
        transfer.events = (start, end)

    def is_over(self, transfer: Transfer) -> bool:
        """See ``CpuLine``."""
        return bool(transfer.events[1].query())

    def wait(self, transfer: Transfer) -> None:
        """Lets the current stream wait; the CPU goes on."""
        self.device.current_stream().wait_event(transfer.events[1])

    def resolve(self, transfer: Transfer) -> None:
        """See ``CpuLine``."""
        self.device.synchronize()
        start, end = transfer.events
        transfer.started = self.zero_time + self.zero.elapsed_time(start) * 1e-3
        transfer.ended = self.zero_time + self.zero.elapsed_time(end) * 1e-3
        transfer.events = None


def line_for(device: torch.device, clock: WallClock | VirtualClock) -> CpuLine | CudaLine:
    """The kind of line that carries tensors of ``device``."""
    return CudaLine(clock, torch.cuda) if device.type == "cuda" else CpuLine(clock)


# EmulatedGroup: a process group whose collectives are torch's fake ones, and take their time on a
# link.

BACKEND = "emulated"
WORLD_AXIS = "world"
_CPU_DEVICE = torch.device("cpu")


class EmulatedWork(dist.Work):
    """A transfer under way. Holds its tensors until it is waited for, as a real one must."""

    def __init__(
        self,
        line: CpuLine | CudaLine,
        transfers: list[Transfer],
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self.line, self.transfers, self.outputs, self.inputs = line, transfers, outputs, inputs

    def wait(self, timeout: Any = None) -> bool:
        """Blocks the caller, or with CUDA the current stream, until it is over."""
        for transfer in self.transfers:
            self.line.wait(transfer)
        self.outputs, self.inputs = [], []
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return all(self.line.is_over(transfer) for transfer in self.transfers)

    def is_success(self) -> bool:
        """Whether it is over: nothing fails here."""
        return self.is_completed()

    def get_future(self) -> Any:
        """Complete, with the tensors, when the transfer is over (with CUDA: at once, on its stream)."""
        line = self.line
        if isinstance(line, CpuLine):
            future: Any = torch.futures.Future()
            outputs = self.outputs
            end = max((transfer.ended for transfer in self.transfers), default=0.0)
            line.clock.call_at(end, lambda: future.set_result(outputs))
            return future
        future = torch.futures.Future(devices=[line.device.current_device()])
        with line.device.stream(line.stream):  # whose end the reader's stream waits for
            future.set_result(self.outputs)
        return future


class EmulatedGroup(ProcessGroup):
    """See the module's docstring. A subclass of ``ProcessGroup``, so that C++ (DDP's reducer) calls it too.

    What is called here is called on ``inner``, a group that only dispatches: so values are those of torch's
    fake group, and whatever looks at collectives as torch dispatches them sees these.
    """

    def __init__(self, network: EmulatedNetwork, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        add_fake_backend(self)
        self.inner = plain_group(options.store, options.group_rank, options.group_size)
        self.network = network
        self.axis = ""
        self._coalesced: list[EmulatedWork] | None = None

    def getBackendName(self) -> str:
        """What torch calls it."""
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
        line = works[0].line if works else self.network.line(self.axis, device)
        whole = EmulatedWork(line, [], [], [])
        for work in works:
            whole.transfers += work.transfers
            whole.outputs += work.outputs
            whole.inputs += work.inputs
        return whole

    def run(self, name: str, op: str, args: tuple, kwargs: dict) -> EmulatedWork:
        """Calls ``name`` on the inner group and lets what it sends go through the link."""
        network, n = self.network, self.size()
        issued = network.clock.now()
        outputs, inputs = list(_tensors(args[:1])), list(_tensors(args[1:2]))
        held = outputs + inputs
        line = network.line(self.axis, held[0].device if held else _CPU_DEVICE)
        with line.values():
            getattr(self.inner, name)(*args, **kwargs)
        network.clock.rewind_to(issued)
        transfers = []
        if n > 1:
            size = max(_bytes(outputs), _bytes(inputs))
            share = _SHARE[op](n) if op in _SHARE else 1
            transfers = [network.begin(line, op, self.axis, math.ceil(size * share), issued)]
        work = EmulatedWork(line, transfers, outputs, inputs)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def _rest(n: int) -> float:
    return (n - 1) / n


# Of the whole tensor, the share that a rank of n sends in the algorithms that send least, rings: the factors
# of "bus bandwidth" in NVIDIA's nccl-tests (doc/PERFORMANCE.md), after Patarasuk and Yuan, "Bandwidth
# optimal all-reduce algorithms for clusters of workstations", 2009. Broadcast and the others: all of it.
_SHARE: dict[str, Callable[[int], float]] = {
    "all_gather": _rest,
    "reduce_scatter": _rest,
    "all_to_all": _rest,
    "all_reduce": lambda n: 2 * _rest(n),
}

# Methods of ProcessGroup, by torch's names of 2.11 and of 2.13.
_CALLS = {
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "barrier": "barrier",
}


def _method(name: str, op: str) -> Callable[..., EmulatedWork]:
    def call(self: EmulatedGroup, *args: Any, **kwargs: Any) -> EmulatedWork:
        return self.run(name, op, args, kwargs)

    return call


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    """The tensors in ``values`` and in the lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


for _name, _op in _CALLS.items():
    if hasattr(ProcessGroup, _name):
        setattr(EmulatedGroup, _name, _method(_name, _op))


@dataclass(frozen=True, kw_only=True)
class Link:
    """What collectives of one or several mesh axes go through, one after another.

    Attributes:
        latency: seconds that a collective takes beside its bytes.
        bandwidth: bytes a second, one way.

    Raises:
        Parallel3dError: a latency below 0, or a bandwidth not above 0.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        if not self.latency >= 0 or self.latency == float("inf"):
            raise Parallel3dError(f"latency={self.latency!r}: give seconds, 0 or more")
        if not self.bandwidth > 0:
            raise Parallel3dError(f"bandwidth={self.bandwidth!r}: give bytes a second, more than 0")

    def seconds(self, size: int) -> float:
        """What ``size`` bytes take: latency + size / bandwidth."""
        return self.latency + size / self.bandwidth


class EmulatedNetwork:
    """This process becomes rank ``rank`` of ``world_size``; meshes made within have their groups on it.

    A collective of a group of n ranks sends what a ring algorithm sends (the factors of NVIDIA's nccl-tests,
    doc/PERFORMANCE.md): (n - 1) / n of the whole tensor in an all-gather, reduce-scatter or all-to-all, twice
    that in an all-reduce, all of it in a broadcast. It starts when those before it on its link have ended and
    takes ``Link.seconds``, during which no CPU works for it. Where the data are on the CPU, ``wait`` sleeps
    until the end; where they are on a GPU, a stream of the link's is busy for that time and ``wait`` lets the
    current stream wait. Synchronous calls wait for themselves.

    Values are those of torch's fake process group: finite, but not what ranks would exchange. A gather
    repeats this rank's part, a reduction leaves it as it is. They are written when the call is made; in real
    time that takes the CPU's (or the link's stream's): let transfers be long beside it. A ``VirtualClock``
    does not count it.

    Args:
        world_size: number of ranks.
        rank: which of them this process is.
        links: name -> link.
        axes: mesh axis -> name of its link; all axes longer than 1 must be there. Without it all are on the
            first link. A mesh of one axis as long as the world uses torch's default group, which no axis
            names: it is ``"world"`` here, and on the first link unless named, until ``attach`` tells.
        clock: ``VirtualClock()``, for figures that don't depend on the machine; by default real time.

    Attributes:
        timeline: the transfers so far, in the order they were issued.

    Raises:
        Parallel3dError: no links, an unknown link, a mesh axis without one.
        MeshError: ``rank`` or ``world_size`` out of range.
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
    ) -> None:
        check_rank(rank, world_size)
        if not links:
            raise Parallel3dError("links: give at least one, such as {'nic': Link(bandwidth=50e9)}")
        for axis, name in (axes or {}).items():
            if name not in links:
                raise Parallel3dError(
                    f"axes: {axis!r} is on link {name!r}, but the links are {', '.join(map(repr, links))}"
                )
        self.rank, self.world_size = rank, world_size
        self.links, self.axes = dict(links), axes if axes is None else dict(axes)
        self.clock: WallClock | VirtualClock = clock or WallClock()
        self._lines: dict[tuple[str, torch.device], CpuLine | CudaLine] = {}
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
        """Names the default group after the axis of ``mesh`` that uses it, and puts it on that one's link."""
        for axis in mesh.mesh_dim_names or ():
            group = mesh.get_group(axis)
            if isinstance(group, EmulatedGroup) and group.axis == WORLD_AXIS and group.size() > 1:
                self.check_axis(axis)
                group.axis = axis

    @property
    def timeline(self) -> list[Transfer]:
        """See the class. On a GPU, reading it synchronizes."""
        for transfer in self._timeline:
            if transfer.events is not None:
                device, link = transfer.events[0].device, transfer.link
                self._lines[link, device].resolve(transfer)
        return self._timeline

    def clear(self) -> None:
        """Forgets the transfers so far; those under way go on."""
        self._timeline = []

    def busy(self, link: str) -> float:
        """Seconds that the transfers on ``link`` take in sum.

        Raises:
            Parallel3dError: there is no such link.
        """
        if link not in self.links:
            raise Parallel3dError(
                f"link {link!r}: the links are {', '.join(map(repr, self.links))}"
            )
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

    # -- what the groups ask ---------------------------------------------------------------------------

    def check_axis(self, axis: str) -> None:
        """Raises Parallel3dError if mesh axis ``axis`` is on no link."""
        if self.axes is not None and axis not in self.axes and axis != WORLD_AXIS:
            raise Parallel3dError(
                f"mesh axis {axis!r} is on no link: axes names {', '.join(map(repr, self.axes)) or 'none'}; "
                f"add {axis!r} with one of the links {', '.join(map(repr, self.links))}"
            )

    def link_of(self, axis: str) -> str:
        """The name of the link that groups of ``axis`` use."""
        return (self.axes or {}).get(axis) or next(iter(self.links))

    def line(self, axis: str, device: torch.device) -> CpuLine | CudaLine:
        """What groups of ``axis`` occupy for tensors of ``device``."""
        if device.type != "cuda":
            device = _CPU
        key = (self.link_of(axis), device)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = line_for(device, self.clock)
        return line

    def begin(
        self, line: CpuLine | CudaLine, op: str, axis: str, size: int, issued: float
    ) -> Transfer:
        """Puts ``size`` bytes on ``line``."""
        link = self.link_of(axis)
        transfer = Transfer(op, issuing.unit, axis, link, size, issued, issued, issued)
        line.begin(transfer, self.links[link].seconds(size))
        self._timeline.append(transfer)
        return transfer


_CPU = torch.device("cpu")
_entered: list[EmulatedNetwork] = []  # at most one: there is one default group


def _make_group(options: Any, _: Any) -> EmulatedGroup:
    if not _entered:
        raise MeshError(f"backend {BACKEND!r} is that of EmulatedNetwork: enter one")
    return EmulatedGroup(_entered[-1], options)
