"""The three collectives of the engine, each one asynchronous call for one bucket.

A call may have several members: pairs of an output and an input. It is one launch where the backend groups
them, and otherwise (gloo) several calls under way at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
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
)
from parallel3d._util.trace import issuing

_backends: defaultdict[str, WeakKeyDictionary[ProcessGroup, str]] = defaultdict(WeakKeyDictionary)


def _backend(group: ProcessGroup, device_type: str) -> str:
    """Returns ``backend_name``, which is asked once per group."""
    name = groups.pretended_backend or _backends[device_type].get(group)
    if name is None:
        name = _backends[device_type][group] = backend_name(group, device_type)
    return name


# An all-gather over gloo of one message from each rank to each other, for large parts.
#
# gloo's own all-gather receives into memory that it allocates for each call, and copies from
# there. Here the parts arrive where they belong: on 4 ranks of a 2-core machine 8 MiB take 4.7 ms
# of a rank's CPU time instead of 6.6. A message costs about 50 us, however small: below
# ``LEAST_BYTES`` for a part gloo's own is as good.

LEAST_BYTES = 2**17

# Of our messages, in a group that the user may send messages in too. Between two ranks they come in the order
# in which they were sent, which is the order of the gathers.
_TAG = 0x33D
_AFTER_A_FAILURE = timedelta(seconds=1)


class Messages:
    """Messages under way; has the ``wait`` of a ``dist.Work``."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        """Returns when all have come or failed: until then their memory is in use.

        Raises:
            RuntimeError: one has failed; the first one's.
        """
        failed: RuntimeError | None = None
        for work in self.works:
            try:
                if failed is None:
                    work.wait()
                else:  # it has had the first one's time
                    work.wait(_AFTER_A_FAILURE)
            except RuntimeError as error:
                failed = failed or error
        self.works = ()
        if failed is not None:
            raise failed


def p2p_all_gather(output: torch.Tensor, part: torch.Tensor, group: ProcessGroup) -> Messages:
    """All-gathers ``part``, (S,), into ``output``, (n * S,), in rank order, by point-to-point messages.

    The recorder counts it as one all-gather.
    """
    n, rank = group.size(), group.rank()
    rows = output.view(n, -1).unbind()
    # Each rank begins with the next one, so that not all send to the same.
    others = [(rank + step) % n for step in range(1, n)]
    with issuing.messages_of("all_gather", output.numel() * output.element_size()):
        works = [dist.irecv(rows[k], group=group, group_src=k, tag=_TAG) for k in reversed(others)]
        works += [dist.isend(part, group=group, group_dst=k, tag=_TAG) for k in others]
    rows[rank].copy_(part)
    return Messages([work for work in works if work is not None])


# Backends don't know other dtypes, such as float8: these are sent as bytes.
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

# Of gloo, the call with several members copies all of them into one buffer and out of it.
_GROUPING_BACKENDS = ("nccl", "fake")


class Works:
    """Several calls under way."""

    def __init__(self, works: list[dist.Work | None]) -> None:
        self.works = works

    def wait(self) -> None:
        """Waits for all."""
        for work in self.works:
            if work is not None:
                work.wait()


def _issue_members(
    call: Callable[..., Any],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: ProcessGroup,
) -> Any:
    """Makes ``call`` for each pair of an output and an input. Returns what to wait for, or None."""
    if len(outputs) == 1:
        return call(outputs[0], inputs[0], group=group, async_op=True)
    with issuing.one_call():
        pairs = zip(outputs, inputs, strict=True)
        return Works([call(output, given, group=group, async_op=True) for output, given in pairs])


class ScatterWork:
    """A reduce-scatter under way; ``wait`` returns this rank's part of the sum.

    Attributes:
        output: that part, where the backend sums.
        rows: where it does not: of each member what is to be summed here, (n, elements of its part).
    """

    def __init__(
        self, work: Any, output: torch.Tensor | None, rows: Sequence[torch.Tensor] = ()
    ) -> None:
        self.work = work
        self.output = output
        self.rows = rows

    def wait(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Waits (on an accelerator: lets the current stream wait) and finishes the sum.

        Args:
            dtype: the dtype to sum in where that is done here; by default that of the input.
        """
        work, self.work = self.work, None  # which holds the input
        if work is not None:
            work.wait()
        rows, self.rows = self.rows, ()
        if len(rows) == 1:
            return rows[0].sum(dim=0, dtype=dtype)
        if rows:
            sizes = [each.shape[1] for each in rows]
            self.output = rows[0].new_empty(sum(sizes), dtype=dtype)
            for each, part in zip(rows, self.output.split(sizes), strict=True):
                torch.sum(each, dim=0, dtype=dtype, out=part)
        assert self.output is not None
        return self.output


def all_gather(
    output: torch.Tensor | Sequence[torch.Tensor],
    part: torch.Tensor | Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    unit: str,
    comm: Any = None,
) -> Any:
    """All-gathers ``part``, (S,), of every rank into ``output``, (n * S,), in rank order; asynchronous.

    Args:
        output, part: one tensor each, or the members of the call.
        group: n ranks.
        unit: name of the unit that it is for, for the recorder.
        comm: a collective of the user's to use instead; see ``set_custom_all_gather``.

    Returns:
        What to wait for, with a method ``wait``; or None.
    """
    outputs = [output] if isinstance(output, torch.Tensor) else output
    parts = [part] if isinstance(part, torch.Tensor) else part
    if parts[0].dtype not in _KNOWN_TO_BACKENDS:
        outputs = [each.view(torch.uint8) for each in outputs]
        parts = [each.view(torch.uint8) for each in parts]
    before, issuing.unit = issuing.unit, unit
    try:
        if comm is not None and len(parts) == 1:
            return comm(output_tensor=outputs[0], input_tensor=parts[0], group=group, async_op=True)
        backend = _backend(group, parts[0].device.type)
        if len(parts) > 1 and backend in _GROUPING_BACKENDS:
            return all_gather_members(outputs, parts, group)
        if backend == "gloo":
            return _issue_members(_gather_on_gloo, outputs, parts, group)
        return _issue_members(all_gather_single, outputs, parts, group)
    finally:
        issuing.unit = before


def _gather_on_gloo(
    output: torch.Tensor, part: torch.Tensor, *, group: ProcessGroup, async_op: bool
) -> Any:
    if part.is_cpu and part.numel() * part.element_size() >= LEAST_BYTES:
        return p2p_all_gather(output, part, group)
    return all_gather_single(output, part, group=group, async_op=async_op)


def reduce_scatter(
    given: torch.Tensor | Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    unit: str,
    device_type: str,
) -> ScatterWork:
    """Sums ``given``, (n * S,), over the ranks and gives each rank its part, (S,); asynchronous.

    gloo's reduce-scatter blocks its caller; an all-to-all does not, and the sum of what it brings, in
    rank order, is the same number on every run.

    Args:
        given: one tensor, or the members of the call, whose results lie one after another.
        unit: name of the unit that it is for, for the recorder.
    """
    n = group.size()
    inputs = [given] if isinstance(given, torch.Tensor) else given
    backend = _backend(group, device_type)
    before, issuing.unit = issuing.unit, unit
    try:
        if device_type == "cpu" and backend == "gloo":
            received = [torch.empty_like(each) for each in inputs]
            work = _issue_members(dist.all_to_all_single, received, inputs, group)
            return ScatterWork(work, None, [each.view(n, -1) for each in received])
        sizes = [each.numel() // n for each in inputs]
        output = inputs[0].new_empty(sum(sizes))
        outputs = output.split(sizes)
        if len(sizes) > 1 and backend in _GROUPING_BACKENDS:
            return ScatterWork(reduce_scatter_members(outputs, inputs, group), output)
        work = _issue_members(reduce_scatter_single, outputs, inputs, group)
        return ScatterWork(work, output)
    finally:
        issuing.unit = before


def all_reduce(tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> dist.Work | None:
    """Sums ``tensor`` over ``group`` in place; asynchronous. ``unit``: as for ``reduce_scatter``."""
    before, issuing.unit = issuing.unit, unit
    try:
        return dist.all_reduce(tensor, group=group, async_op=True)
    finally:
        issuing.unit = before
