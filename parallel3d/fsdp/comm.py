"""Comm: when collectives are issued and waited for; on the CPU they are asynchronous works.

``issue_gather`` and ``finish_gather`` begin and end an all-gather, ``reduce`` issues a reduction, ``finish``
ends those of a backward. Every rank makes these calls in the same order. What a reduction consists of is said
in ``reduction``; the lanes of its stages become works here, and streams in ``streams``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from parallel3d._torch.groups import let_gloo_finish_at_exit
from parallel3d.fsdp.reduction import Reduced, Reduction, Stage


class Gather(Protocol):
    """What one all-gather brings: a ``bucket.Bucket``, or a ``group.CoalescedGather`` of several."""

    gathering: Any
    reads_host: bool
    shard_group: ProcessGroup | None

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...
    def start_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any: ...
    def unshard_without_gather(self) -> None: ...
    def copy_out(self) -> None: ...
    def free_gathered(self) -> None: ...


class Comm(Protocol):
    """The communication of the units under one root, or under several roots that share it.

    Attributes:
        max_inputs: how many inputs of reduce-scatters may be in flight.
        post_optim_event: an event that the next all-gather waits for instead of the current stream.
        left_by: a weak reference to the context whose last backward has left reductions in flight; or None.
        holding: reductions whose reduce-scatter still holds its inputs, oldest first; at most ``max_inputs``.
    """

    max_inputs: int = 1
    post_optim_event: Any = None
    left_by: Any = None
    holding: deque[Any]

    def current_stream(self) -> Any:
        """Returns the current stream, for a hook that calls several methods with it; None on the CPU."""
        return None

    def issue_gather(self, bucket: Gather, compute: Any = None) -> None:
        """Issues the all-gather of ``bucket``; ``compute``: ``current_stream()``, if it is known."""

    def wait_for_gather(self, work: Any, compute: Any) -> None:
        """Waits for the work of an all-gather; on an accelerator ``compute`` waits, for an event."""

    def finish_gather(self, bucket: Gather, compute: Any = None) -> None:
        """Waits for the all-gather, and copies what it brings to the unsharded parameters; ``compute``: as
        above."""
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
        """Issues a collective of the engine's over replicate by ``start``. Later all-gathers read its result.

        Returns the work to wait for, or None. On an accelerator ``wait()`` lets the current stream wait.
        ``reads_host``: whether its input is in the CPU's memory, and an accelerator reads it.
        """

    def reduce(self, bucket: Reduced, *, all_reduce: bool) -> None:
        """Issues the reduction of the gradients of ``bucket``; ``all_reduce``: over replicate too."""

    def free_inputs(self) -> None:
        """Waits for the reduce-scatters under way, and frees their inputs."""

    def drain(self, bucket: Reduced) -> None:
        """Completes the reductions of ``bucket``: their results are in ``.grad``."""

    def finish(self) -> None:
        """Completes every reduction."""

    def abandon(self) -> None:
        """Waits for the reductions in flight after an exception, and drops their results."""

    def settle_host(self) -> None:
        """Returns when nothing reads shards in the CPU's memory any more (CPU offload)."""


class _Running:
    """A reduction on asynchronous works.

    Attributes:
        stage: the stage whose collective is under way; None: no stage is.
        work: the work to wait for.
    """

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
        """Waits for the stage under way and finishes it."""
        stage, work = self.stage, self.work
        self.stage = self.work = None  # what a stage has sent is freed when it has been read
        if stage is not None:
            stage.finish(self.job, work)

    def advance(self, *, to_end: bool = False) -> None:
        """Runs the stages until the last collective is under way; ``to_end``: all of them."""
        self.end_stage()
        while self.job.stages:
            self.start()
            is_last = not any(stage.is_collective for stage in self.job.stages)
            if self.work is not None and is_last and not to_end:
                return
            self.end_stage()

    def complete(self) -> None:
        """Runs all stages, and puts the result into ``.grad``."""
        self.advance(to_end=True)
        self.job.bucket.grads.finish(self.job)


class CpuComm(Comm):
    """Asynchronous works: gloo runs collectives on threads of its own while this thread computes.

    Reductions are a pipeline. The all-reduce of a bucket needs the result of its reduce-scatter, and to wait
    for that at once would block the backward. So the all-reduce is issued when the next bucket is reduced.

    Attributes:
        reducing: reductions in their later stages.
    """

    def __init__(self) -> None:
        self.holding: deque[_Running] = deque()
        self.reducing: deque[_Running] = deque()
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
        self.drain(bucket)  # its earlier reduction of the same backward, before another one begins
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
        """Waits for the oldest reduce-scatter, and returns its reduction."""
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

    def settle_host(self) -> None:
        """There is no such copy: each has ended when its call returns."""


def _wait_quietly(work: Any) -> None:
    """Waits for a work whose result, and error, nobody wants."""
    if work is not None:
        with suppress(RuntimeError):
            work.wait()
