"""CpuComm: asynchronous works. gloo runs them on threads of its own while this one computes."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel3d._compat import let_gloo_finish_at_exit
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.hybrid_bucket import HybridBucket
from parallel3d.fsdp.buckets.joint_gather import JointGather
from parallel3d.fsdp.buckets.reduce_job import ReduceJob
from parallel3d.fsdp.collectives import ScatterWork, all_gather, all_reduce, reduce_scatter

__all__ = ["CpuComm"]

_Reducing = tuple[ReduceJob, list[Any]]  # and the works of its all-reduce


class CpuComm:
    """See ``comm.Comm`` for the methods.

    Reductions are a pipeline of two stages. A bucket's all-reduce over replicate needs the result of its
    reduce-scatter, and waiting for that right away would block the backward; so it is issued when
    the next bucket is reduced, by which time the reduce-scatter has had a unit's compute to finish in.

    Attributes:
        scattering: reductions whose reduce-scatter is under way, oldest first; at most ``max_inputs``.
        reducing: those whose all-reduce is.
    """

    def __init__(self) -> None:
        self.max_inputs = 1
        self.post_optim_event: Any = None  # nothing here runs ahead of the optimizer
        self.scattering: deque[tuple[ReduceJob, ScatterWork | None]] = deque()
        self.reducing: deque[_Reducing] = deque()
        self.left_by: Any = None
        self._ref = weakref.ref(self)
        let_gloo_finish_at_exit()

    # -- all-gather ----------------------------------------------------------------------------------

    def issue_gather(self, bucket: Bucket | JointGather) -> None:
        """See ``Comm``."""
        if bucket.shard_group is None:
            return
        if bucket.gathering is not None:  # left behind by an exception; it writes to our buffer
            _wait_quietly(bucket.gathering[0])
        outputs, parts = bucket.gather_buffers()
        work = all_gather(
            outputs, parts, bucket.gather_group, unit=bucket.unit, comm=bucket.gather_comm
        )
        bucket.gathering = (work, parts)  # gloo reads ``parts`` until it is done

    def finish_gather(self, bucket: Bucket | JointGather) -> None:
        """See ``Comm``."""
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
        if bucket.part is not None:
            bucket.drop_part()

    def renew_copy(self, bucket: HybridBucket) -> None:
        """See ``Comm``."""
        bucket.finish_renewal()
        output, part = bucket.renewal()
        assert bucket.second_group is not None
        work = all_gather(output, part, bucket.second_group, unit=bucket.unit)
        bucket.begin_renewal(work, part)

    # -- reduction -----------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, *, all_reduce: bool) -> None:
        """See ``Comm``. Earlier buckets' all-reduces go behind this reduce-scatter: on one link they would
        delay it, and the gather half-way through the next backward waits for it."""
        self.drain(bucket)  # before what is scattered and not summed yet is among the others
        scattered: list[_Reducing] = []
        while len(self.scattering) >= self.max_inputs:
            scattered.append(self._take_scattered())
        job = bucket.grads.start(all_reduce=all_reduce)
        work = None
        if bucket.scatter_group is not None:
            work = _scatter(bucket, job.inputs, bucket.scatter_group, bucket.scatter_comm)
        self.scattering.append((job, work))
        bucket.grads.in_flight = self._ref
        for entry in scattered:
            self._sum_over_replicate(*entry)
        if work is None and len(self.scattering) == 1:
            self._advance()  # nothing is scattered, so there is nothing to let run first
        if bucket.guard is not None:
            self._complete_early()

    def _complete_early(self) -> None:
        """Hands over gradients to be used within the backward, but those whose all-reduce has just begun."""
        for entry in list(self.reducing):
            job, works = entry
            if job.bucket.guard is not None and not (works and entry is self.reducing[-1]):
                self.reducing.remove(entry)
                self._complete(job, works)

    def _advance(self) -> None:
        """Moves the oldest bucket whose reduce-scatter is under way on to its all-reduce."""
        self._sum_over_replicate(*self._take_scattered())

    def _take_scattered(self) -> _Reducing:
        """The oldest bucket whose reduce-scatter is under way, when that is over and its input is free."""
        job, work = self.scattering.popleft()
        entry: _Reducing = (job, [])
        self.reducing.append(entry)
        job.free_inputs(work)
        return entry

    def _sum_over_replicate(self, job: ReduceJob, works: list[Any]) -> None:
        """Issues the all-reduce of what has been scattered, if one is due; ``works`` gets it."""
        bucket = job.bucket
        job.finish_scatter(None)
        if bucket.second_group is not None:
            if job.final:
                works.append(_scatter(bucket, [job.tensor], bucket.second_group))
            return
        if job.all_reduce:
            reduce = all_reduce if bucket.comm_hook is None else bucket.comm_hook.all_reduce
            for group in bucket.replicate_groups:
                # One at a time where there are two: the second sums the first's result.
                for earlier in works:
                    earlier.wait()
                done = reduce(job.tensor, group, unit=bucket.unit)
                works[:] = [done] if done is not None else []
        if bucket.all_reduce_hook is not None and not bucket.replicate_groups:
            bucket.all_reduce_hook(job.tensor)

    def _complete(self, job: ReduceJob, works: list[Any]) -> None:
        bucket = job.bucket
        for work in works:
            if bucket.second_group is None:
                work.wait()
            else:
                job.tensor = work.wait()
        job.finish_sum()
        over_replicate = bucket.replicate_groups or bucket.second_group is not None
        if bucket.all_reduce_hook is not None and over_replicate and job.final:
            bucket.all_reduce_hook(job.tensor)
        bucket.grads.finish(job)

    @property
    def holds_inputs(self) -> bool:
        """See ``Comm``."""
        return bool(self.scattering)

    def free_inputs(self) -> None:
        """See ``Comm``. All-reduces are issued later: on one link they would delay the next gather."""
        for job, work in self.scattering:
            job.free_inputs(work)

    def drain(self, bucket: Bucket) -> None:
        """See ``Comm``."""
        while any(job.bucket is bucket for job, _ in self.scattering):
            self._advance()
        for entry in [entry for entry in self.reducing if entry[0].bucket is bucket]:
            self.reducing.remove(entry)
            self._complete(*entry)

    def finish(self) -> None:
        """See ``Comm``."""
        self.left_by = None
        while self.scattering:
            # What has come is put away while the last reductions communicate: nobody computes any more. The
            # newest all-reduce may still run, and the next one must not wait for it.
            while self.reducing and not (self.reducing[0][1] and len(self.reducing) == 1):
                self._complete(*self.reducing.popleft())
            self._advance()
        while self.reducing:
            self._complete(*self.reducing.popleft())

    def abandon(self) -> None:
        """See ``Comm``."""
        self.left_by = None
        for job, scatter in self.scattering:
            if scatter is not None:
                _wait_quietly(scatter.work)
            job.bucket.grads.in_flight = None
        for job, works in self.reducing:
            for work in works:
                _wait_quietly(work)
            job.bucket.grads.in_flight = None
        self.scattering.clear()
        self.reducing.clear()

    def settle_host(self) -> None:
        """See ``Comm``: every copy is over when its call returns."""


def _scatter(
    bucket: Bucket,
    inputs: list[torch.Tensor],
    group: ProcessGroup,
    comm: Any = None,
) -> ScatterWork:
    """A reduce-scatter, or what the user has put in its place."""
    if bucket.comm_hook is not None:
        return bucket.comm_hook.reduce_scatter(inputs[0], group, unit=bucket.unit)
    return reduce_scatter(inputs, group, unit=bucket.unit, device_type="cpu", comm=comm)


def _wait_quietly(work: Any) -> None:
    """The result isn't wanted; what has gone wrong in it is not our exception."""
    if work is not None:
        with suppress(RuntimeError):
            work.wait()
