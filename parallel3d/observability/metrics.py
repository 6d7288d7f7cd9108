"""Metrics: measures each step of a run: speed, memory, waits for communication, slow ranks."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import fmean, median_low
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d._torch.groups import all_gather_single, dump_snapshot, record_history
from parallel3d._util.arguments import as_count, is_positive
from parallel3d._util.dry_run import active
from parallel3d._util.version import __version__
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.mesh.agreement import check_agreement
from parallel3d.observability.exposed import OTHER, WORLD, ExposedTime, axis_names
from parallel3d.observability.flops import CONVENTION, ModelFlops, peak_of_device
from parallel3d.observability.profiling import ProfilerWindow
from parallel3d.observability.stragglers import find_stragglers

FIELDS = {
    "step": "number of the step, as given to `Metrics.step`",
    "time": "when it ended, seconds since 1970",
    "loss": "as logged",
    "grad_norm": "as logged",
    "step_seconds": "wall time of the step on this rank, with loading data",
    "data_seconds": "the part of it in `Metrics.loading_data`",
    "tokens_per_second": "tokens of the step over all ranks, divided by its wall time",
    "tflops_per_rank": "model TFLOP/s of one rank",
    "mfu": "the same divided by the device's dense bf16 peak; convention in the start line",
    "mfu_6n": "the same counted as 6 N + 12 L h s, as most others do",
    "memory_peak": "bytes: most allocated in the step (CUDA); most resident so far (CPU)",
    "memory_reserved_peak": "bytes: most reserved by the allocator in the step (CUDA)",
    "alloc_retries": "number of times so far that the allocator freed its caches and retried (CUDA)",
    "ooms": "number of times so far that it had no memory (CUDA)",
    "exposed_seconds": "sampled: axis -> seconds that this rank waited for communication over it",
    "exposed_seconds_mean": "sampled: the same, mean over all ranks",
    "own_seconds": "sampled: the step's seconds on this rank without these waits",
    "memory_peak_max": "sampled: largest `memory_peak` of all ranks, bytes",
    "memory_peak_max_rank": "sampled: the rank that has it",
    "own_seconds_max": "sampled: largest `own_seconds` of all ranks (for each the least of its last samples)",
    "own_seconds_median": "sampled: the median of them",
    "stragglers": "sampled: list of {axes, times, cause, text}; empty while there are too few samples",
}
"""Fields of a record: name -> meaning. Other logged values are added under their names."""

RESERVED = (frozenset(FIELDS) | {"event"}) - {"loss", "grad_norm"}
"""Names that values can't be logged under."""

START_FIELDS = {
    "event": '`"start"`: a step has no such field',
    "time": "seconds since 1970",
    "version": "version of parallel3d",
    "torch": "version of torch",
    "world_size": "number of ranks of the mesh",
    "mesh": "axis -> size",
    "device": "device type",
    "device_name": "torch's name of the device (CUDA)",
    "memory_total": "bytes of the device (CUDA)",
    "tokens_per_step": "over all data ranks",
    "every": "steps between two samples",
    "flops_per_token": "model FLOPs, forward and backward",
    "flops_per_token_6n": "the same by the common formula",
    "mfu_convention": "what `flops_per_token` counts",
    "peak_flops": "FLOP/s of one device, as `mfu` takes it",
}
"""Fields of the first line of a run: name -> meaning. docs/observability.md has both tables."""


def read_memory(device_type: str) -> dict[str, int]:
    """Returns this rank's memory, as fields of a step's record, which ``FIELDS`` describes."""
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


class OomSnapshots:
    """Writes ``folder/oom-step-7-rank-00003.pickle`` when a step runs out of CUDA memory.

    Open it in pytorch.org/memory_viz. After ``start`` every allocation records its stack, which takes about a
    microsecond.

    Args:
        folder: created when needed.
        entries: number of allocations and frees in the history.
    """

    def __init__(self, folder: str | os.PathLike[str], *, entries: int = 100_000) -> None:
        self.folder, self.entries = Path(folder), entries

    def start(self) -> None:
        """Begins to record allocations; does nothing without CUDA."""
        if torch.cuda.is_available():
            record_history(self.entries)

    def save(self, step: int, rank: int) -> Path | None:
        """Writes the file and returns its path; only warns if that fails, as an error is being raised."""
        path = self.folder / f"oom-step-{step}-rank-{rank:05d}.pickle"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            dump_snapshot(str(path))
        except Exception as error:
            with suppress(OSError):
                path.unlink()  # an incomplete file
            warnings.warn(f"the memory snapshot {path} could not be written: {error}", stacklevel=2)
            return None
        return path


class Sink(Protocol):
    """Interface of what takes the records of a run's steps, on one rank."""

    def start(self, about: Mapping[str, Any]) -> None:
        """Called when the run begins; ``about`` has the fields of ``START_FIELDS``."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Called when a step has ended; ``record`` has the fields of ``FIELDS`` and other logged values."""

    def close(self) -> None:
        """Called when the run ends."""


class Metrics:
    """Measures each step, and passes the records of the mesh's first rank to ``sinks``.

    ::

        metrics = Metrics(mesh, tokens_per_step=batch * seq_len, sinks=[JsonLines("run.jsonl")])
        with metrics:
            for number in range(steps):
                with metrics.step(number):
                    with metrics.loading_data():
                        tokens = next(batches)
                    loss, norm = train(tokens)
                    metrics.log(loss=loss.item(), grad_norm=norm.item())

    Every ``every`` steps it samples where this rank waits for communication (``ExposedTime``), and the ranks
    exchange a few numbers in one small all-gather to find slow ranks. Other steps cost a few microseconds,
    and the engine is not changed. End a step with a call that waits for the device, such as ``item()``:
    otherwise its time is that of the host.

    A sink that raises is closed and no longer used, with a warning; other ranks are not affected. In a dry
    run only ``Progress`` is used.

    Args:
        mesh: the mesh of the model.
        tokens_per_step: over all data ranks; a sequence that tp or cp ranks share counts once.
        sinks: ``JsonLines``, ``TensorBoard``, ``Progress``, or your own ``Sink`` s. Only those of the mesh's
            first rank are used.
        every: steps between two samples: the steps every - 1, 2 every - 1, and so on; 0: no samples.
        flops: FLOPs of the model, from ``model_flops``; without them there is no MFU.
        peak_tflops: peak of one device, TFLOP/s; by default its dense bf16 peak in the planner's table.
        slow: a rank is slow if its own time is at least this many times the median.
        samples: number of a rank's last samples, of which the least counts, so that a rank must be slow in
            all of them. There are no stragglers before that many samples.
        profiler: a window of steps to profile.
        snapshots: writes a memory snapshot when a step runs out of memory.

    Raises:
        Parallel3dError: an argument is out of range or of a wrong type.
        AgreementError: ``every`` differs between ranks.
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
        slow: float = 1.5,
        samples: int = 3,
        profiler: ProfilerWindow | None = None,
        snapshots: OomSnapshots | None = None,
    ) -> None:
        as_count("Metrics: tokens_per_step", tokens_per_step, 1)
        as_count("Metrics: samples", samples, 1)
        as_count("Metrics: every", every)
        for name, value, valid, rule in (
            ("slow", slow, is_positive(slow) and slow > 1, "a number above 1"),
            (
                "peak_tflops",
                peak_tflops,
                peak_tflops is None or is_positive(peak_tflops),
                "above 0",
            ),
            ("flops", flops, isinstance(flops, ModelFlops | None), "what model_flops returns"),
            ("profiler", profiler, isinstance(profiler, ProfilerWindow | None), "a ProfilerWindow"),
            ("snapshots", snapshots, isinstance(snapshots, OomSnapshots | None), "an OomSnapshots"),
        ):
            if not valid:
                raise Parallel3dError(f"Metrics: {name} is {value!r}; it must be {rule}")
        self.mesh, self.tokens_per_step, self.every = mesh, tokens_per_step, every
        self.sinks = list(sinks)
        self.flops, self.slow, self.samples = flops, slow, samples
        self.profiler, self.snapshots = profiler, snapshots
        self.device_type = mesh.device_type
        self.axes = dict(zip(axis_names(mesh), mesh.shape, strict=True))
        self.rank = dist.get_rank()
        self.ranks: list[int] = mesh.mesh.flatten().tolist()  # global ranks in the mesh's order
        self.is_first = self.rank == self.ranks[0]
        peak = peak_of_device(mesh.device_type) if peak_tflops is None else peak_tflops * 1e12
        self.peak_flops = peak
        self.record: dict[str, Any] = {}
        able = every and self.device_type in ("cuda", "cpu")
        self._exposed = ExposedTime(mesh) if able else None
        self._own: deque[tuple[float, float]] = deque(maxlen=samples)  # (own, loading data)
        self._logged: dict[str, Any] = {}
        self._loading = 0.0
        self._running = False
        self._current: int | None = None  # the step under way
        if profiler is not None and self.is_first:
            profiler.check_ranks(dist.get_world_size())
        check_agreement("observability", {"every": str(every)}, ranks=self.ranks)

    # -- the run ---------------------------------------------------------------------------------------

    def __enter__(self) -> Metrics:
        if active():
            self.profiler = self.snapshots = None
        if self.snapshots is not None and self.device_type == "cuda":
            self.snapshots.start()
        for sink in list(self.sinks):
            if not self.is_first or (active() and not getattr(sink, "in_dry_runs", False)):
                self.sinks.remove(sink)
        self._call_sinks("start", self.about())
        self._running = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self.profiler is not None:
            self.profiler.close()
        self._running = False
        left, self._logged = self._logged, {}
        if left and self.is_first and kind is None:
            warnings.warn(
                f"logged after the last step, and so in no record: {', '.join(left)}", stacklevel=2
            )
        self._call_sinks("close")

    def about(self) -> dict[str, Any]:
        """Returns the fields of ``START_FIELDS`` that are known."""
        about: dict[str, Any] = {
            "time": time.time(),
            "version": __version__,
            "torch": torch.__version__,
            "world_size": len(self.ranks),
            "mesh": self.axes,
            "device": self.device_type,
            "tokens_per_step": self.tokens_per_step,
            "every": self.every,
        }
        if self.device_type == "cuda" and torch.cuda.is_available():
            about["device_name"] = torch.cuda.get_device_name()
            about["memory_total"] = torch.cuda.get_device_properties().total_memory
        if self.peak_flops is not None:
            about["peak_flops"] = self.peak_flops
        if self.flops is not None:
            about["flops_per_token"] = self.flops.per_token
            about["flops_per_token_6n"] = self.flops.per_token_6n
            about["mfu_convention"] = CONVENTION
        return about

    # -- a step ----------------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int) -> Iterator[Metrics]:
        """Measures the step in the body; ``number`` is the same on all ranks. If it raises there is no
        record.

        Raises:
            StateError: the step before has not ended, or this is not within ``with metrics:``.
        """
        if not self._running:
            raise StateError(
                f"step {number} is not within the run; put all steps into `with metrics:`"
            )
        if self._current is not None:
            raise StateError(
                f"step {number} begins within step {self._current}; end that one first"
            )
        self._current, self._loading = number, 0.0
        between = dict(self._logged)  # logged since the last step
        if self.device_type == "cuda":  # the peak of an evaluation, say, is not the step's
            torch.cuda.reset_peak_memory_stats()
        meter = self._exposed if self.every and (number + 1) % self.every == 0 else None
        if self.profiler is not None:
            self.profiler.begin(number, self.rank)
        try:
            with nullcontext() if meter is None else meter:
                began = time.perf_counter()
                yield self
                seconds = time.perf_counter() - began
        except BaseException as error:
            if self.snapshots is not None and isinstance(error, torch.OutOfMemoryError):
                self.snapshots.save(number, self.rank)
            self._logged = between
            raise
        finally:
            self._current = None
            if self.profiler is not None:
                self.profiler.end(number)
        self.record = {"step": number, "time": time.time(), **self._logged}
        self._logged = {}
        self.record |= {"step_seconds": seconds, "data_seconds": self._loading}
        self.record |= self._speed(seconds) | read_memory(self.device_type)
        if meter is not None:
            self.record |= self._sample(meter, self.record.get("memory_peak", 0))
        self._call_sinks("write", self.record)

    @contextmanager
    def loading_data(self) -> Iterator[None]:
        """Counts the time of the body, which is part of a step, as time in which data was loaded."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._loading += time.perf_counter() - began

    def log(self, **values: Any) -> None:
        """Adds numbers to the step's record; between two steps to that of the next.

        Raises:
            Parallel3dError: a value is a tensor, or a name is a field of every record.
        """
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                raise Parallel3dError(
                    f"log: {name} is a tensor, which would keep its graph; log its value: {name}.item()"
                )
            if name in RESERVED:
                raise Parallel3dError(
                    f"log: {name!r} is a field of every record; take another name, such as my_{name}"
                )
        self._logged.update(values)

    def _speed(self, seconds: float) -> dict[str, float]:
        tokens = self.tokens_per_step / seconds
        fields = {"tokens_per_second": tokens}
        if self.flops is not None:
            per_rank = tokens / len(self.ranks)
            fields["tflops_per_rank"] = per_rank * self.flops.per_token / 1e12
            if self.peak_flops is not None:
                fields["mfu"] = per_rank * self.flops.per_token / self.peak_flops
                fields["mfu_6n"] = per_rank * self.flops.per_token_6n / self.peak_flops
        return fields

    def _gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Returns ``numbers`` of each rank, in the mesh's order; an empty list in a dry run. Collective.

        One all-gather over the default group if the mesh contains all its ranks, otherwise one per axis.
        """
        is_whole = len(self.ranks) == dist.get_world_size()
        # Innermost first, so that the result is in the mesh's order.
        groups = [dist.group.WORLD] if is_whole else [*reversed(self.mesh.get_all_groups())]
        table = torch.tensor(numbers, dtype=torch.float64, device=self.device_type)
        for group in groups:
            if group is not None and group.size() > 1:
                whole = table.new_empty(group.size() * table.numel())
                all_gather_single(whole, table.flatten(), group=group)
                table = whole
        rows = [] if active() else table.view(-1, len(numbers)).tolist()
        return [rows[rank] for rank in self.ranks] if is_whole and rows else rows

    def _sample(self, meter: ExposedTime, memory: int) -> dict[str, Any]:
        """Returns what only sampled records have: waits, and all ranks' times and memory. Collective."""
        self._own.append((meter.own, self._loading))
        axes = [*meter.names, WORLD, OTHER]
        waits = [meter.seconds.get(axis, 0.0) for axis in axes]
        table = self._gather([*min(self._own), memory, *waits])
        if not table:  # a dry run, where nobody waits
            return {}
        fields: dict[str, Any] = {"exposed_seconds": meter.seconds, "own_seconds": meter.own}
        if not self.is_first:
            return fields
        own, loading, peaks, *waited = (list(column) for column in zip(*table, strict=True))
        means = {axis: fmean(column) for axis, column in zip(axes, waited, strict=True)}
        largest = max(range(len(peaks)), key=peaks.__getitem__)
        stragglers = []
        if len(self._own) == self.samples:
            stragglers = find_stragglers(own, self.axes, loading=loading, slow=self.slow)
        return fields | {
            "exposed_seconds_mean": {axis: mean for axis, mean in means.items() if mean > 0},
            "memory_peak_max": int(peaks[largest]),
            "memory_peak_max_rank": self.ranks[largest],
            "own_seconds_max": max(own),
            "own_seconds_median": median_low(own),
            "stragglers": [{**each.to_dict(), "text": str(each)} for each in stragglers],
        }

    def _call_sinks(self, method: str, *args: Any) -> None:
        for sink in list(self.sinks):
            try:
                getattr(sink, method)(*args)
            except Exception as error:
                if active():
                    raise
                self.sinks.remove(sink)
                if method != "close":
                    with suppress(Exception):
                        sink.close()
                warnings.warn(
                    f"{sink} can't {method} and is left out from now on: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
