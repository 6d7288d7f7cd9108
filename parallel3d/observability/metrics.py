"""Metrics: a record of each step: how fast, how full, where it waits, and for whom."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean, median_low
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d._torch.groups import all_gather_single
from parallel3d._torch.memory import dump_snapshot, record_history
from parallel3d._util.dry_run import active
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.mesh.agreement import check_agreement
from parallel3d.observability.exposed import OTHER, WORLD, ExposedTime
from parallel3d.observability.flops import CONVENTION, ModelFlops, peak_of_device
from parallel3d.observability.profiling import ProfilerWindow
from parallel3d.observability.stragglers import find_stragglers

# What the fields of a record mean; docs/observability.md has the same table.

FIELDS = {
    "step": "number of the step, as given to `Metrics.step`",
    "time": "when it ended, seconds since 1970",
    "loss": "as logged",
    "grad_norm": "as logged",
    "step_seconds": "wall time of the step on this rank, with loading data",
    "data_seconds": "of it, in `Metrics.loading_data`",
    "tokens_per_second": "tokens of the step, over all ranks, by its wall time",
    "tflops_per_rank": "model TFLOP/s of one rank",
    "mfu": "that by the device's dense bf16 peak; convention in the start line",
    "mfu_6n": "the same by 6 N + 12 L h s, as most others count",
    "memory_peak": "bytes: most allocated in the step (CUDA); most resident so far (CPU)",
    "memory_reserved_peak": "bytes: most that the allocator held in the step (CUDA)",
    "alloc_retries": "times so far that the allocator freed its caches to go on (CUDA)",
    "ooms": "times so far that it had no memory (CUDA)",
    "exposed_seconds": "sampled: axis -> seconds that this rank waited for communication over it",
    "exposed_seconds_mean": "sampled: the same, mean over all ranks",
    "own_seconds": "sampled: the step's seconds on this rank without these waits",
    "memory_peak_max": "sampled: largest `memory_peak` of all ranks, bytes",
    "memory_peak_max_rank": "sampled: the rank that has it",
    "own_seconds_max": "sampled: largest `own_seconds` of all ranks (of its last samples the least)",
    "own_seconds_median": "sampled: the median of them",
    "stragglers": "sampled: list of {axes, times, cause, text}; empty while there are too few samples",
}
"""Name -> meaning. What else is logged is there under its own name."""

OWN_FIELDS = (frozenset(FIELDS) | {"event"}) - {"loss", "grad_norm"}
"""Names that nothing else can be logged under."""

START_FIELDS = {
    "event": '`"start"`: which no step has',
    "time": "seconds since 1970",
    "version": "of parallel3d",
    "torch": "its version",
    "world_size": "ranks of the mesh",
    "mesh": "axis -> size",
    "device": "its type",
    "device_name": "what torch calls it (CUDA)",
    "memory_total": "bytes of the device (CUDA)",
    "tokens_per_step": "over all ranks",
    "every": "steps between two samples",
    "flops_per_token": "model FLOPs, forward and backward",
    "flops_per_token_6n": "the same by the common formula",
    "mfu_convention": "what the first counts",
    "peak_flops": "FLOP/s of one device, as `mfu` takes it",
}
"""What the first line of a run has: field -> meaning."""


# What ranks tell each other of a step: a few numbers each, in one small all-gather.


class Gathering:
    """Brings the numbers of all ranks of ``mesh`` to each of them.

    One all-gather over the default group where the mesh is all its ranks, otherwise one for each axis.

    Attributes:
        ranks: global ranks in the mesh's order.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        whole = sorted(self.ranks) == list(range(dist.get_world_size()))
        self._groups = [dist.group.WORLD] if whole else []
        if not whole:  # innermost first: what comes out is in the mesh's order
            self._groups = [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]
        self._order = self.ranks if whole else range(len(self.ranks))

    def __call__(self, numbers: Sequence[float]) -> list[list[float]] | None:
        """Collective. Each rank's numbers, in the mesh's order; None in a dry run, where nobody knows."""
        table = torch.tensor(numbers, dtype=torch.float64, device=self.mesh.device_type)
        for group in self._groups:
            if group is None or group.size() == 1:
                continue
            whole = table.new_empty(group.size() * table.numel())
            all_gather_single(whole, table.flatten(), group=group)
            table = whole
        if active():
            return None
        rows = table.view(-1, len(numbers)).tolist()
        return [rows[at] for at in self._order]


# What a step's memory was, and a snapshot of it where there was not enough.


def reset_memory(device_type: str) -> None:
    """A step begins: what was before it, an evaluation say, is not its peak. On a CPU nothing forgets."""
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def read_memory(device_type: str) -> dict[str, int]:
    """The memory fields of a record, of this rank, since ``reset_memory``; counts since the process began.

    On a CPU there is the most that was ever resident.
    """
    if device_type == "cuda":
        stats = torch.cuda.memory_stats()
        return {
            "memory_peak": stats.get("allocated_bytes.all.peak", 0),
            "memory_reserved_peak": stats.get("reserved_bytes.all.peak", 0),
            "alloc_retries": stats.get("num_alloc_retries", 0),
            "ooms": stats.get("num_ooms", 0),
        }
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows
        return {}
    peak = getrusage(RUSAGE_SELF).ru_maxrss
    return {"memory_peak": peak if sys.platform == "darwin" else peak * 1024}


def total_memory(device_type: str) -> int | None:
    """Of this process's device, bytes; None on a CPU."""
    if device_type != "cuda":
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


class OomSnapshots:
    """Where a step runs out of CUDA memory, writes ``folder/oom-step-7-rank-00003.pickle``.

    Open it in pytorch.org/memory_viz. From ``start`` on every allocation notes its stack, which takes about
    a microsecond each.

    Args:
        folder: made when it is needed.
        entries: allocations and frees of the history.
    """

    def __init__(self, folder: str | os.PathLike[str], *, entries: int = 100_000) -> None:
        self.folder, self.entries = Path(folder), entries

    def start(self) -> None:
        """Begins the history, on CUDA."""
        if torch.cuda.is_available():
            record_history(self.entries)

    def save(self, step: int, rank: int) -> Path | None:
        """Writes the file; a failure is a warning, as there is an error on its way already."""
        path = self.folder / f"oom-step-{step}-rank-{rank:05d}.pickle"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            dump_snapshot(str(path))
        except Exception as error:
            with suppress(OSError):
                path.unlink()  # a part of one
            warnings.warn(f"the memory snapshot {path} could not be written: {error}", stacklevel=2)
            return None
        return path


class Sink(Protocol):
    """Takes records, on one rank."""

    def start(self, about: Mapping[str, Any]) -> None:
        """The run begins: fields of ``START_FIELDS``."""

    def write(self, record: Mapping[str, Any]) -> None:
        """A step has ended: fields of ``FIELDS``, and what was logged."""

    def close(self) -> None:
        """The run ends."""


class Metrics:
    """Measures each step and gives the first rank's records to ``sinks``.

    ::

        metrics = Metrics(mesh, tokens_per_step=batch * seq_len, sinks=[JsonLines("run.jsonl")])
        with metrics:
            for number in range(steps):
                with metrics.step(number):
                    with metrics.loading_data():
                        tokens = next(batches)
                    loss, norm = train(tokens)
                    metrics.log(loss=loss.item(), grad_norm=norm.item())

    Every ``every`` steps it measures where this rank waits for communication (``ExposedTime``), and the ranks
    exchange a few numbers each in one small all-gather, from which it knows who is slow. Other steps cost a
    few microseconds; nothing in the engine changes. Let a step end in something that waits for the device, as
    ``item()`` does, or its time is that of the host.

    A sink that fails is closed and left out from then on, with a warning: no other rank notices. In a dry run
    nothing is written but what ``Progress`` shows.

    Args:
        mesh: that the model was parallelized on.
        tokens_per_step: over all ranks.
        sinks: ``JsonLines``, ``TensorBoard``, ``Progress``, or your own ``Sink`` s. On all ranks alike or
            not: only the mesh's first rank uses them.
        every: steps between two samples: the steps every - 1, 2 every - 1, and so on; 0: none.
        flops: of the model, from ``model_flops``; without them no MFU.
        peak_tflops: of one device; by default its dense bf16 peak by the planner's table, if it is there.
        slow: how many times the median of the ranks' own time is called slow.
        samples: of a rank's own time, of which the least counts: what is slow once is not slow. There is no
            hint before there are as many.
        profiler: a window of steps to profile.
        snapshots: where to write a memory snapshot when a step has none left.

    Raises:
        Parallel3dError: an argument that can't be.
        AgreementError: the ranks were given different ``every``.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        tokens_per_step: int,
        sinks: Sequence[Sink] = (),
        every: int = 10,
        flops: ModelFlops | None = None,
        peak_tflops: float | None = None,
        slow: float = 1.2,
        samples: int = 3,
        profiler: ProfilerWindow | None = None,
        snapshots: OomSnapshots | None = None,
    ) -> None:
        _check(tokens_per_step=tokens_per_step, samples=samples)
        _check_rates(every=every, slow=slow, peak_tflops=peak_tflops)
        _check_kinds(flops=flops, profiler=profiler, snapshots=snapshots)
        self.mesh, self.tokens_per_step, self.every = mesh, tokens_per_step, every
        self.sinks = list(sinks)
        self.flops, self.slow, self.samples = flops, slow, samples
        self.profiler, self.snapshots = profiler, snapshots
        self.device_type = mesh.device_type
        self.rank = dist.get_rank()
        self.gathering = Gathering(mesh)
        self.is_first = self.rank == self.gathering.ranks[0]
        peak = peak_of_device(mesh.device_type) if peak_tflops is None else peak_tflops * 1e12
        self.peak_flops = peak
        self.record: dict[str, Any] = {}
        self._exposed = self._meter() if every else None
        self._own: deque[tuple[float, float]] = deque(maxlen=samples)  # (own, loading data)
        self._logged: dict[str, Any] = {}
        self._between: dict[str, Any] = {}  # what of it was logged before the step
        self._number, self._began, self._loading = -1, 0.0, 0.0
        self._running = self._in_step = self._sampling = False
        if profiler is not None and self.is_first:
            profiler.check_ranks(dist.get_world_size())
        ranks = self.gathering.ranks
        check_agreement("observability", {"every": str(every)}, ranks=ranks)

    def _meter(self) -> ExposedTime | None:
        able = self.device_type == "cpu" or (self.device_type == "cuda" and not active())
        return ExposedTime(self.mesh) if able else None

    # -- the run ---------------------------------------------------------------------------------------

    def __enter__(self) -> Metrics:
        if active():
            self.profiler = self.snapshots = None
        if self.snapshots is not None and self.device_type == "cuda":
            self.snapshots.start()
        for sink in list(self.sinks):
            if not self.is_first or (active() and not getattr(sink, "in_dry_runs", False)):
                self.sinks.remove(sink)
        self._each_sink("start", self.about())
        self._running = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.profiler is not None:
            self.profiler.close()
        self._running = False
        left, self._logged = self._logged, {}
        if left and self.is_first and kind is None:
            warnings.warn(
                f"logged after the last step, and so in no record: {', '.join(left)}", stacklevel=2
            )
        self._each_sink("close")

    def about(self) -> dict[str, Any]:
        """What sinks are told when the run begins; see ``START_FIELDS``."""
        from parallel3d._util.version import __version__

        cuda = self.device_type == "cuda" and torch.cuda.is_available()
        found = {
            "time": time.time(),
            "version": __version__,
            "torch": torch.__version__,
            "world_size": len(self.gathering.ranks),
            "mesh": self.axes,
            "device": self.device_type,
            "device_name": torch.cuda.get_device_name() if cuda else None,
            "memory_total": total_memory(self.device_type) if cuda else None,
            "tokens_per_step": self.tokens_per_step,
            "every": self.every,
            "peak_flops": self.peak_flops,
        }
        if self.flops is not None:
            found["flops_per_token"] = self.flops.per_token
            found["flops_per_token_6n"] = self.flops.per_token_6n
            found["mfu_convention"] = CONVENTION
        return {name: value for name, value in found.items() if value is not None}

    @property
    def axes(self) -> dict[str, int]:
        """Name -> size of the mesh's axes."""
        names = self.mesh.mesh_dim_names or tuple(map(str, range(self.mesh.ndim)))
        return dict(zip(names, self.mesh.shape, strict=True))

    # -- a step ----------------------------------------------------------------------------------------

    def step(self, number: int) -> _Step:
        """A context manager around one step; ``number`` is the same on all ranks."""
        return _Step(self, number)

    @contextmanager
    def loading_data(self) -> Iterator[None]:
        """What is within it, in a step, is waiting for data."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._loading += time.perf_counter() - began

    def log(self, **values: Any) -> None:
        """Puts values into the step's record, between two steps into that of the next: numbers, not tensors.

        Raises:
            Parallel3dError: a tensor; a name that is a field of every record.
        """
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                raise Parallel3dError(
                    f"log: {name} is a tensor, which would keep its graph; log its value: {name}.item()"
                )
            if name in OWN_FIELDS:
                raise Parallel3dError(
                    f"log: {name!r} is a field of every record; take another name, such as my_{name}"
                )
        self._logged.update(values)

    def begin(self, number: int) -> None:
        """What ``with metrics.step(number):`` does when it is entered.

        Raises:
            StateError: the step before hasn't ended, or the run hasn't begun.
        """
        if not self._running:
            raise StateError(
                f"step {number} is not within the run; put all steps into `with metrics:`"
            )
        if self._in_step:
            raise StateError(f"step {number} begins within step {self._number}; end that one first")
        self._in_step, self._number, self._loading = True, number, 0.0
        self._between = dict(self._logged)
        reset_memory(self.device_type)
        self._sampling = self._exposed is not None and (number + 1) % self.every == 0
        if self.profiler is not None:
            self.profiler.begin(number, self.rank)
        if self._sampling and self._exposed is not None:
            self._exposed.__enter__()
        self._began = time.perf_counter()

    def end(self, error: BaseException | None = None) -> None:
        """What it does when it is left; after an error there is no record."""
        seconds = time.perf_counter() - self._began
        self._in_step = False
        if self._sampling and self._exposed is not None:
            self._exposed.__exit__(None if error is None else type(error))
        if self.profiler is not None:
            self.profiler.end(self._number)
        if error is not None:
            if self.snapshots is not None and isinstance(error, torch.OutOfMemoryError):
                self.snapshots.save(self._number, self.rank)
            self._logged = self._between
            return
        record = {"step": self._number, "time": time.time(), **self._logged}
        self._logged = {}
        record |= {"step_seconds": seconds, "data_seconds": self._loading}
        record |= self._speed(seconds)
        record |= read_memory(self.device_type)
        if self._sampling:
            record |= self._sample(record.get("memory_peak", 0))
        self.record = record
        self._each_sink("write", record)

    def _speed(self, seconds: float) -> dict[str, float]:
        tokens = self.tokens_per_step / seconds
        found = {"tokens_per_second": tokens}
        if self.flops is None:
            return found
        each = tokens / len(self.gathering.ranks)
        found["tflops_per_rank"] = each * self.flops.per_token / 1e12
        if self.peak_flops is not None:
            found["mfu"] = each * self.flops.per_token / self.peak_flops
            found["mfu_6n"] = each * self.flops.per_token_6n / self.peak_flops
        return found

    def _sample(self, memory: int) -> dict[str, Any]:
        """What is measured now and then. Collective."""
        meter = self._exposed
        assert meter is not None
        self._own.append((meter.own, self._loading))
        axes = [axis for axis, size in self.axes.items() if size > 1]
        axes += [WORLD, OTHER]
        waits = [meter.seconds.get(axis, 0.0) for axis in axes]
        table = self.gathering([*min(self._own), memory, *waits])
        if table is None:  # a dry run, where nobody waits
            return {}
        found: dict[str, Any] = {"exposed_seconds": meter.seconds, "own_seconds": meter.own}
        if not self.is_first:
            return found
        own, loading, peaks, *waited = (list(column) for column in zip(*table, strict=True))
        means = {axis: fmean(each) for axis, each in zip(axes, waited, strict=True)}
        largest = max(range(len(peaks)), key=peaks.__getitem__)
        stragglers = []
        if len(self._own) == self.samples:
            stragglers = find_stragglers(own, self.axes, loading=loading, slow=self.slow)
        return found | {
            "exposed_seconds_mean": {axis: mean for axis, mean in means.items() if mean > 0},
            "memory_peak_max": int(peaks[largest]),
            "memory_peak_max_rank": self.gathering.ranks[largest],
            "own_seconds_max": max(own),
            "own_seconds_median": median_low(own),
            "stragglers": [{**each.to_dict(), "text": str(each)} for each in stragglers],
        }

    def _each_sink(self, what: str, *args: Any) -> None:
        for sink in list(self.sinks):
            try:
                getattr(sink, what)(*args)
            except Exception as error:
                if active():
                    raise
                self.sinks.remove(sink)
                if what != "close":
                    with suppress(Exception):
                        sink.close()
                warnings.warn(
                    f"{sink} can't {what} and is left out from now on: {type(error).__name__}: {error}",
                    stacklevel=2,
                )


class _Step:
    """What ``Metrics.step`` returns."""

    __slots__ = ("_metrics", "_number")

    def __init__(self, metrics: Metrics, number: int) -> None:
        self._metrics, self._number = metrics, number

    def __enter__(self) -> Metrics:
        self._metrics.begin(self._number)
        return self._metrics

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._metrics.end(error)


def _check(**counts: object) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise Parallel3dError(f"Metrics: {name} is {value!r}; it must be an int, 1 or more")


def _check_rates(*, every: object, slow: object, peak_tflops: object) -> None:
    if not isinstance(every, int) or every < 0:
        raise Parallel3dError(f"Metrics: every is {every!r}; it must be an int: 0 for no samples")
    if not isinstance(slow, int | float) or not slow > 1:
        raise Parallel3dError(f"Metrics: slow is {slow!r}; it must be a number above 1")
    if peak_tflops is not None and not (isinstance(peak_tflops, int | float) and peak_tflops > 0):
        raise Parallel3dError(f"Metrics: peak_tflops is {peak_tflops!r}; it must be above 0")


def _check_kinds(*, flops: object, profiler: object, snapshots: object) -> None:
    for name, value, kind, what in (
        ("flops", flops, ModelFlops, "what model_flops returns"),
        ("profiler", profiler, ProfilerWindow, "a ProfilerWindow"),
        ("snapshots", snapshots, OomSnapshots, "an OomSnapshots"),
    ):
        if value is not None and not isinstance(value, kind):
            raise Parallel3dError(f"Metrics: {name} is {value!r}; it must be {what}")
