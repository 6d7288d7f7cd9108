"""When a bucket's collectives are issued and waited for, on asynchronous works or on streams.

``issue_gather`` / ``finish_gather`` stand around an all-gather, ``reduce`` issues a reduction, ``finish``
ends a backward. Every rank makes these calls in the same order. What a reduction consists of is its own
matter, see ``reduction``; here its stages' lanes become works or streams.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from parallel3d._torch.groups import let_gloo_finish_at_exit
from parallel3d._util import dry_run
from parallel3d.fsdp.reduction import Lane, Reduction, Stage


class Gather(Protocol):
    """What is gathered by one call: a bucket, or several together.

    Attributes:
        shard_group: group of the shards; None: nothing is gathered.
        gathering: the all-gather under way: what to wait for, and its inputs.
        reads_host: whether its shards are in the CPU's memory, and it computes elsewhere.
    """

    unit: str
    gathering: Any
    reads_host: bool

    @property
    def shard_group(self) -> ProcessGroup | None: ...

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Allocates and returns the outputs and inputs of the all-gather."""

    def start_gather(self, outputs: list[torch.Tensor], parts: list[torch.Tensor]) -> Any:
        """Issues the collective; returns what to wait for."""

    def copy_out(self) -> None:
        """After the all-gather: what was gathered into the parameters' places."""

    def free_gathered(self) -> None:
        """After ``copy_out`` has run on the device."""

    def cast_whole(self) -> None:
        """Unshard without an all-gather."""


class GradientOwner(Protocol):
    """Whose gradients are reduced together; see ``Bucket``."""

    on_reduced: Callable[..., None] | None

    @property
    def grads(self) -> Any: ...


class Comm(Protocol):
    """What a unit asks of the communication side.

    Attributes:
        max_inputs: how many inputs of reduce-scatters may be in flight.
        post_optim_event: an event for the next all-gather to wait for, instead of the current stream.
        left_by: the context whose last backward was not finalized; its reductions are in flight.
    """

    max_inputs: int
    post_optim_event: Any
    left_by: Any

    def issue_gather(self, bucket: Gather) -> None:
        """Starts the all-gather of ``bucket``."""

    def finish_gather(self, bucket: Gather) -> None:
        """Makes ``bucket``'s unsharded parameters ready for use."""

    def run_over_replicate(self, start: Callable[[], Any], *, reads_host: bool) -> Any:
        """Issues by ``start`` a collective over replicate that later all-gathers read the result of.

        Returns:
            What to wait for: ``wait()`` lets the caller, on an accelerator its current stream, wait. None:
            there is nothing to wait for.
        """

    def reduce(self, bucket: GradientOwner, *, all_reduce: bool) -> None:
        """Starts the reduction of the gradients ``bucket`` has collected."""

    @property
    def holds_inputs(self) -> bool:
        """Whether the input of a reduction is still held."""

    def free_inputs(self) -> None:
        """Frees the inputs of the reductions under way once they have been read."""

    def drain(self, bucket: GradientOwner) -> None:
        """Completes the reductions of ``bucket`` and puts the results into ``.grad``."""

    def finish(self) -> None:
        """Completes every reduction and puts the results into ``.grad``."""

    def abandon(self) -> None:
        """After an exception: waits for the reductions in flight and drops their results."""

    def settle_host(self) -> None:
        """Returns when nothing reads the shards in the CPU's memory any more (CPU offload)."""


def make_comm(device_type: str) -> Comm:
    """Streams where the device has them, asynchronous works otherwise."""
    played = dry_run.accelerator()
    if played is None and device_type in ("cpu", "meta"):
        return CpuComm()
    return StreamComm(played or torch.get_device_module(device_type))


def limit_inputs(comm: Comm, limits: Iterable[int], *, at_least: int = 1) -> None:
    """Lets ``comm`` have as many reduce inputs in flight as the largest of ``limits``.

    Buckets share the limit: one that asks for fewer must not wait for those of the others.
    """
    # ``at_least``: of other roots on the same comm.
    comm.max_inputs = max(max(limits, default=1), at_least)


# -- asynchronous works --------------------------------------------------------------------------------


class _Running:
    """A reduction on asynchronous works: the collective under way, and what comes after it."""

    __slots__ = ("job", "stage", "work")

    def __init__(self, job: Reduction) -> None:
        self.job = job
        self.stage: Stage | None = None
        self.work: Any = None
        self.start()

    def start(self) -> None:
        """Starts the next stage."""
        self.stage = stage = self.job.stages.pop(0)
        self.work = stage.start(self.job)

    def end_stage(self) -> None:
        """Waits for the stage under way, and does the rest of it."""
        stage, work = self.stage, self.work
        self.stage = self.work = None  # what a stage has sent is freed as soon as it has been read
        if stage is not None:
            stage.finish(self.job, work)

    def advance(self) -> None:
        """Goes on until the last collective is under way; what comes behind it waits for ``complete``."""
        self.end_stage()
        while self.job.stages:
            self.start()
            last = not any(stage.is_collective for stage in self.job.stages)
            if self.work is not None and last:
                return
            self.end_stage()

    def complete(self) -> None:
        """Goes on to the end."""
        self.end_stage()
        while self.job.stages:
            self.start()
            self.end_stage()
        self.job.bucket.grads.finish(self.job)

    def wait_quietly(self) -> None:
        """The result isn't wanted; what has gone wrong in it is not our exception."""
        _wait_quietly(getattr(self.work, "work", self.work))
        self.job.bucket.grads.in_flight = None


class CpuComm:
    """Asynchronous works. gloo runs them on threads of its own while this one computes.

    Reductions are a pipeline. A bucket's all-reduce over replicate needs the result of its reduce-scatter,
    and waiting for that right away would block the backward; so it is issued when the next bucket is
    reduced, by which time the reduce-scatter has had a unit's compute to finish in.

    See ``Comm`` for the methods.

    Attributes:
        scattering: reductions whose reduce-scatter is under way, oldest first; at most ``max_inputs``.
        reducing: those that are past it.
    """

    def __init__(self) -> None:
        self.max_inputs = 1
        self.post_optim_event: Any = None  # nothing here runs ahead of the optimizer
        self.scattering: deque[_Running] = deque()
        self.reducing: deque[_Running] = deque()
        self.left_by: Any = None
        self._ref = weakref.ref(self)
        let_gloo_finish_at_exit()

    # -- all-gather ----------------------------------------------------------------------------------

    def issue_gather(self, bucket: Gather) -> None:
        if bucket.shard_group is None:
            return
        if bucket.gathering is not None:  # left behind by an exception; it writes to our buffer
            _wait_quietly(bucket.gathering[0])
        outputs, parts = bucket.gather_buffers()
        # gloo reads ``parts`` until it is done
        bucket.gathering = (bucket.start_gather(outputs, parts), parts)

    def finish_gather(self, bucket: Gather) -> None:
        if bucket.shard_group is None:
            bucket.cast_whole()
            return
        if bucket.gathering is None:  # an interruption came after the copy
            return
        work, _ = bucket.gathering
        if work is not None:
            work.wait()
        bucket.copy_out()
        bucket.gathering = None  # before what it would copy again is freed
        bucket.free_gathered()

    def run_over_replicate(self, start: Callable[[], Any], *, reads_host: bool) -> Any:
        return start()

    # -- reduction -----------------------------------------------------------------------------------

    def reduce(self, bucket: GradientOwner, *, all_reduce: bool) -> None:
        """Earlier buckets' all-reduces go behind this reduce-scatter: on one link they would delay it, and
        the gather half-way through the next backward waits for it."""
        self.drain(bucket)  # before what is scattered and not summed yet is among the others
        scattered: list[_Running] = []
        while len(self.scattering) >= self.max_inputs:
            scattered.append(self._take_scattered())
        running = _Running(bucket.grads.start(all_reduce=all_reduce))
        self.scattering.append(running)
        bucket.grads.in_flight = self._ref
        for each in scattered:
            each.advance()
        if running.work is None and len(self.scattering) == 1:
            # Nothing is scattered, so there is nothing to let run first.
            self._take_scattered().advance()
        if bucket.on_reduced is not None:
            self._complete_early()

    def _take_scattered(self) -> _Running:
        """The oldest bucket whose reduce-scatter is under way, when that is over and its input is free."""
        running = self.scattering.popleft()
        self.reducing.append(running)
        running.end_stage()
        return running

    def _complete_early(self) -> None:
        """Hands over gradients to be used within the backward, but those whose all-reduce has just begun."""
        for running in list(self.reducing):
            newest = running.work is not None and running is self.reducing[-1]
            if running.job.bucket.on_reduced is not None and not newest:
                self.reducing.remove(running)
                running.complete()

    @property
    def holds_inputs(self) -> bool:
        return bool(self.scattering)

    def free_inputs(self) -> None:
        """All-reduces are issued later: on one link they would delay the next gather."""
        for running in self.scattering:
            running.end_stage()

    def drain(self, bucket: GradientOwner) -> None:
        while any(running.job.bucket is bucket for running in self.scattering):
            self._take_scattered().advance()
        for running in [each for each in self.reducing if each.job.bucket is bucket]:
            self.reducing.remove(running)
            running.complete()

    def finish(self) -> None:
        self.left_by = None
        while self.scattering:
            # What has come is put away while the last reductions communicate: nobody computes any more. The
            # newest all-reduce may still run, and the next one must not wait for it.
            while self.reducing and (self.reducing[0].work is None or len(self.reducing) > 1):
                self.reducing.popleft().complete()
            self._take_scattered().advance()
        while self.reducing:
            self.reducing.popleft().complete()

    def abandon(self) -> None:
        self.left_by = None
        for running in (*self.scattering, *self.reducing):
            running.wait_quietly()
        self.scattering.clear()
        self.reducing.clear()

    def settle_host(self) -> None:
        """Every copy is over when its call returns."""


def _wait_quietly(work: Any) -> None:
    if work is not None:
        with suppress(RuntimeError):
            work.wait()


# -- streams -------------------------------------------------------------------------------------------


class _InFlight:
    """A reduction on streams.

    Attributes:
        source: the reduce-scatter's inputs, allocated on the compute stream; None once they may be freed.
        held: results of stages that a stage on another stream reads.
        stream: what the last stage is on.
        scattered: event: the input has been read.
        done: event: what has been put on streams for it is over; at last the result is final.
    """

    __slots__ = ("done", "held", "job", "scattered", "source", "stream")

    def __init__(self, job: Reduction, stream: Any) -> None:
        self.job = job
        self.source: list[torch.Tensor] | None = job.inputs
        self.held: list[torch.Tensor] = []
        self.stream = stream
        self.scattered: Any = None
        self.done: Any = None


class StreamComm:
    """Streams beside the compute stream, on any accelerator with CUDA's stream interface.

    - copy_in (high priority): fetches and casts shards and allocates gather buffers, off the compute stream.
    - gather (high): all-gathers; what compute waits for next, so it goes before other kernels.
    - scatter (high): reduce-scatters; apart from ``gather`` so that neither queues behind the other.
    - replicate (normal): HSDP's all-reduces, so that one overlaps the next bucket's reduce-scatter.
    - over_tp (high; if there are such): sums of partial gradients over tp. The layers' own collectives are on
      the same communicator, which runs one after another: one that waited for a reduce-scatter would hold up
      the next layer's. So a bucket's sum is issued when the next but ``max_inputs`` is reduced, as its
      reduce-scatter is over by then.

    No memory is handed back while a stream may still read it. Buffers of the copy_in pool are freed from
    the CPU at once, which is safe because copy_in waits for the compute stream before each new use;
    buffers of the compute pool that another stream reads are held until compute has waited for it.

    See ``Comm`` for the methods.

    Attributes:
        in_flight: reductions whose result is not in ``.grad`` yet, oldest first.
        holding: of these, those whose input is still held; at most ``max_inputs``.
        unsummed: of these, those still to be summed over tp; at most ``max_inputs``.
        host_read: event: the shards in the CPU's memory have been read (CPU offload).
    """

    def __init__(self, device_module: Any) -> None:
        self.device = device_module
        self.copy_in = device_module.Stream(priority=-1)
        self.gather = device_module.Stream(priority=-1)
        self.scatter = device_module.Stream(priority=-1)
        self.replicate = device_module.Stream()
        self.max_inputs = 1
        self.post_optim_event: Any = None
        self.in_flight: deque[_InFlight] = deque()
        self.holding: deque[_InFlight] = deque()
        self.over_tp: Any = None
        self.unsummed: deque[_InFlight] = deque()
        self.host_read: Any = None
        self.left_by: Any = None
        self._ref = weakref.ref(self)

    # -- all-gather ----------------------------------------------------------------------------------

    def issue_gather(self, bucket: Gather) -> None:
        if bucket.shard_group is None and not bucket.reads_host:
            return
        if bucket.gathering is not None:
            # Left behind by an exception; it reads and writes our buffers.
            self.device.current_stream().wait_event(bucket.gathering[0])
        if self.post_optim_event is None:
            # The optimizer wrote the shards, and the last reader of this pool's memory ran, on compute.
            self.copy_in.wait_stream(self.device.current_stream())
        else:  # the user's word for both; what compute was given since does not delay us
            self.copy_in.wait_event(self.post_optim_event)
            self.post_optim_event = None
        with self.device.stream(self.copy_in):
            outputs, parts = bucket.gather_buffers()
            if bucket.shard_group is None:
                outputs[0].copy_(parts[0])
        self.gather.wait_stream(self.copy_in)  # the cast shards must be there
        with self.device.stream(self.gather):
            if bucket.shard_group is not None:
                work = bucket.start_gather(outputs, parts)
                if work is not None:
                    work.wait()  # the backend's own stream -> ours; does not block the CPU
            event = self.gather.record_event()
        # ``parts`` stay alive until compute has waited for the gather that reads it.
        bucket.gathering = (event, parts)
        if bucket.reads_host:
            self.host_read = event

    def finish_gather(self, bucket: Gather) -> None:
        if bucket.shard_group is None and not bucket.reads_host:
            bucket.cast_whole()
            return
        if bucket.gathering is None:  # an interruption came after the copy
            return
        event, _ = bucket.gathering
        self.device.current_stream().wait_event(event)
        bucket.copy_out()
        bucket.gathering = None  # before what it would copy again is freed
        bucket.free_gathered()

    def run_over_replicate(self, start: Callable[[], Any], *, reads_host: bool) -> Any:
        # The optimizer wrote the shards on compute; earlier gathers read the last result on ``gather``.
        self.replicate.wait_stream(self.device.current_stream())
        self.replicate.wait_stream(self.gather)
        with self.device.stream(self.replicate):
            work = start()
            if work is not None:
                work.wait()
            event = self.replicate.record_event()
        if reads_host:
            self.host_read = event
        return event

    # -- reduction -----------------------------------------------------------------------------------

    def reduce(self, bucket: GradientOwner, *, all_reduce: bool) -> None:
        while len(self.holding) >= self.max_inputs:
            self._free_oldest_input()
        while len(self.unsummed) >= self.max_inputs:
            self._sum_over_tp(self.unsummed[0])
        flight = _InFlight(bucket.grads.start(all_reduce=all_reduce), self.scatter)
        self.scatter.wait_stream(
            self.device.current_stream()
        )  # gradients were copied in on compute
        self._run_stage(flight)
        flight.scattered = flight.done
        self.in_flight.append(flight)
        self.holding.append(flight)
        bucket.grads.in_flight = self._ref
        stages = flight.job.stages
        if stages and stages[0].lane is Lane.TP and flight.job.bucket.scatter_group is not None:
            self.unsummed.append(flight)
        else:
            self._run(flight)
        if bucket.on_reduced is not None:
            self._complete_early(flight)

    def _run(self, flight: _InFlight) -> None:
        """Issues all stages that are left."""
        while flight.job.stages:
            self._run_stage(flight)

    def _run_stage(self, flight: _InFlight) -> None:
        job = flight.job
        stage = job.stages.pop(0)
        stream = stage.stream or self._stream_of(stage.lane, flight)
        if stream is not flight.stream:
            stream.wait_event(flight.done)  # it reads the last stage's result
            flight.held.append(job.tensor)
            flight.stream = stream
        with self.device.stream(stream):
            try:
                stage.finish(job, stage.start(job))
            finally:  # what it has put on the stream before it raised reads the result
                flight.done = stream.record_event()

    def _stream_of(self, lane: Lane, flight: _InFlight) -> Any:
        if lane is Lane.SCATTER:
            return self.scatter
        if lane is Lane.REPLICATE:
            return self.replicate
        if lane is Lane.TP and flight.job.bucket.scatter_group is not None:
            if self.over_tp is None:
                self.over_tp = self.device.Stream(priority=-1)
            return self.over_tp
        return flight.stream

    def _sum_over_tp(self, flight: _InFlight) -> None:
        """The sum over tp, if it is still to be made, and what follows; all ranks call it at one place."""
        if flight in self.unsummed:
            self.unsummed.remove(flight)
            self._run(flight)

    def _complete_early(self, newest: _InFlight) -> None:
        """Hands over gradients to be used within the backward, but the newest."""
        for flight in list(self.in_flight):
            if flight.job.bucket.on_reduced is not None and flight is not newest:
                self.in_flight.remove(flight)
                self._complete(flight)
        self.holding = deque(flight for flight in self.holding if flight.source is not None)

    def _complete(self, flight: _InFlight) -> None:
        self._sum_over_tp(flight)
        self._wait_for(flight)
        if flight.job.on_host:
            flight.done.synchronize()  # .grad is in the CPU's memory, which knows no streams
        flight.job.bucket.grads.finish(flight.job)

    def _wait_for(self, flight: _InFlight) -> None:
        compute = self.device.current_stream()
        compute.wait_event(flight.scattered)
        compute.wait_event(flight.done)
        flight.source = None
        flight.held.clear()

    def _free_oldest_input(self) -> None:
        """The input may be freed once compute has waited for its reader."""
        oldest = self.holding.popleft()
        self.device.current_stream().wait_event(oldest.scattered)
        oldest.source = None

    @property
    def holds_inputs(self) -> bool:
        return bool(self.holding)

    def free_inputs(self) -> None:
        while self.holding:
            self._free_oldest_input()

    def drain(self, bucket: GradientOwner) -> None:
        for flight in [flight for flight in self.in_flight if flight.job.bucket is bucket]:
            self.in_flight.remove(flight)
            self._complete(flight)
        self.holding = deque(flight for flight in self.holding if flight.source is not None)

    def finish(self) -> None:
        self.left_by = None
        while self.unsummed:
            self._sum_over_tp(self.unsummed[0])
        while self.in_flight:
            self._complete(self.in_flight.popleft())
        self.holding.clear()
        self.settle_host()

    def abandon(self) -> None:
        self.left_by = None
        compute = self.device.current_stream()
        for stream in (self.copy_in, self.gather, self.scatter, self.replicate, self.over_tp):
            if stream is not None:
                compute.wait_stream(stream)  # also for what an exception has kept out of our lists
        for flight in self.in_flight:
            self._wait_for(flight)
            flight.job.bucket.grads.in_flight = None
        self.in_flight.clear()
        self.holding.clear()
        self.unsummed.clear()
        self.settle_host()

    def settle_host(self) -> None:
        if self.host_read is not None:
            event, self.host_read = self.host_read, None
            event.synchronize()
