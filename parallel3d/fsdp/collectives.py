"""The collectives of the engine: all-gather, reduce-scatter and all-reduce, each one call.

On the CPU a call is asynchronous. On an accelerator it is synchronous, on a stream of the engine's: the host
goes on. (An asynchronous one would be on a stream of the backend's, with two more events, and a work whose
wait costs more host time than the call.) A call may have several pairs of an output and an input: one launch
where the backend groups them, and on gloo a call per pair, all of them under way at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._torch import groups
from parallel3d._torch.groups import (
    all_gather_members,
    all_gather_single,
    backend_name,
    reduce_scatter_members,
    reduce_scatter_single,
    scaled_sum,
)
from parallel3d._util import dry_run
from parallel3d._util.trace import issuing

_backends: defaultdict[str, WeakKeyDictionary[ProcessGroup, str]] = defaultdict(WeakKeyDictionary)


def _backend(group: ProcessGroup, device_type: str) -> str:
    name = groups.pretended_backend or _backends[device_type].get(group)
    if name is None:
        name = _backends[device_type][group] = backend_name(group, device_type)
    return name


def has_streams(device_type: str) -> bool:
    """Returns whether collectives run on streams: on an accelerator, or a dry run's stand-in for one."""
    return device_type not in ("cpu", "meta") or dry_run.played is not None


class Works:
    """Several asynchronous works as one, with the ``wait`` of ``dist.Work``. Works may be None."""

    def __init__(self, works: Iterable[Any]) -> None:
        self.works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Waits until all works have ended or failed, since a work uses its tensors' memory until then.

        Raises:
            RuntimeError: the first error that a work has raised.
        """
        failed: RuntimeError | None = None
        for work in self.works:
            try:
                # After a failure, what has not ended yet has had the timeout of the work that failed.
                work.wait() if failed is None else work.wait(_AFTER_A_FAILURE)
            except RuntimeError as error:
                failed = failed or error
        self.works = []
        if failed is not None:
            raise failed


_AFTER_A_FAILURE = timedelta(seconds=1)

# From this many bytes per rank on, an all-gather over gloo is a message from each rank to each other. gloo's
# own receives into memory that it allocates in each call, and copies from there: on 4 ranks and 2 cores, 8
# MiB take a rank 6.6 ms of CPU time, and 4.7 by messages. A message costs about 50 us.
LEAST_BYTES = 2**17

# The tag of the messages; the user may send others in the group. Those between two ranks arrive in the order
# in which they were sent, which is the order of the all-gathers.
_TAG = 0x33D


def p2p_all_gather(output: torch.Tensor, part: torch.Tensor, group: ProcessGroup) -> Works:
    """All-gathers ``part``, (S,), into ``output``, (n * S,), in rank order, by point-to-point messages, which
    the recorder counts as one all-gather."""
    n, rank = group.size(), group.rank()
    rows = output.view(n, -1).unbind()
    # Each rank sends to the next one first, so that not all send to the same rank.
    others = [(rank + step) % n for step in range(1, n)]
    with issuing.messages_of("all_gather", output.numel() * output.element_size()):
        works = [dist.irecv(rows[k], group=group, group_src=k, tag=_TAG) for k in reversed(others)]
        works += [dist.isend(part, group=group, group_dst=k, tag=_TAG) for k in others]
    rows[rank].copy_(part)
    return Works(works)


# Other dtypes, such as float8, are sent as bytes.
_KNOWN_TO_BACKENDS = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}

# gloo copies the pairs of a grouped call into one buffer and out of it.
_GROUPING_BACKENDS = ("nccl", "fake")


def _issue_members(
    call: Callable[..., Any],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: ProcessGroup,
    **options: Any,
) -> Any:
    """Issues ``call(output, input)`` for each pair, recorded as one collective. Returns the work, or None."""
    if len(outputs) == 1:
        return call(outputs[0], inputs[0], group=group, **options)
    with issuing.one_call():
        pairs = zip(outputs, inputs, strict=True)
        works = [call(output, input, group=group, **options) for output, input in pairs]
    return Works(works) if options["async_op"] else None


class ScatterWork:
    """A reduce-scatter under way; ``wait`` returns this rank's result.

    Attributes:
        output: (S,), the result; None if the collective is an all-to-all, whose rows ``wait`` must sum.
        is_scaled: whether the collective has multiplied the sum by ``scale``, too.
        rows: for each input of such an all-to-all its output, (n, elements): row i comes from rank i.
        dtype: the dtype to sum ``rows`` in; None: their own.
    """

    def __init__(
        self,
        work: Any,
        output: torch.Tensor | None,
        rows: Sequence[torch.Tensor] = (),
        *,
        is_scaled: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.work, self.output, self.rows = work, output, rows
        self.is_scaled, self.dtype = is_scaled, dtype

    def wait(self) -> torch.Tensor:
        """Waits for the collective (on an accelerator the current stream does) and returns the result."""
        work, self.work = self.work, None  # the work holds the inputs
        if work is not None:
            work.wait()
        rows, self.rows = self.rows, ()
        if rows:
            sizes = [received.shape[1] for received in rows]
            self.output = rows[0].new_empty(sum(sizes), dtype=self.dtype)
            for received, output in zip(rows, self.output.split(sizes), strict=True):
                _sum(received, output)
        assert self.output is not None
        return self.output


def _sum(rows: torch.Tensor, output: torch.Tensor) -> None:
    """Sums ``rows``, (n, S), over dim 0 into ``output``, (S,), in its dtype. On the CPU one row is added
    after the other: from 17 rows on ``torch.sum`` adds in an order that differs between elements, and it
    copies what it casts."""
    if has_streams(rows.device.type):
        torch.sum(rows, dim=0, dtype=output.dtype, out=output)
        return
    output.copy_(rows[0])
    for row in rows[1:].unbind():
        output.add_(row)


def all_gather(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    unit: str,
    comm: Any = None,
) -> Any:
    """Issues an all-gather of ``inputs``, (S,) each, of every rank into ``outputs``, (n * S,), in rank order.

    Args:
        group: n ranks.
        unit: name of the unit that it is for, for the recorder.
        comm: the user's collective to call instead; see ``set_custom_all_gather``.

    Returns:
        The work to wait for, or None.
    """
    if inputs[0].dtype not in _KNOWN_TO_BACKENDS:
        outputs = [tensor.view(torch.uint8) for tensor in outputs]
        inputs = [tensor.view(torch.uint8) for tensor in inputs]
    before, issuing.unit = issuing.unit, unit
    device_type = inputs[0].device.type
    async_op = not has_streams(device_type)
    try:
        if comm is not None and len(inputs) == 1:
            return comm(
                output_tensor=outputs[0], input_tensor=inputs[0], group=group, async_op=async_op
            )
        backend = _backend(group, device_type)
        if len(inputs) > 1 and backend in _GROUPING_BACKENDS:
            return all_gather_members(outputs, inputs, group, async_op=async_op)
        call = _gather_on_gloo if backend == "gloo" else all_gather_single
        return _issue_members(call, outputs, inputs, group, async_op=async_op)
    finally:
        issuing.unit = before


def _gather_on_gloo(
    output: torch.Tensor, part: torch.Tensor, *, group: ProcessGroup, async_op: bool
) -> Any:
    if part.is_cpu and part.numel() * part.element_size() >= LEAST_BYTES:
        return p2p_all_gather(output, part, group)
    return all_gather_single(output, part, group=group, async_op=async_op)


def reduce_scatter(
    inputs: Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    unit: str,
    device_type: str,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> ScatterWork:
    """Issues a reduce-scatter: ``inputs``, (n * S,), are summed over n ranks, and each rank gets (S,).

    gloo's blocks its caller. On the CPU it is an all-to-all, which does not, and a sum in rank order.

    Args:
        inputs: the tensors of one call, whose results lie one after another.
        unit: name of the unit that it is for, for the recorder.
        scale: factor of the sum. The backend applies it if that rounds no more than a separate product would;
            ``ScatterWork.is_scaled`` says whether it did.
        dtype: the dtype of the sum, which is then computed as on the CPU on every backend. None: the inputs'.
    """
    n = group.size()
    async_op = not has_streams(device_type)
    backend = _backend(group, device_type)
    before, issuing.unit = issuing.unit, unit
    try:
        if dtype is not None or (device_type == "cpu" and backend == "gloo"):
            received = [torch.empty_like(tensor) for tensor in inputs]
            work = _issue_members(
                dist.all_to_all_single, received, inputs, group, async_op=async_op
            )
            return ScatterWork(work, None, [tensor.view(n, -1) for tensor in received], dtype=dtype)
        sizes = [tensor.numel() // n for tensor in inputs]
        output = inputs[0].new_empty(sum(sizes))
        outputs = output.split(sizes)
        is_scaled = backend == "nccl" and scale != 1.0 and _scales_exactly(scale, output.dtype)
        op = scaled_sum(scale) if is_scaled else dist.ReduceOp.SUM
        if len(sizes) > 1 and backend in _GROUPING_BACKENDS:
            work = reduce_scatter_members(outputs, inputs, group, op=op, async_op=async_op)
        else:
            call = reduce_scatter_single
            work = _issue_members(call, outputs, inputs, group, op=op, async_op=async_op)
        return ScatterWork(work, output, is_scaled=is_scaled)
    finally:
        issuing.unit = before


def _scales_exactly(scale: float, dtype: torch.dtype) -> bool:
    """Returns whether NCCL, which multiplies each summand by ``scale`` in ``dtype``, loses no precision by
    it. In bfloat16 that holds for powers of two; a factor like 1/3 would itself be rounded by up to 0.4 %."""
    if dtype is torch.bfloat16:
        return abs(math.frexp(scale)[0]) == 0.5
    return dtype in (torch.float32, torch.float64)


def all_reduce(tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> dist.Work | None:
    """Issues an all-reduce that sums ``tensor`` in place. ``unit``: as for ``reduce_scatter``."""
    before, issuing.unit = issuing.unit, unit
    try:
        return dist.all_reduce(tensor, group=group, async_op=not has_streams(tensor.device.type))
    finally:
        issuing.unit = before
