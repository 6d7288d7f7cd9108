"""The three collectives of the engine, each one asynchronous call for one bucket.

A call may have several members: pairs of an output and an input. It is one launch where the backend groups
them, and otherwise (gloo) several calls under way at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._torch.groups import (
    all_gather_members,
    all_gather_single,
    backend_name,
    groups_members,
    reduce_scatter_members,
    reduce_scatter_single,
)
from parallel3d._util.trace import issuing

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


def gathers_p2p(part: torch.Tensor, group: ProcessGroup) -> bool:
    """Whether gathering ``part`` by point-to-point messages is faster than gloo's all-gather: it is large."""
    large = part.is_cpu and part.numel() * part.element_size() >= LEAST_BYTES
    return large and backend_name(group, "cpu") == "gloo"


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


# Others, such as float8, are only moved, as bytes.
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


class Works:
    """Several calls under way."""

    def __init__(self, works: list[dist.Work | None]) -> None:
        self.works = works

    def wait(self) -> None:
        """Waits for all."""
        for work in self.works:
            if work is not None:
                work.wait()


class ScatterWork:
    """A reduce-scatter under way; ``wait`` returns this rank's part of the sum.

    Attributes:
        output: that part, where the backend sums.
        rows: where not, of each member what is to be summed here, (n, its slots).
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
            dtype: what to add up in where that is done here; by default that of what was sent.
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
        output, part: one tensor each, or a list of several that one call carries.
        group: n ranks.
        unit: the unit that it is for, for the record.
        comm: a collective of the user's to use instead; see ``set_custom_all_gather``.

    Returns:
        What to wait for, with a method ``wait``; or None.
    """
    outputs = [output] if isinstance(output, torch.Tensor) else output
    parts = [part] if isinstance(part, torch.Tensor) else part
    if parts[0].dtype not in _KNOWN_TO_BACKENDS:
        outputs = [each.view(torch.uint8) for each in outputs]
        parts = [each.view(torch.uint8) for each in parts]
    with issuing.as_unit(unit):
        if len(parts) > 1:
            if groups_members(group, parts[0].device.type):
                return all_gather_members(outputs, parts, group)
            with issuing.one_call():
                return Works(
                    [_gather_one(o, p, group) for o, p in zip(outputs, parts, strict=True)]
                )
        if comm is not None:
            return comm(output_tensor=outputs[0], input_tensor=parts[0], group=group, async_op=True)
        return _gather_one(outputs[0], parts[0], group)


def _gather_one(output: torch.Tensor, part: torch.Tensor, group: ProcessGroup) -> Any:
    if gathers_p2p(part, group):
        return p2p_all_gather(output, part, group)
    return all_gather_single(output, part, group=group, async_op=True)


def reduce_scatter(
    given: torch.Tensor | Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    unit: str,
    device_type: str,
) -> ScatterWork:
    """(n * S,) of every rank -> (S,) of the sum on every rank.

    gloo's reduce-scatter blocks its caller; an all-to-all does not, and the sum of what it brings, in
    rank order, is the same number on every run.

    Args:
        given: or those of several members, whose results are neighbours.
    """
    n = group.size()
    wholes = [given] if isinstance(given, torch.Tensor) else given
    whole = wholes[0]
    if device_type == "cpu" and backend_name(group, device_type) == "gloo":
        return _exchange(wholes, group, unit)
    sizes = [each.numel() // n for each in wholes]
    output = torch.empty(sum(sizes), dtype=whole.dtype, device=whole.device)
    with issuing.as_unit(unit):
        if len(sizes) == 1:
            work = reduce_scatter_single(output, whole, group=group, async_op=True)
            return ScatterWork(work, output)
        outputs = output.split(sizes)
        if groups_members(group, device_type):
            return ScatterWork(reduce_scatter_members(outputs, wholes, group), output)
        with issuing.one_call():
            works = [
                reduce_scatter_single(o, w, group=group, async_op=True)
                for o, w in zip(outputs, wholes, strict=True)
            ]
    return ScatterWork(Works(works), output)


def _exchange(wholes: Sequence[torch.Tensor], group: ProcessGroup, unit: str) -> ScatterWork:
    rows = [torch.empty_like(whole) for whole in wholes]
    with issuing.as_unit(unit), issuing.one_call():
        works = [
            dist.all_to_all_single(theirs, mine, group=group, async_op=True)
            for theirs, mine in zip(rows, wholes, strict=True)
        ]
    work = works[0] if len(works) == 1 else Works(works)
    return ScatterWork(work, None, [each.view(group.size(), -1) for each in rows])


def all_reduce(tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> dist.Work | None:
    """Sums ``tensor`` over ``group`` in place."""
    with issuing.as_unit(unit):
        return dist.all_reduce(tensor, group=group, async_op=True)
