"""When a bucket's collectives are issued and waited for: streams on accelerators, async works on CPU.

Both classes have the same four calls: ``issue_gather`` / ``finish_gather`` around an all-gather, ``reduce``
to issue a reduction, ``finish`` at the end of backward. Every rank makes them in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.collectives import ScatterWork, all_gather, all_reduce, reduce_scatter
from parallel3d.fsdp.grads import ReduceJob

__all__ = ["Comm", "CpuComm", "StreamComm", "make_comm"]


class Comm(Protocol):
    """What a unit asks of the communication side."""

    def issue_gather(self, bucket: Bucket) -> None:
        """Starts the all-gather of ``bucket``."""

    def finish_gather(self, bucket: Bucket) -> None:
        """Makes ``bucket``'s unsharded parameters ready for use."""

    def reduce(self, bucket: Bucket, *, all_reduce: bool) -> None:
        """Starts the reduction of the gradients ``bucket`` has collected."""

    def finish(self) -> None:
        """Completes every reduction and puts the results into ``.grad``."""


def make_comm(device_type: str) -> Comm:
    """Streams where the device has them, asynchronous works otherwise."""
    if device_type in ("cpu", "meta"):
        return CpuComm()
    return StreamComm(torch.get_device_module(device_type))


def _finish_scatter(job: ReduceJob, work: ScatterWork | None) -> None:
    """After the reduce-scatter: scale, sum partial gradients over tp, add earlier partial sums."""
    bucket = job.bucket
    if work is not None:
        job.tensor = work.wait()
    if job.scale != 1.0:
        job.tensor.mul_(job.scale)
    if bucket.tp_group is not None:
        tail = job.tensor.narrow(0, bucket.partial_start, bucket.numel - bucket.partial_start)
        done = all_reduce(tail, bucket.tp_group, unit=bucket.unit)
        if done is not None:
            done.wait()
    if job.earlier is not None:
        job.tensor.add_(job.earlier)


class CpuComm:
    """Asynchronous works. gloo runs them on threads of its own while this one computes.

    Reductions are a pipeline of two stages. A bucket's all-reduce over replicate needs the result of its
    reduce-scatter, and waiting for that right away would block the backward; so it is issued when
    the next bucket is reduced, by which time the reduce-scatter has had a unit's compute to finish in.
    """

    def __init__(self) -> None:
        self.scattering: tuple[ReduceJob, ScatterWork | None] | None = None
        self.reducing: list[tuple[ReduceJob, list[Any]]] = []

    def issue_gather(self, bucket: Bucket) -> None:
        """See ``Comm``."""
        if bucket.shard_group is None:
            return
        output, part = bucket.gather_buffers()
        work = all_gather(output, part, bucket.shard_group, unit=bucket.unit)
        bucket.gathering = (work, part)  # gloo reads ``part`` until it is done

    def finish_gather(self, bucket: Bucket) -> None:
        """See ``Comm``."""
        if bucket.shard_group is None:
            bucket.cast_whole()
            return
        (work, _), bucket.gathering = bucket.gathering, None
        if work is not None:
            work.wait()
        bucket.copy_out()
        bucket.free_gathered()

    def reduce(self, bucket: Bucket, *, all_reduce: bool) -> None:
        """See ``Comm``."""
        self._advance()
        job = bucket.grads.start(all_reduce=all_reduce)
        work = None
        if bucket.shard_group is not None:
            work = reduce_scatter(
                job.tensor, bucket.shard_group, unit=bucket.unit, device_type="cpu"
            )
        self.scattering = (job, work)

    def _advance(self) -> None:
        """Moves the bucket whose reduce-scatter is under way on to its all-reduce."""
        if self.scattering is None:
            return
        job, work = self.scattering
        self.scattering = None
        _finish_scatter(job, work)
        works: list[Any] = []
        if job.all_reduce:
            for group in job.bucket.replicate_groups:
                # One at a time where there are two: the second sums the first's result.
                for earlier in works:
                    earlier.wait()
                done = all_reduce(job.tensor, group, unit=job.bucket.unit)
                works = [done] if done is not None else []
        self.reducing.append((job, works))

    def finish(self) -> None:
        """See ``Comm``."""
        self._advance()
        for job, works in self.reducing:
            for work in works:
                work.wait()
            job.bucket.grads.finish(job)
        self.reducing.clear()


@dataclass
class _InFlight:
    job: ReduceJob
    source: torch.Tensor  # the reduce-scatter's input, allocated on the compute stream
    scattered: Any  # event: the input has been read
    done: Any  # event: the result is final


class StreamComm:
    """Four streams beside the compute stream, on any accelerator with CUDA's stream interface.

    - copy_in (high priority): casts shards and allocates gather buffers, off the compute stream.
    - gather (high): all-gathers; what compute waits for next, so it goes before other kernels.
    - scatter (high): reduce-scatters; apart from ``gather`` so that neither queues behind the other.
    - replicate (normal): HSDP's all-reduces, so that one overlaps the next bucket's reduce-scatter.

    No memory is handed back while a stream may still read it. Buffers of the copy_in pool are freed from
    the CPU at once, which is safe because copy_in waits for the compute stream before each new use;
    buffers of the compute pool that another stream reads are held until compute has waited for it.
    """

    def __init__(self, device_module: Any) -> None:
        self.device = device_module
        self.copy_in = device_module.Stream(priority=-1)
        self.gather = device_module.Stream(priority=-1)
        self.scatter = device_module.Stream(priority=-1)
        self.replicate = device_module.Stream()
        self.in_flight: list[_InFlight] = []

    def issue_gather(self, bucket: Bucket) -> None:
        """See ``Comm``."""
        if bucket.shard_group is None:
            return
        # The optimizer wrote the shards, and the last reader of this pool's memory ran, on compute.
        self.copy_in.wait_stream(self.device.current_stream())
        with self.device.stream(self.copy_in):
            output, part = bucket.gather_buffers()
        self.gather.wait_stream(self.copy_in)  # the cast shards must be there
        with self.device.stream(self.gather):
            work = all_gather(output, part, bucket.shard_group, unit=bucket.unit)
            if work is not None:
                work.wait()  # the backend's own stream -> ours; does not block the CPU
            event = self.gather.record_event()
        # ``part`` stays alive until compute has waited for the gather that reads it.
        bucket.gathering = (event, part)

    def finish_gather(self, bucket: Bucket) -> None:
        """See ``Comm``."""
        if bucket.shard_group is None:
            bucket.cast_whole()
            return
        (event, _), bucket.gathering = bucket.gathering, None
        self.device.current_stream().wait_event(event)
        bucket.copy_out()
        bucket.free_gathered()

    def reduce(self, bucket: Bucket, *, all_reduce: bool) -> None:
        """See ``Comm``."""
        compute = self.device.current_stream()
        if self.in_flight:
            # One reduce input at a time: the one before may be freed once compute has waited for it.
            last = self.in_flight[-1]
            compute.wait_event(last.scattered)
            last.source = last.job.tensor
        job = bucket.grads.start(all_reduce=all_reduce)
        source = job.tensor
        self.scatter.wait_stream(compute)  # the gradients were copied in on compute
        with self.device.stream(self.scatter):
            work = None
            if bucket.shard_group is not None:
                work = reduce_scatter(
                    source,
                    bucket.shard_group,
                    unit=bucket.unit,
                    device_type=source.device.type,
                )
            _finish_scatter(job, work)
            scattered = self.scatter.record_event()
        done = self._all_reduce(job, scattered) if job.all_reduce else scattered
        self.in_flight.append(_InFlight(job, source, scattered, done))

    def _all_reduce(self, job: ReduceJob, scattered: Any) -> Any:
        if not job.bucket.replicate_groups:
            return scattered
        self.replicate.wait_event(scattered)  # it sums the reduce-scatter's result
        with self.device.stream(self.replicate):
            for group in job.bucket.replicate_groups:
                work = all_reduce(job.tensor, group, unit=job.bucket.unit)
                if work is not None:
                    work.wait()
            return self.replicate.record_event()

    def finish(self) -> None:
        """See ``Comm``."""
        compute = self.device.current_stream()
        for flight in self.in_flight:
            compute.wait_event(flight.scattered)
            compute.wait_event(flight.done)
            flight.job.bucket.grads.finish(flight.job)
        self.in_flight.clear()
