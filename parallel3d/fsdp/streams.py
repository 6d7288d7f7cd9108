"""StreamComm: when collectives are issued and waited for on an accelerator; see ``reduction``."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from parallel3d._util import dry_run
from parallel3d.fsdp.collectives import has_streams
from parallel3d.fsdp.reduction import Comm, CpuComm, Gather, Lane, Reduced, Reduction, Stage


def make_comm(device_type: str) -> Comm:
    """Returns a ``StreamComm`` if work on the device type is put on streams, else a ``CpuComm``."""
    if not has_streams(device_type):
        return CpuComm()
    return StreamComm(dry_run.played or torch.get_device_module(device_type))


class _On:
    """Context manager that makes ``stream`` the current stream, and ``before`` again afterwards. The caller
    knows ``before``, which torch's own context manager would have to ask for.

    If the body raises, ``before`` waits for ``stream``: what was issued uses memory that is then freed.
    """

    def __init__(self, device: Any, stream: Any, before: Any) -> None:
        self.device, self.stream, self.before = device, stream, before

    def __enter__(self) -> None:
        self.device.set_stream(self.stream)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.device.set_stream(self.before)
        if kind is not None:
            self.before.wait_stream(self.stream)


class _InFlight:
    """A reduction of ``StreamComm``, whose stages run on streams.

    Attributes:
        source: the reduce-scatter's inputs, allocated on the compute stream; None when they may be freed.
        held: results of stages that a later stage reads on another stream; kept until compute has waited.
        stream: the stream of the last stage.
        scattered: event after the reduce-scatter, which has then read the inputs.
        done: event after the stages issued so far; None if it was not recorded yet.
    """

    def __init__(self, job: Reduction, stream: Any) -> None:
        self.job = job
        self.source: list[torch.Tensor] | None = job.inputs
        self.held: list[torch.Tensor] = []
        self.stream = stream
        self.scattered: Any = None
        self.done: Any = None

    def free_source(self) -> None:
        """Frees the inputs; called when compute has waited for the reduce-scatter."""
        self.source = None
        if self.job.lent:
            self.job.give_back()

    def end(self) -> Any:
        if self.done is None:
            self.done = self.stream.record_event()
        return self.done


class StreamComm(Comm):
    """The ``Comm`` of accelerators with CUDA's stream interface. Beside the compute stream it has:

    - gather (high priority): casts shards, allocates the all-gather's buffers and gathers. Compute waits for
      its result next, so it must run before other kernels.
    - fetch (high; made if it is needed): copies shards from CPU memory, during the previous all-gather.
    - scatter (high): reduce-scatters, apart from ``gather`` so that neither queues behind the other.
    - replicate (normal): HSDP's all-reduces, so that one overlaps the next bucket's reduce-scatter.
    - over_tp (high; made if it is needed): sums of partial gradients over tp. The layers' collectives use the
      same communicator, which runs one after another: a sum that waits for a reduce-scatter would delay the
      next layer's. So it is issued only after ``max_inputs`` more buckets were reduced, when the
      reduce-scatter is over.

    No memory is freed while a stream may still read it, and ``record_stream`` is not used: events order all
    uses. Buffers allocated on gather and fetch are freed at once, which is safe because these streams wait
    for compute before each new use. Buffers allocated on compute that another stream reads are held until
    compute has waited for that stream.

    The host pays for each event, wait, change of the current stream and query of it. So a hook that calls
    several methods queries it once and passes it on (``current_stream``), an event is recorded only if
    something will wait for exactly it, and compute waits for no event twice.

    Attributes:
        in_flight: reductions whose result is not in ``.grad`` yet, oldest first.
        unsummed: the reductions in flight whose sum over tp was not issued; at most ``max_inputs``.
        host_read: event after the last copy from shards in CPU memory (CPU offload); or None.
    """

    def __init__(self, device_module: Any) -> None:
        self.device = device_module
        self.gather = device_module.Stream(priority=-1)
        self.fetch: Any = None
        self.scatter = device_module.Stream(priority=-1)
        self.replicate = device_module.Stream()
        self.over_tp: Any = None
        self.in_flight: deque[_InFlight] = deque()
        self.holding: deque[_InFlight] = deque()
        self.unsummed: deque[_InFlight] = deque()
        self.host_read: Any = None
        # (stream, event of a reduction that it has waited for)
        self._waited: set[tuple[Any, Any]] = set()
        self._ref = weakref.ref(self)

    def current_stream(self) -> Any:
        return self.device.current_stream()

    # -- all-gather ----------------------------------------------------------------------------------

    def issue_gather(self, bucket: Gather, compute: Any = None) -> None:
        if bucket.shard_group is None and not bucket.reads_host:
            return
        compute = compute or self.device.current_stream()
        if bucket.gathering is not None:  # of a forward that has raised; it uses the same buffers
            compute.wait_event(bucket.gathering[0])
        stream = self.gather
        if bucket.reads_host:
            if self.fetch is None:
                self.fetch = self.device.Stream(priority=-1)
            stream = self.fetch
        if self.post_optim_event is None or dry_run.is_capturing():
            # The optimizer, and the last reader of this pool's memory, run on compute. (A CUDA graph can't
            # wait for an event from before it.)
            stream.wait_stream(compute)
        else:  # the user says that both are over then; later kernels on compute do not delay the all-gather
            stream.wait_event(self.post_optim_event)
        self.post_optim_event = None
        with _On(self.device, stream, compute):
            outputs, inputs = bucket.gather_buffers()
            if bucket.shard_group is None:
                outputs[0].copy_(inputs[0])
            else:
                if stream is self.fetch:
                    stream = self.gather
                    stream.wait_stream(self.fetch)  # the fetched shards must be there
                    self.device.set_stream(stream)
                work = bucket.start_gather(outputs, inputs)
                if work is not None:
                    work.wait()  # of a collective of the user's: lets this stream wait for it
        event = stream.record_event()
        # Held until compute has waited for the all-gather: those of the fetch pool are read on gather.
        bucket.gathering = event, inputs
        if bucket.reads_host:
            self.host_read = event

    def wait_for_gather(self, work: Any, compute: Any) -> None:
        compute = compute or self.device.current_stream()
        compute.wait_event(work)

    def run_over_replicate(self, start: Callable[[], Any], *, reads_host: bool) -> Any:
        compute = self.device.current_stream()
        # The optimizer has written the shards on compute; earlier all-gathers read the last result on gather,
        # which waits for compute as a CUDA graph must not wait for what is outside it.
        self.gather.wait_stream(compute)
        self.replicate.wait_stream(self.gather)
        with _On(self.device, self.replicate, compute):
            start()
        event = self.replicate.record_event()
        if reads_host:
            self.host_read = event
        return event

    # -- reduction -----------------------------------------------------------------------------------

    def reduce(self, bucket: Reduced, *, all_reduce: bool) -> None:
        compute = self.device.current_stream()
        self._free_inputs(compute, at_most=self.max_inputs - 1)
        while len(self.unsummed) >= self.max_inputs:
            self._sum_over_tp(self.unsummed[0], compute)
        flight = _InFlight(bucket.grads.start(all_reduce=all_reduce), self.scatter)
        self.scatter.wait_stream(compute)  # the inputs were written on compute
        self._run_lane(flight, compute)
        flight.scattered = flight.end()
        self.in_flight.append(flight)
        self.holding.append(flight)
        bucket.grads.in_flight = self._ref
        stages = flight.job.stages
        if stages and stages[0].lane is Lane.TP and flight.job.bucket.scatter_group is not None:
            self.unsummed.append(flight)
        else:
            self._run(flight, compute)
        if bucket.settings.on_reduced is not None:  # gradients that are used within the backward
            early = [f for f in self.in_flight if f.job.bucket.settings.on_reduced is not None]
            self._complete_all((each for each in early if each is not flight), compute)

    def _run(self, flight: _InFlight, compute: Any) -> None:
        while flight.job.stages:
            self._run_lane(flight, compute)
        if flight.job.on_host or flight.job.bucket.settings.on_reduced is not None:
            flight.end()  # it is waited for alone

    def _run_lane(self, flight: _InFlight, compute: Any) -> None:
        """Issues the next stage of ``flight`` on its stream, and those after it that use the same stream."""
        job = flight.job
        stream = self._stream_of(job.stages[0], flight)
        if stream is not flight.stream:
            stream.wait_event(flight.end())  # the stage reads the last one's result
            flight.held.append(job.tensor)
            flight.stream = stream
        flight.done = None  # it has raised, perhaps, when kernels that read the result were issued
        with _On(self.device, stream, compute):
            while job.stages and self._stream_of(job.stages[0], flight) is stream:
                stage = job.stages.pop(0)
                stage.finish(job, stage.start(job))

    def _stream_of(self, stage: Stage, flight: _InFlight) -> Any:
        if stage.stream is not None:
            return stage.stream
        if stage.lane is Lane.SCATTER:
            return self.scatter
        if stage.lane is Lane.REPLICATE:
            return self.replicate
        if stage.lane is Lane.TP and flight.job.bucket.scatter_group is not None:
            if self.over_tp is None:
                self.over_tp = self.device.Stream(priority=-1)
            return self.over_tp
        return flight.stream

    def _sum_over_tp(self, flight: _InFlight, compute: Any) -> None:
        """Issues the sum over tp and all later stages of ``flight``, unless that was done."""
        if flight in self.unsummed:
            self.unsummed.remove(flight)
            self._run(flight, compute)

    def _complete_all(self, flights: Iterable[_InFlight], compute: Any) -> None:
        for flight in flights:
            self.in_flight.remove(flight)
            self._complete(flight, compute)
        self.holding = deque(flight for flight in self.holding if flight.source is not None)

    def _complete(self, flight: _InFlight, compute: Any) -> None:
        """Issues the remaining stages of ``flight``, and adds its result to ``.grad``."""
        self._sum_over_tp(flight, compute)
        self._wait_for(flight, compute)
        if flight.job.on_host:
            flight.done.synchronize()  # whoever reads the CPU's memory waits for no stream
        flight.job.bucket.grads.finish(flight.job)

    def _wait_for(self, flight: _InFlight, compute: Any) -> None:
        """Makes compute wait for all stages of ``flight``, and frees the buffers that they have read."""
        if flight.done is None:  # one event tells the end of all that are on this stream
            for other in self.in_flight:
                if other.done is None and other.stream is flight.stream and not other.job.stages:
                    other.done = flight.end()
        self._wait_once(flight.end(), compute)  # which comes after ``scattered``
        flight.free_source()
        flight.held.clear()

    def _wait_once(self, event: Any, compute: Any) -> None:
        if (compute, event) not in self._waited:
            self._waited.add((compute, event))
            compute.wait_event(event)

    def _free_inputs(self, compute: Any, at_most: int) -> None:
        """Makes compute wait for the oldest reduce-scatters and frees their inputs, except ``at_most``."""
        while len(self.holding) > at_most:
            oldest = self.holding.popleft()
            self._wait_once(oldest.scattered, compute)
            oldest.free_source()

    def free_inputs(self) -> None:
        if self.holding:
            self._free_inputs(self.device.current_stream(), at_most=0)

    def drain(self, bucket: Reduced) -> None:
        flights = [f for f in self.in_flight if f.job.bucket is bucket]
        self._complete_all(flights, self.device.current_stream())

    def finish(self) -> None:
        self.left_by = None
        compute = self.device.current_stream()
        while self.unsummed:
            self._sum_over_tp(self.unsummed[0], compute)
        while self.in_flight:
            self._complete(self.in_flight.popleft(), compute)
        self.holding.clear()
        self._waited.clear()
        self.settle_host()

    def abandon(self) -> None:
        self.left_by = None
        compute = self.device.current_stream()
        for stream in (self.fetch, self.gather, self.scatter, self.replicate, self.over_tp):
            if stream is not None:
                compute.wait_stream(stream)  # also for what the exception has kept out of the lists
        for flight in self.in_flight:
            self._wait_for(flight, compute)
            flight.job.bucket.grads.in_flight = None
        self.in_flight.clear()
        self.holding.clear()
        self.unsummed.clear()
        self._waited.clear()
        self.settle_host()

    def settle_host(self) -> None:
        if self.host_read is not None:
            event, self.host_read = self.host_read, None
            event.synchronize()
