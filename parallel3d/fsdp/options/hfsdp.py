"""HybridBucket: HFSDP, in which what the optimizer sees is sharded over replicate x shard.

HSDP keeps whole optimizer states on every replica. Here Parameters, gradients and so optimizer states are cut
into R * N parts (R, N: sizes of replicate and shard), and the engine keeps a copy of the weights in compute
dtype, sharded over ``shard`` alone, from which forward and backward gather as HSDP does. It is renewed by one
all-gather over replicate at each forward of the root. Gradients are reduce-scattered over
shard, then over replicate. Megatron-FSDP calls this HFSDP; hpZ of ZeRO++ is its relative.

Part ``s * R + r`` is that of the rank (r, s): the R parts of one shard rank are neighbours, so that both
gathers, one after the other, bring all parts in order. ``set_requires_all_reduce(False)`` puts the second
reduce-scatter off; see ``HybridGradients``. Buffers beside a Bucket's: ``copy`` (R * S).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from parallel3d._torch.dtensor import get_local_tensor, make_dtensor
from parallel3d._torch.kernels import foreach_copy_
from parallel3d.fsdp.bucket import Bucket, allocate
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.gradients import GradientSlots, HeldSum
from parallel3d.fsdp.options.gather_extension import is_extended
from parallel3d.fsdp.placement import ParamAxes
from parallel3d.fsdp.reduction import SUMS, Lane, Reduction, Stage
from parallel3d.fsdp.spmd import RequestedPlacement

if TYPE_CHECKING:
    from parallel3d.fsdp.comm import Comm


# HybridGradients: HFSDP's sums between micro-batches.
#
# ``set_requires_all_reduce(False)`` puts off the second reduce-scatter: a rank then holds, of each
# parameter, what an HSDP rank does, the R parts of its place on the shard axis. They arrive as R
# rows of S (see ``HybridBucket``); ``.grad`` must be a DTensor, so they wait by parameter.


class HybridGradients(GradientSlots):
    """Of a ``HybridBucket``, whose parameters are all cut evenly. R: the size of replicate."""

    def __init__(self, bucket: HybridBucket) -> None:
        super().__init__(bucket)
        self.replicas = bucket.replicate_scatter_group.size()

    def _zero_partial(self) -> HeldSum:
        """Parts are (R, *chunk); their memory is that of what an HSDP rank holds, in its shape."""
        bucket, r = self.bucket, self.replicas
        flat = torch.zeros(r * bucket.numel, dtype=bucket.sum_dtype, device=bucket.storage_device)
        regions = flat.split([r * size for size in bucket.slot_sizes])
        parts, marks = [], []
        for param, region in zip(bucket.params, regions, strict=True):
            assert param.dim is not None
            shape = list(param.chunk_shape)
            shape[param.dim] *= r
            held = param.shaped(region, shape)
            parts.append(held.unflatten(param.dim, (r, -1)).movedim(param.dim, 0))
            marks.append(make_dtensor(held, param.unreduced_spec(flat.dtype, over_shard=False)))
        return HeldSum(flat, parts, marks)

    def _rows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters in (R * S,), each (R, *chunk)."""
        columns = flat.view(self.replicas, -1).split(self.bucket.slot_sizes, dim=1)
        return [
            p.slots_by_rank(c).reshape(self.replicas, *p.chunk_shape)
            for p, c in zip(self.bucket.params, columns, strict=True)
        ]

    def _waiting(self, held: HeldSum) -> torch.Tensor:
        flat = torch.empty_like(held.flat)
        foreach_copy_(self._rows(flat), held.parts)
        return flat

    def _hold_partial(self, flat: torch.Tensor, used: list[int]) -> None:
        bucket = self.bucket
        if self.partial_reduce_output is None:
            self.partial_reduce_output = self._zero_partial()
        held = self.partial_reduce_output
        row = bucket.axes.coordinate(bucket.axes.replicate)
        # This rank alone has it: the reduce-scatter to come sums it with zeros, or a hook takes the mean.
        times = self.replicas if bucket.reducer.averages else 1.0
        for index in used:
            before = held.place(index, bucket.params[index].sharded)
            if before is not None:
                held.parts[index].select(0, row).add_(get_local_tensor(before), alpha=times)
        for part, rows in zip(held.parts, self._rows(flat), strict=True):
            part.add_(rows)

    def _fold_into_whole(self, index: int, grad: torch.Tensor) -> None:
        if (
            self.partial_reduce_output is None
            or grad is not self.partial_reduce_output.marks[index]
        ):
            super()._fold_into_whole(index, grad)
            return
        assert self.unsharded_accumulated is not None
        bucket, param, r = self.bucket, self.bucket.params[index], self.replicas
        factor = bucket.num_shards / r if bucket.reducer.averages else bucket.divisor
        if param.layout.tp_grad == "partial" or index in self.unsharded_accumulated.tp_partial:
            factor /= param.tp_size
        self.unsharded_accumulated.folded.add(index)
        first = bucket.axes.coordinate(bucket.axes.shard) * r
        mine = self.unsharded_accumulated.parts[index].narrow(0, first, r)
        mine.add_(self.partial_reduce_output.parts[index].reshape(mine.shape), alpha=factor)
        self.partial_reduce_output.drop(index)


def cut_over_replicate(
    name: str, param: nn.Parameter, requested: RequestedPlacement
) -> RequestedPlacement:
    """``requested`` with axes that cut ``param`` over replicate too, where that is possible.

    It is where a dim divides evenly by all ranks. Others stay as in HSDP, as do all-gather extensions.
    """
    axes = requested.axes
    if axes.size(axes.replicate) == 1 or axes.spmd is not None or is_extended(param):
        return requested
    cut = replace(axes, over_replicate=True)
    dims = ParamAxes(name, param, cut).dims(param.shape)
    possible = requested.dim in dims if requested.dim is not None else bool(dims and param.numel())
    return RequestedPlacement(cut, requested.dim) if possible else requested


class ReplicateScatter(Stage):
    """HFSDP's second reduce-scatter, over replicate."""

    lane = Lane.REPLICATE
    is_collective = True

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def start(self, job: Reduction) -> Any:
        """Issues it."""
        bucket = job.bucket
        reducer = bucket.reducer if bucket.reducer.averages else SUMS
        return reducer.reduce_scatter([job.tensor], self.group, unit=bucket.unit)

    def finish(self, job: Reduction, work: Any) -> None:
        """Its result is this rank's part."""
        job.tensor = work.wait()


class HybridBucket(Bucket):
    """See the module's docstring.

    Attributes:
        copy: (R * S,) in compute dtype: the parts of this rank's place on the shard axis.
        renewing: what to wait for until ``copy`` is there, and the tensor it is made of.
        is_new: whether there has been no copy yet.
    """

    joinable = False
    gathers_copy = True
    packs_all = True  # the R parts of a parameter are not neighbours in ``copy``

    def _find_groups(self) -> None:
        super()._find_groups()
        axes = self.axes
        assert axes.replicate is not None
        self.replicate_scatter_group = group = axes.group(axes.replicate)
        self.replicate_groups = []
        self.over_replicate = [ReplicateScatter(group)]
        # The parts are those of replicate x shard, neighbours along replicate.
        self.gather_groups = [group, *self.gather_groups]

    def _describe(self, device: torch.device) -> None:
        super()._describe(device)
        self.grads = HybridGradients(self)

    def build_unsharded(self) -> None:
        """As a Bucket does, and the copy, which there is in the present dtype only."""
        super().build_unsharded()
        self.make_copy()

    def make_copy(self) -> None:
        """Memory for the copy, which the next unshard fills."""
        size = self.replicate_scatter_group.size() * self.numel
        self.copy = torch.empty(size, dtype=self.compute_dtype, device=self.device)
        if (
            self.shard_group is None
        ):  # views made now: those made in inference mode could not be trained
            allocate(self.unsharded)
            pairs = self.copy_pairs(self.copy.view(self.num_shards, -1))
            self.free_unsharded()
            self._whole_pairs = [list(side) for side in zip(*pairs, strict=True)]
        self.renewing: tuple[Any, list[torch.Tensor]] | None = None
        self.is_new = True

    def leave_precision(self) -> None:
        """As a Bucket does."""
        self.finish_renewal()

    def enter_precision(self) -> None:
        """As a Bucket does: the copy is of the other dtype."""
        self.make_copy()

    # -- the copy ------------------------------------------------------------------------------------

    @property
    def is_old(self) -> bool:
        """Whether there is no copy yet, or the weights were seen to change since the last renewal began."""
        return self.is_new or self.versions.weights_changed()

    def note_weights(self, comm: Comm) -> None:
        """As a Bucket does: what is gathered is the copy, of the values that it was renewed with."""
        if self.is_new:
            self.renew(comm)

    def renew(self, comm: Comm, *, if_changed: bool = False) -> None:
        """Starts the all-gather over replicate that the copy is made by."""
        if if_changed and not self.is_old:
            return
        self.finish_renewal()
        parts: list[torch.Tensor] = []

        def start() -> Any:
            parts.append(Bucket.gather_input(self))
            return all_gather(self.copy, parts, self.replicate_scatter_group, unit=self.unit)

        work = comm.run_over_replicate(start, reads_host=self.reads_host)
        # Here, because an exception on the way leaves the copy in need of it.
        self.renewing = (work, parts)
        self.is_new = False
        self.versions.note_weights()

    def finish_renewal(self) -> None:
        """Lets who comes next, on an accelerator the current stream, wait for the copy."""
        if self.renewing is not None:
            work, _ = self.renewing
            if work is not None:
                work.wait()
            self.renewing = None

    # -- unshard -------------------------------------------------------------------------------------

    def gather_input(self) -> torch.Tensor:
        """What this rank brings to the all-gather over shard."""
        if self.part is not None:
            return self.part
        self.finish_renewal()
        return self.copy

    def cast_whole(self) -> None:
        """Unshard without a shard axis: the copy is all."""
        self.finish_renewal()
        allocate(self.unsharded)
        foreach_copy_(*self._whole_pairs)
