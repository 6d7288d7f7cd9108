"""The three collectives of the engine, each one asynchronous call on one bucket's buffer."""

from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._compat import all_gather_single, backend_name, reduce_scatter_single
from parallel3d._trace import issuing
from parallel3d.fsdp.comms import from_peers

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


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


class ScatterWork:
    """A reduce-scatter under way; ``wait`` returns this rank's part of the sum."""

    def __init__(self, work: dist.Work | None, output: torch.Tensor, *, rows_to_sum: bool) -> None:
        self.work = work
        self.output = output
        self.rows_to_sum = rows_to_sum

    def wait(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Waits (on an accelerator: lets the current stream wait) and finishes the sum.

        Args:
            dtype: what to add up in where that is done here; by default that of what was sent.
        """
        if self.work is not None:
            self.work.wait()
        return self.output.sum(dim=0, dtype=dtype) if self.rows_to_sum else self.output


def all_gather(
    output: torch.Tensor, part: torch.Tensor, group: ProcessGroup, *, unit: str, comm: Any = None
) -> dist.Work | from_peers.Messages | None:
    """(S,) of every rank -> (n * S,) on every rank, in rank order; by ``comm`` if it is given."""
    if part.dtype not in _KNOWN_TO_BACKENDS:
        output, part = output.view(torch.uint8), part.view(torch.uint8)
    with issuing.as_unit(unit):
        if comm is not None:
            return comm(output_tensor=output, input_tensor=part, group=group, async_op=True)
        large = part.is_cpu and part.numel() * part.element_size() >= from_peers.LEAST_BYTES
        if large and backend_name(group, "cpu") == "gloo":
            return from_peers.gather_from_peers(output, part, group)
        return all_gather_single(output, part, group=group, async_op=True)


def reduce_scatter(
    whole: torch.Tensor, group: ProcessGroup, *, unit: str, device_type: str, comm: Any = None
) -> ScatterWork:
    """(n * S,) of every rank -> (S,) of the sum on every rank; by ``comm`` if it is given.

    gloo's reduce-scatter blocks its caller; an all-to-all does not, and the sum of what it brings, in
    rank order, is the same number on every run.
    """
    n = group.size()
    if comm is not None:
        output = comm.allocate((whole.numel() // n,), dtype=whole.dtype, device=whole.device)
        with issuing.as_unit(unit):
            work = comm(
                output_tensor=output,
                input_tensor=whole,
                group=group,
                op=dist.ReduceOp.SUM,
                async_op=True,
            )
        return ScatterWork(work, output, rows_to_sum=False)
    if device_type == "cpu" and backend_name(group, device_type) == "gloo":
        rows = torch.empty_like(whole)
        with issuing.as_unit(unit):
            work = dist.all_to_all_single(rows, whole, group=group, async_op=True)
        return ScatterWork(work, rows.view(n, -1), rows_to_sum=True)
    output = torch.empty(whole.numel() // n, dtype=whole.dtype, device=whole.device)
    with issuing.as_unit(unit):
        work = reduce_scatter_single(output, whole, group=group, async_op=True)
    return ScatterWork(work, output, rows_to_sum=False)


def all_reduce(tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> dist.Work | None:
    """Sums ``tensor`` over ``group`` in place."""
    with issuing.as_unit(unit):
        return dist.all_reduce(tensor, group=group, async_op=True)
