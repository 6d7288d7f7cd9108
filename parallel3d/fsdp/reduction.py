"""Comm and Reduction: when a bucket is gathered, and how its gradients are summed over the ranks.

A reduction is a list of stages: the reduce-scatter over shard, the sum over tp of gradients that are partial
there, the sum with what earlier micro-batches have accumulated, the all-reduce over replicate, and those of
options. Each stage names the lane that it runs on. A ``Comm`` runs lanes as asynchronous works (here, on the
CPU) or as streams (``streams``), and knows no stage by name. Every rank makes its calls in the same order.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from parallel3d._torch.groups import let_gloo_finish_at_exit
from parallel3d._torch.kernels import foreach_copy_
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import collectives
from parallel3d.fsdp.collectives import ScatterWork
from parallel3d.fsdp.records import BufferLayout


class Lane(Enum):
    """The queue that a stage runs in. Stages in one lane run in the order in which they are issued."""

    SCATTER = "scatter"  # reduce-scatters over shard
    TP = "tp"  # sums over tp; issued late, as the layers' collectives are on the same communicator
    REPLICATE = "replicate"  # sums over replicate, beside the next bucket's reduce-scatter
    SAME = "same"  # the lane of the stage before


class Reducer:
    """The collectives that reduce a bucket's gradients; options derive others from it."""

    # Whether the reduce-scatter takes one buffer with a row per shard rank: no gradient is zero-copy.
    by_row = False
    averages = False  # whether the collectives divide, and the engine does not
    is_exact = True  # whether it gives the sum; a communication hook may compress gradients

    def reduce_scatter(
        self, inputs: list[torch.Tensor], group: ProcessGroup, *, unit: str, scale: float = 1.0
    ) -> ScatterWork:
        """Issues a reduce-scatter of ``inputs``, (n * S,) elements together, to (S,) per rank. The collective
        may multiply the sum by ``scale``; ``ScatterWork.is_scaled`` says whether it does."""
        return collectives.reduce_scatter(
            inputs, group, unit=unit, device_type=inputs[0].device.type, scale=scale
        )

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> Any:
        return collectives.all_reduce(tensor, group, unit=unit)

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


DEFAULT_REDUCER = Reducer()


class BucketMemory:
    """Allocates and frees a bucket's buffers. Here each has its own storage, which exists only while it is
    used; ``options.memory`` derives buffers at fixed addresses."""

    is_fixed = False  # whether buffers stay where they are, and are lent again

    def make(self, kind: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a new buffer of ``size`` elements; ``kind``: its use, "unsharded" or "gathered"."""
        return torch.empty(size, dtype=dtype, device=device)

    def allocate(self, tensor: torch.Tensor) -> None:
        """Gives a released buffer storage with undefined content; leaves storage that a buffer still has."""
        for inner in (tensor,) if type(tensor) is torch.Tensor else inner_tensors(tensor):
            storage, size = inner.untyped_storage(), inner.numel() * inner.element_size()
            if storage.size() != size:  # for the same size, too, torch would allocate other memory
                storage.resize_(size)

    def release(self, tensor: torch.Tensor) -> None:
        """Frees the storage of a buffer. Views of it must not be read until ``allocate``."""
        for inner in (tensor,) if type(tensor) is torch.Tensor else inner_tensors(tensor):
            inner.untyped_storage().resize_(0)

    def copy(
        self,
        kind: str,
        source: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        *,
        non_blocking: bool = False,
    ) -> torch.Tensor:
        """Returns ``source``, flat, in ``dtype`` on ``device``; ``kind``: its use, "cast" or "fetched"."""
        return source.to(device, dtype, non_blocking=non_blocking)

    def lend(self, kind: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory for a reduce-scatter's inputs until ``give_back``; ``kind``: "packed" or "cast"."""
        return torch.empty(size, dtype=dtype, device=device)

    def give_back(self, lent: list[torch.Tensor]) -> None:
        """Called with buffers from ``lend`` when the reduce-scatter has read them."""


ON_DEMAND = BucketMemory()


@dataclass(frozen=True)
class BucketSettings:
    """What the user and options have set on a bucket; ``Bucket.change`` replaces fields."""

    divide_factor: float | None = None  # of gradients; None: the number of data ranks
    reduce_unused: bool = False  # whether parameters without a gradient are reduced as zeros
    reducer: Reducer = DEFAULT_REDUCER
    scatter_group: ProcessGroup | None = None  # of the reduce-scatter; None: that of the all-gather
    on_result: tuple[Stage, ...] = ()  # stages that options add at a reduction's end
    # Called with the bucket and the indices of the parameters whose ``.grad`` is complete.
    on_reduced: Callable[..., None] | None = None
    gather_comm: Any = None  # the user's collective in place of the all-gather
    max_inputs: int = 1  # how many inputs of reduce-scatters may be in flight
    force_sum: bool = False  # whether the user has asked for plain sums, which no collective scales
    keep_storage: bool = False  # whether unsharded parameters keep their memory at rest
    memory: BucketMemory = ON_DEMAND


class Reduced(Protocol):
    """What ``Comm.reduce`` takes: a ``bucket.Bucket``, or an ``options.merged.MergedBucket`` of several."""

    unit: str
    layout: BufferLayout
    settings: BucketSettings
    pin: bool
    tp_group: ProcessGroup | None

    @property
    def scatter_group(self) -> ProcessGroup | None: ...
    @property
    def reducer(self) -> Reducer: ...
    @property
    def grads(self) -> ReducedGradients: ...


class ReducedGradients(Protocol):
    in_flight: weakref.ref[Any] | None

    def start(self, *, all_reduce: bool) -> Reduction: ...
    def finish(self, job: Reduction) -> None: ...


@dataclass(eq=False)
class Reduction:
    """One reduction of a bucket's gradients, from the reduce-scatter's inputs to the result.

    Attributes:
        inputs: inputs of the reduce-scatter in the reduce dtype: (n * segment) for each zero-copy gradient,
            and one buffer with a row per shard rank for the others. Empty when they have been read.
        earlier: (S,), the sum of earlier micro-batches' reduce-scatters, to be added before the all-reduce.
        tp_partial: indices of the parameters whose gradients are partial over tp in this backward, in
            addition to those whose gradients always are.
        tensor: result of the stages run so far: first an input, then (S,); between HFSDP's two
            reduce-scatters (R * S,), R being the size of replicate.
    """

    bucket: Reduced
    inputs: list[torch.Tensor]
    used: Any  # indices of the parameters that got a gradient
    scale: float = 1.0  # factor of the sum over shard
    final: bool = True  # whether the result is the gradient. False: its all-reduce is put off
    earlier: torch.Tensor | None = None
    tp_partial: Collection[int] = ()
    final_scale: float = 1.0  # factor of the result, applied at the end
    stages: list[Stage] = field(default_factory=list)  # still to run
    on_host: bool = False  # whether an accelerator copies the result to the CPU's memory
    lent: list[torch.Tensor] = field(default_factory=list)  # among the inputs; to be given back

    def __post_init__(self) -> None:
        self.tensor = self.inputs[0]

    def give_back(self) -> None:
        self.bucket.settings.memory.give_back(self.lent)
        self.lent = []

    def take(self) -> torch.Tensor:
        """Returns ``tensor``, and deletes the attribute so that the caller has the only reference."""
        tensor = self.tensor
        del self.tensor
        return tensor


class Stage:
    """One step of a reduction."""

    lane = Lane.SAME
    stream: Any = None  # of an accelerator, to run on; None: the lane's
    is_collective = False  # whether ``start`` issues a collective

    def start(self, job: Reduction) -> Any:
        """Issues the stage's collective. Returns the work to wait for, or None."""
        return None

    def finish(self, job: Reduction, work: Any) -> None:
        """Waits for ``work`` if it is not None, and computes what follows the collective."""


class ReduceScatter(Stage):
    """The reduce-scatter over shard, skipped if nothing is sharded, and the scaling of its result."""

    lane = Lane.SCATTER
    is_collective = True

    def start(self, job: Reduction) -> ScatterWork | None:
        bucket = job.bucket
        if bucket.scatter_group is None:
            return None
        scale = 1.0 if bucket.settings.force_sum else job.scale
        return bucket.reducer.reduce_scatter(
            job.inputs, bucket.scatter_group, unit=bucket.unit, scale=scale
        )

    def finish(self, job: Reduction, work: ScatterWork | None) -> None:
        """Waits and scales. It must issue no collective: whether it runs early or late depends on sizes,
        which may differ between tp ranks."""
        if work is not None:
            job.tensor = work.wait()
        job.inputs = []
        if job.scale != 1.0 and (work is None or not work.is_scaled):
            job.tensor.mul_(job.scale)


class SumOverTp(Stage):
    """The sum over tp of gradients that are partial over tp.

    parallel3d's styles declare which parameters have such gradients. With torch's styles a replicated
    parameter is a DTensor in forward, and autograd decides: its gradient may be ``Partial()`` from one use
    and ``Replicate()`` from another. If one is partial, the gradient is summed over the n tp ranks, and a
    replicated one is divided by n first.
    """

    lane = Lane.TP

    def finish(self, job: Reduction, work: Any) -> None:
        sum_over_tp(job.bucket, job.tensor, job.tp_partial)


class AddAccumulated(Stage):
    """Adds the accumulated sum of earlier micro-batches' reduce-scatters."""

    def finish(self, job: Reduction, work: Any) -> None:
        assert job.earlier is not None
        earlier = job.earlier.to(job.tensor.device, non_blocking=job.bucket.pin)
        job.tensor.add_(earlier, alpha=1 / job.final_scale)  # it is divided already


class AllReduce(Stage):
    """The all-reduce over one replicate axis."""

    lane = Lane.REPLICATE
    is_collective = True

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def start(self, job: Reduction) -> Any:
        bucket = job.bucket
        return bucket.reducer.all_reduce(job.tensor, self.group, unit=bucket.unit)

    def finish(self, job: Reduction, work: Any) -> None:
        if work is not None:
            work.wait()


class ScaleResult(Stage):
    def finish(self, job: Reduction, work: Any) -> None:
        job.tensor.mul_(job.final_scale)


def stages_of(
    job: Reduction, over_replicate: Sequence[Stage], to_rest: Sequence[Stage]
) -> list[Stage]:
    """Returns the stages of ``job``, in order.

    Args:
        over_replicate: the stages that sum over replicate; left out if the job's all-reduce is put off.
        to_rest: the last stages, for any result: the copy to CPU memory with offload.
    """
    stages: list[Stage] = [ReduceScatter()]
    if job.bucket.tp_group is not None:
        stages.append(SumOverTp())
    if job.earlier is not None:
        stages.append(AddAccumulated())
    if job.final:
        stages += over_replicate
        if job.final_scale != 1.0:
            stages.append(ScaleResult())
        stages += job.bucket.settings.on_result
    return [*stages, *to_rest]


def sum_over_tp(bucket: Reduced, tensor: torch.Tensor, tp_partial: Collection[int]) -> None:
    """Sums, in place, the gradients in ``tensor`` that are partial over tp, by one all-reduce.

    Args:
        tensor: reduce-scattered gradients: (S,), or with HFSDP R rows of S elements, flattened.
        tp_partial: indices of parameters to sum in addition to those whose gradient is always partial.
    """
    assert bucket.tp_group is not None
    runs = _runs(bucket, tp_partial)
    rows = tensor.view(-1, bucket.layout.numel)
    pieces = [row.narrow(0, start, length) for row in rows.unbind() for start, length in runs]
    if not pieces:
        return
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    work = collectives.all_reduce(packed, bucket.tp_group, unit=bucket.unit)
    if work is not None:
        work.wait()
    if len(pieces) > 1:
        foreach_copy_(pieces, list(packed.split([piece.numel() for piece in pieces])))


def _runs(bucket: Reduced, tp_partial: Collection[int]) -> list[tuple[int, int]]:
    """Returns (start, length) of ranges of a buffer (S,) to sum over tp; adjacent ones are joined."""
    starts = [0, *accumulate(bucket.layout.segment_sizes)] if tp_partial else []
    segments = [(starts[index], bucket.layout.segment_sizes[index]) for index in sorted(tp_partial)]
    always, end = bucket.layout.partial_start, bucket.layout.numel  # the bucket's last parameters
    if always < end:
        segments.append((always, end - always))
    runs: list[tuple[int, int]] = []
    for start, length in segments:
        if runs and sum(runs[-1]) == start:
            start, joined = runs.pop()
            length += joined
        runs.append((start, length))
    return runs


def divisor_before_sum(divisor: float, dtype: torch.dtype) -> float:
    """Returns the number to divide gradients by before the sum; after it they are divided by the rest.

    In float16 a sum over many ranks may overflow, and gradients divided by their number may underflow. So
    both divisors are about the square root of ``divisor``, as in torch's DDP and FSDP, this one a power of
    two, which is exact. In other dtypes it is 1.
    """
    before = 1.0
    if dtype is torch.float16:
        while divisor / before > before:
            before *= 2
    return before


class Gather(Protocol):
    """What ``Comm.issue_gather`` takes: a ``bucket.Bucket``, or a ``coalesced.CoalescedGather``."""

    gathering: Any
    reads_host: bool
    shard_group: ProcessGroup | None

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...
    def start_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any: ...
    def unshard_without_gather(self) -> None: ...
    def copy_out(self) -> None: ...
    def free_gathered(self) -> None: ...


class Comm:
    """Issues and completes the collectives of the units under one root, or under several roots that share it.

    Arguments named ``compute`` are the current stream, if the caller has asked ``current_stream()`` before.
    """

    max_inputs: int = 1  # how many inputs of reduce-scatters may be in flight
    post_optim_event: Any = None  # the next all-gather waits for it instead of the current stream
    left_by: Any = None  # weakly: the context whose last backward has left reductions in flight
    # Reductions whose reduce-scatter still holds its inputs, oldest first; at most ``max_inputs``.
    holding: deque[Any]

    def current_stream(self) -> Any:
        """Returns the accelerator's current stream, which a hook asks for once; None on the CPU."""

    def issue_gather(self, bucket: Gather, compute: Any = None) -> None:
        """Issues the all-gather of ``bucket``."""

    def wait_for_gather(self, work: Any, compute: Any) -> None:
        """Waits for the work of an all-gather, or lets ``compute`` wait for its event."""

    def finish_gather(self, bucket: Gather, compute: Any = None) -> None:
        """Waits for the all-gather, and copies the gathered values to the unsharded parameters."""
        if bucket.gathering is None:
            if bucket.shard_group is None:  # else KeyboardInterrupt came after the copy
                bucket.unshard_without_gather()
            return
        work, _ = bucket.gathering
        if work is not None:
            self.wait_for_gather(work, compute)
        bucket.copy_out()
        bucket.gathering = None  # first: an interruption must not lead to a copy of freed memory
        bucket.free_gathered()

    def run_over_replicate(self, start: Callable[[], Any], *, reads_host: bool) -> Any:
        """Calls ``start``, which issues a collective over replicate for later all-gathers (HFSDP).

        Returns the work to wait for, or None. On an accelerator ``wait()`` makes the current stream wait.
        ``reads_host``: whether the collective's input is in CPU memory and an accelerator reads it.
        """

    def reduce(self, bucket: Reduced, *, all_reduce: bool) -> None:
        """Issues the reduction of the gradients of ``bucket``; with ``all_reduce`` over replicate too."""

    def free_inputs(self) -> None:
        """Waits for the reduce-scatters under way, and frees their inputs."""

    def drain(self, bucket: Reduced) -> None:
        """Completes the reductions of ``bucket``: their results are then in ``.grad`` or accumulated."""

    def finish(self) -> None:
        """Completes all reductions."""

    def abandon(self) -> None:
        """Waits for the reductions in flight after an exception, and drops their results."""

    def settle_host(self) -> None:
        """With CPU offload: waits until no copy from shards in CPU memory is under way."""


class _Running:
    """A reduction of ``CpuComm``, whose collectives are asynchronous works."""

    def __init__(self, job: Reduction) -> None:
        self.job = job
        self.start()

    def start(self) -> None:
        stage = self.job.stages.pop(0)
        self.stage: Stage | None = stage  # under way, or None
        self.work: Any = stage.start(self.job)

    def end_stage(self) -> None:
        stage, work = self.stage, self.work
        self.stage = self.work = None  # what a stage has sent is freed when it has been read
        if stage is not None:
            stage.finish(self.job, work)
            if self.job.lent and not self.job.inputs:
                self.job.give_back()

    def advance(self, *, to_end: bool = False) -> None:
        """Runs stages until the last collective is issued, without waiting for it; ``to_end``: runs all."""
        self.end_stage()
        while self.job.stages:
            self.start()
            is_last = not any(stage.is_collective for stage in self.job.stages)
            if self.work is not None and is_last and not to_end:
                return
            self.end_stage()

    def complete(self) -> None:
        self.advance(to_end=True)
        self.job.bucket.grads.finish(self.job)


class CpuComm(Comm):
    """The ``Comm`` of the CPU: gloo runs collectives on threads of its own while this thread computes.

    The all-reduce of a bucket needs the result of its reduce-scatter. To wait for that at once would block
    the backward, so the all-reduce is issued when the next bucket is reduced.
    """

    def __init__(self) -> None:
        self.holding: deque[_Running] = deque()
        self.reducing: deque[_Running] = deque()  # reductions in their later stages
        self._ref = weakref.ref(self)
        let_gloo_finish_at_exit()

    # -- all-gather ----------------------------------------------------------------------------------

    def issue_gather(self, bucket: Gather, compute: Any = None) -> None:
        if bucket.shard_group is None:
            return
        # Of a forward that has raised; it writes to the same buffer.
        if bucket.gathering is not None:
            _wait_quietly(bucket.gathering[0])
        outputs, inputs = bucket.gather_buffers()
        bucket.gathering = (bucket.start_gather(outputs, inputs), inputs)  # gloo reads the inputs

    def wait_for_gather(self, work: Any, compute: Any) -> None:
        work.wait()

    def run_over_replicate(self, start: Callable[[], Any], *, reads_host: bool) -> Any:
        return start()

    # -- reduction -----------------------------------------------------------------------------------

    def reduce(self, bucket: Reduced, *, all_reduce: bool) -> None:
        if bucket.grads.in_flight is not None:
            self.drain(bucket)  # its earlier reduction of the same backward
        scattered: list[_Running] = []
        while len(self.holding) >= self.max_inputs:
            scattered.append(self._take_scattered())
        running = _Running(bucket.grads.start(all_reduce=all_reduce))
        self.holding.append(running)
        bucket.grads.in_flight = self._ref
        # Earlier all-reduces come after this reduce-scatter: on one link they would delay it, for which the
        # deferred all-gather of the next backward waits.
        for earlier in scattered:
            earlier.advance()
        if running.work is None and len(self.holding) == 1:
            self._take_scattered().advance()  # nothing is scattered, so there is nothing to wait for
        if bucket.settings.on_reduced is None:
            return
        for running in list(self.reducing):  # gradients that are used within the backward
            newest = running.work is not None and running is self.reducing[-1]
            if running.job.bucket.settings.on_reduced is not None and not newest:
                self.reducing.remove(running)
                running.complete()

    def _take_scattered(self) -> _Running:
        """Waits for the oldest reduce-scatter, and returns its reduction, with later stages still to run."""
        running = self.holding.popleft()
        self.reducing.append(running)
        running.end_stage()
        return running

    def free_inputs(self) -> None:
        # All-reduces follow later: they would delay the next all-gather.
        for running in self.holding:
            running.end_stage()

    def drain(self, bucket: Reduced) -> None:
        while any(running.job.bucket is bucket for running in self.holding):
            self._take_scattered().advance()
        for running in [running for running in self.reducing if running.job.bucket is bucket]:
            self.reducing.remove(running)
            running.complete()

    def finish(self) -> None:
        self.left_by = None
        while self.holding:
            # Results are put into ``.grad`` while the last reductions communicate. The newest all-reduce may
            # still run, and the next one must not wait for it.
            while self.reducing and (self.reducing[0].work is None or len(self.reducing) > 1):
                self.reducing.popleft().complete()
            self._take_scattered().advance()
        while self.reducing:
            self.reducing.popleft().complete()

    def abandon(self) -> None:
        self.left_by = None
        for running in (*self.holding, *self.reducing):
            _wait_quietly(getattr(running.work, "work", running.work))
            running.job.bucket.grads.in_flight = None
        self.holding.clear()
        self.reducing.clear()


def _wait_quietly(work: Any) -> None:
    """Waits for ``work`` and ignores its error; None is no work."""
    if work is not None:
        with suppress(RuntimeError):
            work.wait()
