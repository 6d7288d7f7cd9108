"""What disturbs a training: random delays on every stream, freed memory filled with NaN, a slow network.

The network is this process alone. It acts as one rank of many whose peers have what it has: a gather repeats
its part, a sum multiplies. Each process group works on a stream of its own, as NCCL does, so that delays may
be put there too. On a CPU, where there are no streams, a result is written when it is waited for, and is NaN
before.
"""

from __future__ import annotations

import math
import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from _support.emulated import EmulatedGroup, EmulatedNetwork, Link
from torch import distributed as dist
from torch import nn

from parallel3d._util.recorder import op_of
from parallel3d._util.trees import tensors_in
from parallel3d.fsdp import bucket, coalesced, reduction, streams
from parallel3d.fsdp.options import hfsdp, memory

MOST_SIZES = 24  # of freed memory that is filled


class Disturber:
    """Delays and NaN, drawn from a seed.

    Attributes:
        device_type: ``cuda`` or ``cpu``.
        random: None: nothing is disturbed.
        sizes: bytes of the buffers seen so far. Free memory of these sizes is filled with NaN.
        points: how many times something was disturbed.
    """

    def __init__(self, device_type: str, most_ms: float) -> None:
        self.is_cuda = device_type == "cuda"
        self.most_ms = most_ms
        self.random: random.Random | None = None
        self.sizes: dict[int, None] = {}
        self.points = 0
        self.cycles_per_ms = self._calibrate() if self.is_cuda else 0.0

    def _calibrate(self) -> float:
        """The cycles that the GPU sleeps in a millisecond: of the second sleep, as the first wakes it up."""
        cycles = 20_000_000
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
        # No GPU's clock is much above 2 GHz: a wrong measurement must not make delays of minutes.
        return min(cycles / max(begin.elapsed_time(end), 1e-3), 2.5e6)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Disturbs what runs in the body."""
        self.random = random.Random(seed)
        try:
            yield
        finally:
            self.random = None

    def delay(self) -> None:
        """Keeps the current stream busy for a random time, or this thread for up to 2 ms on a CPU."""
        if self.random is None:
            return
        self.points += 1
        kind, share = self.random.random(), self.random.random()
        if kind < 0.5:
            return
        # Most are about as long as a small kernel, some longer than all that is queued behind it.
        ms = share * (self.most_ms if kind > 0.85 else 0.1 * self.most_ms)
        if self.is_cuda:
            torch.cuda._sleep(max(1, int(ms * self.cycles_per_ms)))
        else:
            time.sleep(min(ms, 2.0) * 1e-3)

    def see(self, *values: Any) -> None:
        """Notes the sizes of tensors."""
        for tensor in tensors_in(values):
            size = tensor.numel() * tensor.element_size()
            if size and len(self.sizes) < MOST_SIZES:
                self.sizes.setdefault(size)

    def poison(self) -> None:
        """Fills free memory of the current stream with NaN: allocates it, writes and frees it again.

        An engine may do that itself at this point, in a reader that follows.
        """
        if self.random is None or not self.is_cuda:
            return
        taken = [
            torch.empty(size, dtype=torch.uint8, device="cuda")
            for size in self.sizes
            for _ in range(3)
        ]
        for tensor in taken:
            tensor.fill_(255)  # all bits set: NaN in every floating-point dtype

    def point(self) -> None:
        """A delay, and then NaN."""
        self.delay()
        self.poison()


def delay_modules(model: nn.Module, disturber: Disturber) -> None:
    """Delays the compute stream before and after each linear layer, in forward and in backward.

    By hooks of all modules: a layer that tp splits refuses hooks of its own, which would see parts.
    """
    linears = {id(module) for module in model.modules() if isinstance(module, nn.Linear)}

    def before(module: nn.Module, args: Any) -> None:
        if id(module) in linears:
            disturber.point()

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if id(module) in linears:
            disturber.point()
            if output.requires_grad:
                output.register_hook(in_backward)

    def in_backward(grad: torch.Tensor) -> None:
        disturber.point()

    for handle in (
        nn.modules.module.register_module_forward_pre_hook(before),
        nn.modules.module.register_module_forward_hook(after),
    ):
        weakref.finalize(model, handle.remove)


@contextmanager
def disturb_engine(disturber: Disturber) -> Iterator[None]:
    """Disturbs what our engine puts on a stream: before and after it, on that stream."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def disturbed(*args: Any, **kwargs: Any) -> Any:
            disturber.see(*(a for a in args if isinstance(a, (torch.Tensor, list))))
            disturber.point()
            result = original(*args, **kwargs)
            if isinstance(result, tuple):
                disturber.see(*result)
            disturber.delay()
            return result

        return disturbed

    def then_poison(original: Callable[..., Any]) -> Callable[..., Any]:
        """For what frees memory."""

        def freeing(*args: Any, **kwargs: Any) -> Any:
            disturber.see(*(a for a in args if isinstance(a, torch.Tensor)))
            result = original(*args, **kwargs)
            disturber.poison()
            return result

        return freeing

    operations: list[tuple[Any, str]] = [
        (bucket.Bucket, "gather_buffers"),  # casts shards, on gather, and fetches them, on fetch
        (coalesced.CoalescedGather, "gather_buffers"),
        (bucket, "all_gather"),
        (coalesced, "all_gather"),
        (hfsdp, "all_gather"),
        (bucket.Bucket, "copy_out"),
        (reduction.Reducer, "reduce_scatter"),
        (reduction.Reducer, "all_reduce"),
        (reduction, "sum_over_tp"),
        (memory.CopyToHost, "finish"),
    ]
    frees: list[tuple[Any, str]] = [
        (reduction.BucketMemory, "release"),
        (streams.StreamComm, "finish_gather"),
        (streams.StreamComm, "_wait_for"),
        (streams.StreamComm, "_free_inputs"),
    ]
    with ExitStack() as stack:
        for wrap, places in ((around, operations), (then_poison, frees)):
            for owner, name in places:
                stack.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
        yield


# -- a network of one process ---------------------------------------------------------------------------


@contextmanager
def network_of_one(world: int, disturber: Disturber) -> Iterator[EmulatedNetwork]:
    """This process becomes rank 0 of ``world``, whose collectives compute values and are disturbed."""
    streams: dict[int, Any] = {}

    def run(group: Any, method: str, op: str, *args: Any, **kwargs: Any) -> _Work:
        outputs, inputs = list(tensors_in(args[:1])), list(tensors_in(args[1:2]))
        options = next((a for a in (*args, *kwargs.values()) if hasattr(a, "asyncOp")), None)
        averages = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG
        disturber.see(outputs, inputs)

        def compute() -> None:
            disturber.delay()
            with torch.no_grad():
                _compute(op_of(method), group.size(), outputs, inputs, averages=averages)
            disturber.delay()

        if not outputs or not outputs[0].is_cuda:
            if op_of(method) in ("all_gather", "reduce_scatter"):
                read = {tensor.untyped_storage().data_ptr() for tensor in inputs}
                for output in outputs:
                    alone = output.untyped_storage().data_ptr() not in read
                    if alone and output.is_floating_point():
                        output.fill_(math.nan)
            return _Work(compute, None, [*outputs, *inputs])
        current = torch.cuda.current_stream()
        # A synchronous call runs on the caller's stream, as NCCL's does.
        stream = current
        if options is None or options.asyncOp:
            stream = streams.setdefault(id(group), torch.cuda.Stream())
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            compute()
            event = stream.record_event()
        return _Work(None, event, [*outputs, *inputs])

    links = {"link": Link()}
    with (
        patch.object(EmulatedGroup, "run", run),
        EmulatedNetwork(world_size=world, links=links) as network,
    ):
        yield network


class _Work(dist.Work):
    """A collective under way. Like NCCL's, it holds the tensors until it is waited for, and no longer."""

    def __init__(
        self, compute: Callable[[], None] | None, event: Any, tensors: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self.compute, self.event, self.tensors = compute, event, tensors

    def wait(self, timeout: Any = None) -> bool:
        compute, self.compute = self.compute, None
        if compute is not None:
            compute()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.tensors = []
        return True

    def is_completed(self) -> bool:
        return self.compute is None

    is_success = is_completed


def _compute(
    op: str,
    n: int,
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    *,
    averages: bool,
) -> None:
    """Writes the result of a collective of ``n`` ranks that all have this rank's inputs."""
    if op == "all_gather" and len(outputs) == len(inputs):
        for output, part in zip(outputs, inputs, strict=True):
            for row in output.view(n, -1).unbind():
                if row.data_ptr() != part.data_ptr():  # FSDP2's input lies in the output
                    row.copy_(part.view(-1))
    elif op == "all_gather":
        for output in outputs:
            output.copy_(inputs[0])
    elif op == "reduce_scatter":
        for output, whole in zip(outputs, inputs, strict=True):
            rows = whole.reshape(n, -1)
            output.copy_((rows.mean(0) if averages else rows.sum(0)).view_as(output))
    elif op == "all_reduce" and not averages:
        for tensor in outputs:
            if tensor.is_floating_point():
                tensor.mul_(n)
    elif op == "all_to_all":
        for output, source in zip(outputs, inputs, strict=True):
            output.copy_(source)
