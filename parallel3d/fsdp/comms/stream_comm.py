"""StreamComm: collectives on streams beside the compute stream."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.hybrid_bucket import HybridBucket
from parallel3d.fsdp.buckets.joint_gather import JointGather
from parallel3d.fsdp.buckets.offload import copy_home
from parallel3d.fsdp.buckets.reduce_job import ReduceJob
from parallel3d.fsdp.collectives import ScatterWork, all_gather, all_reduce, reduce_scatter

__all__ = ["StreamComm"]


@dataclass(eq=False)
class _InFlight:
    job: ReduceJob
    source: (
        list[torch.Tensor] | None
    )  # the reduce-scatter's inputs, allocated on the compute stream
    scattered: Any  # event: the input has been read
    done: Any  # event: what has been put on streams for it is over; at last the result is final
    on_device: torch.Tensor | None = None  # what the result was copied home from
    between: torch.Tensor | None = None  # what the second reduce-scatter of HFSDP reads


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

    See ``comm.Comm`` for the methods.

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

    def issue_gather(self, bucket: Bucket | JointGather) -> None:
        """See ``Comm``."""
        if bucket.shard_group is None and not bucket.offloaded:
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
                work = all_gather(
                    outputs, parts, bucket.gather_group, unit=bucket.unit, comm=bucket.gather_comm
                )
                if work is not None:
                    work.wait()  # the backend's own stream -> ours; does not block the CPU
            event = self.gather.record_event()
        # ``parts`` stay alive until compute has waited for the gather that reads it.
        bucket.gathering = (event, parts)
        if bucket.offloaded:
            self.host_read = event

    def finish_gather(self, bucket: Bucket | JointGather) -> None:
        """See ``Comm``."""
        if bucket.shard_group is None and not bucket.offloaded:
            bucket.cast_whole()
            return
        if bucket.gathering is None:  # an interruption came after the copy
            return
        event, _ = bucket.gathering
        self.device.current_stream().wait_event(event)
        bucket.copy_out()
        bucket.gathering = None  # before what it would copy again is freed
        bucket.free_gathered()
        if bucket.part is not None:
            bucket.drop_part()

    def renew_copy(self, bucket: HybridBucket) -> None:
        """See ``Comm``."""
        assert bucket.second_group is not None
        # The optimizer wrote the shards on compute; earlier gathers read the copy on ``gather``.
        self.replicate.wait_stream(self.device.current_stream())
        self.replicate.wait_stream(self.gather)
        with self.device.stream(self.replicate):
            output, part = bucket.renewal()
            work = all_gather(output, part, bucket.second_group, unit=bucket.unit)
            if work is not None:
                work.wait()
            # ``part`` may go at once: its memory is of this stream's pool.
            event = self.replicate.record_event()
            bucket.begin_renewal(event, part)
        if bucket.offloaded:
            self.host_read = event

    # -- reduction -----------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, *, all_reduce: bool) -> None:
        """See ``Comm``."""
        compute = self.device.current_stream()
        while len(self.holding) >= self.max_inputs:
            self._free_oldest_input()
        while len(self.unsummed) >= self.max_inputs:
            self._sum_over_tp(self.unsummed[0])
        job = bucket.grads.start(all_reduce=all_reduce)
        source = job.inputs
        self.scatter.wait_stream(compute)  # the gradients were copied in on compute
        with self.device.stream(self.scatter):
            work = None
            if bucket.scatter_group is not None:
                work = _scatter(bucket, source, bucket.scatter_group, bucket.scatter_comm)
            job.free_inputs(work)
            later = work is not None and bucket.tp_group is not None
            if not later:
                job.finish_scatter(None)
            scattered = self.scatter.record_event()
        flight = _InFlight(job, source, scattered, done=scattered)
        self.in_flight.append(flight)
        self.holding.append(flight)
        bucket.grads.in_flight = self._ref
        if later:
            self.unsummed.append(flight)
        else:
            self._go_on(flight, self.scatter)
        if bucket.guard is not None:
            self._complete_early(flight)

    def _sum_over_tp(self, flight: _InFlight) -> None:
        """What comes after its reduce-scatter, if a sum over tp does; all ranks call it at the same place."""
        if flight not in self.unsummed:
            return
        self.unsummed.remove(flight)
        if self.over_tp is None:
            self.over_tp = self.device.Stream(priority=-1)
        self.over_tp.wait_event(flight.scattered)
        with self.device.stream(self.over_tp):
            flight.job.finish_scatter(None)
            flight.done = self.over_tp.record_event()
        self._go_on(flight, self.over_tp)

    def _go_on(self, flight: _InFlight, stream: Any) -> None:
        """What comes after the sum over tp; ``stream``: what it is on."""
        last = self._all_reduce(flight, stream)
        if flight.job.bucket.offloaded:
            self._copy_home(flight, last)

    def _complete_early(self, newest: _InFlight) -> None:
        """Hands over gradients to be used within the backward, but the newest."""
        for flight in list(self.in_flight):
            if flight.job.bucket.guard is not None and flight is not newest:
                self.in_flight.remove(flight)
                self._complete(flight)
        self.holding = deque(flight for flight in self.holding if flight.source is not None)

    def _all_reduce(self, flight: _InFlight, last: Any) -> Any:
        """The sum over replicate, after what is on the stream ``last``; returns that of its last step."""
        job = flight.job
        bucket = job.bucket
        if bucket.second_group is not None and job.final:
            last = self._scatter_again(flight, bucket.second_group)
        elif job.all_reduce and bucket.replicate_groups:
            last = self.replicate
            last.wait_event(flight.done)  # it sums the reduce-scatter's result
            reduce = all_reduce if bucket.comm_hook is None else bucket.comm_hook.all_reduce
            with self.device.stream(last):
                for group in bucket.replicate_groups:
                    work = reduce(job.tensor, group, unit=bucket.unit)
                    if work is not None:
                        work.wait()
                job.finish_sum()
                flight.done = last.record_event()
        if bucket.all_reduce_hook is not None and job.final:
            last = bucket.all_reduce_hook_stream or self.replicate
            last.wait_event(flight.done)
            with self.device.stream(last):
                try:
                    bucket.all_reduce_hook(job.tensor)
                finally:  # what it has put on the stream before it raised reads the result
                    flight.done = last.record_event()
        return last

    def _scatter_again(self, flight: _InFlight, group: ProcessGroup) -> Any:
        """HFSDP's second reduce-scatter, over replicate; returns its stream."""
        job, stream = flight.job, self.replicate
        stream.wait_event(flight.done)  # it sums the first one's result
        flight.between = between = job.tensor
        with self.device.stream(stream):
            job.tensor = _scatter(job.bucket, [between], group).wait()
            job.finish_sum()
            flight.done = stream.record_event()
        return stream

    def _copy_home(self, flight: _InFlight, stream: Any) -> None:
        """Copies the result to the CPU; ``_complete`` lets the CPU wait before anyone reads it."""
        job = flight.job
        flight.on_device = job.tensor
        with self.device.stream(stream):
            job.tensor = copy_home(job.bucket, flight.on_device, final=job.final)
            flight.done = stream.record_event()

    def _complete(self, flight: _InFlight) -> None:
        self._sum_over_tp(flight)
        self._wait_for(flight)
        if flight.on_device is not None:
            flight.done.synchronize()  # .grad is in the CPU's memory, which knows no streams
        flight.job.bucket.grads.finish(flight.job)

    def _wait_for(self, flight: _InFlight) -> None:
        compute = self.device.current_stream()
        compute.wait_event(flight.scattered)
        compute.wait_event(flight.done)
        flight.source = flight.between = None

    def _free_oldest_input(self) -> None:
        """The input may be freed once compute has waited for its reader."""
        oldest = self.holding.popleft()
        self.device.current_stream().wait_event(oldest.scattered)
        oldest.source = None

    @property
    def holds_inputs(self) -> bool:
        """See ``Comm``."""
        return bool(self.holding)

    def free_inputs(self) -> None:
        """See ``Comm``."""
        while self.holding:
            self._free_oldest_input()

    def drain(self, bucket: Bucket) -> None:
        """See ``Comm``."""
        for flight in [flight for flight in self.in_flight if flight.job.bucket is bucket]:
            self.in_flight.remove(flight)
            self._complete(flight)
        self.holding = deque(flight for flight in self.holding if flight.source is not None)

    def finish(self) -> None:
        """See ``Comm``."""
        self.left_by = None
        while self.unsummed:
            self._sum_over_tp(self.unsummed[0])
        while self.in_flight:
            self._complete(self.in_flight.popleft())
        self.holding.clear()
        self.settle_host()

    def abandon(self) -> None:
        """See ``Comm``."""
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
        """See ``Comm``."""
        if self.host_read is not None:
            event, self.host_read = self.host_read, None
            event.synchronize()


def _scatter(
    bucket: Bucket,
    inputs: list[torch.Tensor],
    group: ProcessGroup,
    comm: Any = None,
) -> ScatterWork:
    """A reduce-scatter, or what the user has put in its place."""
    if bucket.comm_hook is not None:
        return bucket.comm_hook.reduce_scatter(inputs[0], group, unit=bucket.unit)
    return reduce_scatter(
        inputs, group, unit=bucket.unit, device_type=inputs[0].device.type, comm=comm
    )
