"""Bucket: parameters of one unit with one dtype, one requires_grad and one mesh, in contiguous buffers.

One all-gather and one reduce-scatter carry all of a bucket. Each parameter has a segment of ``slot_numel``
elements in a rank's shard: its chunk and, where the rows don't divide evenly, padding. With n the size of
the shard axis and S the sum of the segments (``numel``), the buffers are:

- ``flat``, (S,): this rank's shards at rest. The sharded Parameters' local tensors are views of it, so the
  all-gather needs no packing and a cast is one kernel.
- ``unsharded``, (n * S,): the whole parameters, one after another. What forward sees are views of it. With
  n = 1 and no cast it is ``flat`` itself.
- ``gathered``, (n * P,), where P is the sum of the segments of the parameters that are not zero-copy: one
  row of P per rank, as the all-gather writes it. It has memory during the gather only; then its rows are
  copied to their places in ``unsharded``.

Zero-copy parameters are large and cut evenly along dim 0. Their rows lie rank by rank in ``unsharded``, so
the all-gather writes them there and the reduce-scatter reads their gradients where autograd has put them.
They come first in the bucket.

``unsharded`` and ``gathered`` keep their tensors and views for the model's life; only their storage is
allocated and freed. The inputs of the reduce-scatter, laid out as the outputs of the all-gather, belong to
``grads``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, count
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from parallel3d._torch.autograd import (
    follows_grad_dtype,
    grads_may_differ_in_dtype,
    set_versions,
    torch_function_off,
    untraced,
)
from parallel3d._torch.dtensor import local_tensor_of, tensor_class
from parallel3d._torch.kernels import foreach_copy_
from parallel3d._torch.simulated import inner_tensors
from parallel3d._util.storage import with_own_storage
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.api import MixedPrecisionPolicy, in_own_dtype
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.gradients import GradientSlots
from parallel3d.fsdp.param import (
    ShardedParam,
    count_zero_copy,
    is_small,
    owner_of,
    packs_as_chunks,
    put_first,
)
from parallel3d.fsdp.placement import DataAxes, post_forward_mesh
from parallel3d.fsdp.reduction import SUMS, AllReduce, Stage


class Offload(Protocol):
    """Where a bucket's shards are kept, where that is elsewhere than it computes.

    Attributes:
        stages: how a reduction's result gets there.
    """

    stages: Sequence[Stage]

    def places(
        self, given: torch.device, mesh: DeviceMesh
    ) -> tuple[torch.device, torch.device, bool]:
        """(device to compute on, device of the shards at rest, whether these are in pinned memory).

        Args:
            given: where the parameters are now, or ``meta``.
        """


class Bucket:
    """See the module's docstring.

    Attributes:
        params: its parameters: zero-copy ones first, those whose gradient may be partial over tp last.
        policy: the dtypes that it computes and reduces in now.
        own_dtype: whether it computes in its parameters' own dtype; see ``options/precision``.
        zero_copy: how many parameters are zero-copy.
        packed: P, see above. packs_as_chunks: whether the other gradients can be packed by one kernel.
        tensor_classes: for each parameter, the class of its gradient.
        small_grads: for each parameter, whether its gradient may wait to be packed with others.
        slot_sizes: elements of each parameter's segment. numel: S, their sum.
        member_sizes: elements that a rank contributes to each tensor of the all-gather call.
        even_shapes: shapes of the chunks if no segment has padding, else None.
        shard_group: process group of the all-gather and the reduce-scatter; None: nothing is sharded.
        gather_group: process group of the next all-gather: ``shard_group``, or the fewer ranks that hold
            the parameters between forward and backward.
        scatter_group: process group of the reduce-scatter: ``shard_group``, or one of its own.
        replicate_groups: process groups that gradients are all-reduced over.
        tp_group: process group that partial gradients are summed over; None: there can be none.
        gather_groups: process groups over which a whole tensor is gathered, one after the other.
        over_replicate: the stages of a reduction that sum over replicate.
        on_result, to_rest: stages that options add at a reduction's end; see ``reduction.stages_of``.
        reducer: the collectives on gradients.
        on_reduced: called with the bucket and the indices of the parameters whose ``.grad`` is complete.
        on_large_gradient: called with the index of each zero-copy gradient that arrives.
        grads: the way of gradients into ``.grad``, and sums that wait there.
        versions: tells autograd what the unsharded parameters hold.
        device: where the bucket computes. storage_device: where ``flat`` and gradients at rest are; another
            device under CPU offload. pin: whether that memory is pinned.
        reads_host: whether the two devices differ.
        part: what this rank holds between forward and backward if the unit reshards to fewer ranks, which
            ``post_forward`` describes.
        divide_factor: what sums over ranks are divided by; None: the number of data ranks.
        reduce_unused: whether parameters without a gradient are reduced as zeros.
        gather_outputs: the tensors that the all-gather call writes to.
        region_views, gathered_views: the targets and sources of the copy after the all-gather.
        gather_comm: the user's collective in place of the engine's all-gather; ``custom_gathered`` is what it
            writes to.
        max_inputs: how many inputs of reduce-scatters may be in flight.
        force_sum: whether the user has asked for sums instead of averages; the engine always sums.
        stand_ins: tensors that forward sees instead of the unsharded parameters, one for each; an option
            sets them. None as soon as the parameters are made anew or others of them are trained.
        made: returns what to call after the unsharded parameters were made anew.
        keep_storage: whether the unsharded parameters keep their memory while the unit is sharded.
    """

    stand_ins: Sequence[torch.Tensor] | None = None
    joinable = True  # whether one all-gather may carry it together with other buckets
    packs_all = False  # whether no parameter may be zero-copy
    gathers_copy = False  # whether it gathers from a copy of its shards, see ``renew``
    made: Callable[[], Callable[[], None] | None] | None = None
    # What there is one of for each dtype that the bucket computes in; see ``options/precision``.
    by_precision: tuple[str, ...] = (
        "policy",
        "compute_dtype",
        "reduce_dtype",
        "sum_dtype",
        "grad_dtype",
        "has_own_unsharded",
        "unsharded",
        "gathered",
        "gather_outputs",
        "region_views",
        "gathered_views",
        "compute_params",
        "post_forward",
    )

    def __init__(
        self,
        unit: str,
        params: list[ShardedParam],
        axes: DataAxes,
        policy: MixedPrecisionPolicy,
        offload: Offload | None = None,
    ) -> None:
        self.unit = unit
        self.params = put_first(params, axes.mesh.device_type)
        self.axes = axes
        self.given_policy = policy
        self.own_dtype = False
        self.offload = offload
        self._set_options()
        self.num_shards = self.params[0].num_shards
        self._find_groups()
        self.zero_copy = 0
        if self.shard_group is not None and not self.packs_all:
            self.zero_copy = count_zero_copy(self.params, axes.mesh.device_type)
        self.small_grads = [is_small(p, axes.mesh.device_type) for p in self.params]
        self.gathering: Any = None  # an all-gather under way: what to wait for, and its input
        self.build(self._device())

    def _set_options(self) -> None:
        self.divide_factor: float | None = None
        self.reduce_unused = False
        self.on_result: list[Stage] = []
        self.to_rest: list[Stage] = []
        self.reducer = SUMS
        self.on_reduced: Callable[..., None] | None = None
        self.gather_comm: Any = None
        self.max_inputs = 1
        self.force_sum = False
        self.on_large_gradient: Callable[[int], None] | None = None
        self.keep_storage = False

    def _find_groups(self) -> None:
        axes = self.axes
        self.shard_group: ProcessGroup | None = None
        self.replicate_groups: list[ProcessGroup] = []
        empty = all(p.slot_numel == 0 for p in self.params)  # nothing to communicate
        for axis in (axes.shard, axes.replicate):
            if axis is None or axes.size(axis) == 1 or empty:
                continue
            if axis == axes.shard and self.num_shards > 1:
                self.shard_group = axes.group(axis)
            else:
                self.replicate_groups.append(axes.group(axis))
        self.over_replicate: list[Stage] = [AllReduce(group) for group in self.replicate_groups]
        self.gather_groups = [] if self.shard_group is None else [self.shard_group]
        self.scatter_group = self.shard_group
        partial = [
            p
            for p in self.params
            if p.may_be_partial or (p.layout.tp_grad == "partial" and p.tp_size > 1)
        ]
        self.tp_group: ProcessGroup | None = None
        if partial:
            self.tp_group = partial[0].on.summed_group

    def _device(self) -> torch.device:
        initial = self.params[0].initial
        if initial is None:
            initial = self.params[0].local
        if initial.device.type == "meta" or initial.device.type == self.axes.mesh.device_type:
            return initial.device
        return torch.device(self.axes.mesh.device_type)

    # -- storage -----------------------------------------------------------------------------------

    def build(self, device: torch.device) -> None:
        """Makes buffers, views and Parameters on ``device``, with the parameters' initial values."""
        params = self.params
        self._describe(device)
        # Zeros: padding must stay finite, norms and casts run over whole buffers.
        self.flat = torch.zeros(
            self.numel, dtype=self.dtype, device=self.storage_device, pin_memory=self.pin
        )
        self.local_views = [with_own_storage(v) for v in self.local_parts(self.flat)]
        for param, view in zip(params, self.local_views, strict=True):
            if param.initial is not None:
                view.copy_(param.shard_of(param.initial, tp_local=True))
                param.initial = None
            param.place(view)
        self.versions = Versions(self)
        self.build_unsharded()

    def _describe(self, device: torch.device) -> None:
        """Places, dtypes and sizes, and what depends on them alone."""
        params = self.params
        self.device, self.storage_device, self.pin = device, device, False
        if self.offload is not None:
            self.device, self.storage_device, self.pin = self.offload.places(device, self.axes.mesh)
        self.reads_host = self.storage_device != self.device
        if self.offload is not None and self.reads_host:
            self.to_rest = list(self.offload.stages)
        self.dtype = params[0].dtype
        self.other_precision: dict[str, Any] | None = None
        self.set_dtypes()
        self.tensor_classes = [tensor_class(p.spec) for p in params]
        self.slot_sizes = [p.slot_numel for p in params]
        self.even_shapes = [p.chunk_shape for p in params] if all(p.even for p in params) else None
        self.numel = sum(self.slot_sizes)
        self.packed = sum(self.slot_sizes[self.zero_copy :])
        self.packs_as_chunks = all(map(packs_as_chunks, params[self.zero_copy :]))
        self.member_sizes = self.slot_sizes[: self.zero_copy]
        if self.packed or not self.zero_copy:
            self.member_sizes = [*self.member_sizes, self.packed]
        self.partial_start = sum(p.slot_numel for p in params if p.layout.tp_grad != "partial")
        self.grads = GradientSlots(self)
        self.post_forward: PostForwardGroup | None = None
        self.part: torch.Tensor | None = None
        self.gather_group: Any = self.shard_group
        self.custom_gathered: torch.Tensor | None = None  # ``gathered`` of a custom all-gather

    def set_dtypes(self) -> None:
        """What it computes, sums and reduces in."""
        self.policy = policy = self.given_policy
        if self.own_dtype:
            self.policy = policy = in_own_dtype(policy, self.dtype)
        floating = self.dtype.is_floating_point
        self.compute_dtype = (policy.param_dtype if floating else None) or self.dtype
        given = policy.reduce_dtype if floating else None
        self.reduce_dtype = given or self._usual_reduce_dtype()
        # Sums that wait for their reduction must not lose what the reduction would keep.
        self.sum_dtype = self.dtype
        if grads_may_differ_in_dtype:
            self.sum_dtype = torch.promote_types(self.dtype, self.reduce_dtype)
        self.grad_dtype = self.dtype
        if isinstance(wanted := self.params[0].grad_dtype, torch.dtype):
            self.grad_dtype = wanted
        elif wanted == "any" or policy.keep_low_precision_grads:
            self.grad_dtype = self.reduce_dtype

    def _usual_reduce_dtype(self) -> torch.dtype:
        """Without a ``reduce_dtype``: that of the gradients to be, as torch does it since 2.15, or before
        that of what forward sees."""
        wanted = self.params[0].grad_dtype
        if isinstance(wanted, torch.dtype):
            return wanted
        if wanted == "any" or not follows_grad_dtype or self.policy.keep_low_precision_grads:
            return self.compute_dtype
        return self.dtype

    def build_unsharded(self) -> None:
        """Makes the gather's buffers and the parameters that forward sees, in the present dtypes."""
        params, n = self.params, self.num_shards
        self.stand_ins = None
        self.has_own_unsharded = n > 1 or self.compute_dtype != self.dtype or self.reads_host
        if self.has_own_unsharded:
            self.unsharded = torch.empty(
                n * self.numel, dtype=self.compute_dtype, device=self.device
            )
        else:
            self.unsharded = self.flat
        regions = self.unsharded.split([n * size for size in self.slot_sizes])
        self.gathered = self.unsharded
        if n > 1:
            self.gathered = self.unsharded.new_empty(n * self.packed)
        pairs = self.copy_pairs(self.gathered.view(n, self.packed), since=self.zero_copy)
        self.region_views = [region for region, _ in pairs]
        self.gathered_views = [held for _, held in pairs]
        self.gather_outputs = [*regions[: self.zero_copy], self.gathered][: len(self.member_sizes)]
        self.compute_params = [
            # .data: a version counter of its own, so that gathering again in backward is not taken
            # for an in-place change of a saved tensor.
            nn.Parameter(p.as_compute(p.contiguous_view(r).data), requires_grad=p.requires_grad)
            for p, r in zip(params, regions, strict=True)
        ]
        if self.gathered is not self.unsharded:
            release(self.gathered)
        if self.has_own_unsharded:
            release(self.unsharded)

    def note_weights(self, comm: Comm) -> None:
        """Before an all-gather: which values it is of; a part that was kept is of those from before."""
        if self.part is None:
            self.versions.note_weights()

    def renew(self, comm: Comm, *, if_changed: bool = False) -> None:
        """Makes the copy that is gathered from of the shards as they are now, where there is one.

        Args:
            if_changed: only if these were seen to change since.
        """

    def leave_precision(self) -> None:
        """Before the bucket, which is sharded, goes over to another dtype."""

    def free_other_precision(self) -> None:
        """Frees what was kept of the dtype that the bucket, which is sharded, does not compute in now."""
        other = self.other_precision
        if other is not None and other["has_own_unsharded"]:
            release(other["unsharded"])

    def enter_precision(self) -> None:
        """After it has come back to one that it has computed in before."""

    def views_by_rank(self, packed: torch.Tensor, since: int) -> list[torch.Tensor]:
        """The parameters from index ``since`` on in a buffer of one row of slots per shard rank, shaped as
        ``ShardedParam.by_rank`` does."""
        columns = packed.view(self.num_shards, -1).split(self.slot_sizes[since:], dim=1)
        return [p.slots_by_rank(c) for p, c in zip(self.params[since:], columns, strict=True)]

    def local_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' real rows in a sharded buffer (S,)."""
        slots = flat.split(self.slot_sizes)
        if (
            self.even_shapes is not None
        ):  # in each backward: no call per parameter but the view's own
            return [s.view(shape) for s, shape in zip(slots, self.even_shapes, strict=True)]
        return [p.local_view(s) for p, s in zip(self.params, slots, strict=True)]

    def kinds(self) -> set[tuple[torch.dtype, torch.device]]:
        """Of the sharded Parameters: one, unless a conversion has come to some of them only."""
        return {(p.local.dtype, p.local.device) for p in self.params}

    def adopt(self) -> bool:
        """Takes back values that an ordinary call (``to_empty``, ``double``, ...) moved elsewhere.

        Returns:
            Whether anything had moved.
        """
        locals_ = [local_tensor_of(p.sharded) for p in self.params]
        if all(map(is_, locals_, self.local_views)):
            return False
        kinds = self.kinds()
        if len(kinds) > 1:
            raise Parallel3dError(
                f"a conversion gave the parameters of unit {self.unit} different dtypes or devices "
                f"({', '.join(f'{d} on {v}' for d, v in sorted(kinds, key=str))}); they share one buffer: "
                "convert the whole unit, or convert before fully_shard"
            )
        # Also during inference: tensors made in inference mode could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            for param, local in zip(self.params, locals_, strict=True):
                param.set_dtype(local.dtype)
            grads = self.grads
            self._take(locals_)
            self.grads.carry_over(grads)
        return True

    def _take(self, locals_: list[torch.Tensor]) -> None:
        self.build(locals_[0].device)
        for view, local in zip(self.local_views, locals_, strict=True):
            view.copy_(local)

    def count_trainable(self) -> int:
        """Lets the computing parameters follow ``requires_grad_`` on the sharded ones; how many have it."""
        with torch_function_off():  # DTensor's takes longer than all the rest
            wanted = [param.sharded.requires_grad for param in self.params]
        if wanted != [compute.requires_grad for compute in self.compute_params]:
            self.stand_ins = None  # it is of those that have one
            for compute, requires_grad in zip(self.compute_params, wanted, strict=True):
                compute.requires_grad_(requires_grad)
        return sum(wanted)

    # -- reduction -----------------------------------------------------------------------------------

    @property
    def divisor(self) -> float:
        """What the sum of the ranks' gradients is divided by."""
        return self.axes.data_size if self.divide_factor is None else self.divide_factor

    @property
    def reduced_zero_copy(self) -> int:
        """How many gradients, the first ones, are reduced from where they are.

        0 where the user reduces, who is given one row of S per rank.
        """
        return 0 if self.reducer.by_row else self.zero_copy

    def reduce_input(self, since: int) -> torch.Tensor:
        """Memory for one row per shard rank of the gradients from index ``since`` on, in reduce dtype."""
        size = self.num_shards * sum(self.slot_sizes[since:])
        reducer = SUMS if self.shard_group is None else self.reducer
        return reducer.allocate(size, self.reduce_dtype, self.device)

    # -- layouts -------------------------------------------------------------------------------------

    def copy_pairs(
        self, rows: torch.Tensor, first: int = 0, *, since: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(part of ``unsharded``, the same in ``rows``): shard ranks' rows, from rank ``first`` on.

        Args:
            rows: (ranks, slots): of the parameters from index ``since`` on.
        """
        with torch.inference_mode(False), torch.no_grad():  # no views of ours in inference mode
            columns = rows.split(self.slot_sizes[since:], dim=1)
            regions = self.unsharded.split([self.num_shards * size for size in self.slot_sizes])
            return [
                pair
                for param, region, column in zip(
                    self.params[since:], regions[since:], columns, strict=True
                )
                for pair in param.copy_pairs(region, column, first)
            ]

    def members(self, part: torch.Tensor) -> list[torch.Tensor]:
        """What a rank brings to the all-gather, (rows * S,), as the call takes it: of each parameter in
        place its rows, and the rows of the others, packed."""
        rows = part.numel() // self.numel if self.numel else 1
        return pieces(part, [rows * size for size in self.member_sizes])

    def member_pairs(
        self, members: list[torch.Tensor], first: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As ``copy_pairs``, of ``members`` of some ranks."""
        k, pairs = self.zero_copy, []
        regions = self.unsharded.split([self.num_shards * size for size in self.slot_sizes])
        for param, region, member in zip(self.params[:k], regions, members, strict=False):
            pairs += param.copy_pairs(region, member.view(-1, param.slot_numel), first)
        for packed in members[k:]:
            pairs += self.copy_pairs(packed.view(-1, self.packed), first, since=k)
        return pairs

    # -- unshard -------------------------------------------------------------------------------------

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Allocates and returns the outputs and inputs of the all-gather; the inputs are in compute dtype."""
        in_rows = self.gather_comm is not None
        if self.part is not None and self.post_forward is not None:
            in_rows = self.post_forward.in_rows
        if in_rows and self.shard_group is not None:
            return self._row_buffers()
        self.custom_gathered = None
        if self.zero_copy:
            allocate(self.unsharded)
        allocate(self.gathered)
        return self.gather_outputs, self.members(self.gather_input())

    def start_gather(self, outputs: list[torch.Tensor], parts: list[torch.Tensor]) -> Any:
        """Issues the all-gather; returns what to wait for."""
        return all_gather(outputs, parts, self.gather_group, unit=self.unit, comm=self.gather_comm)

    def gather_input(self) -> torch.Tensor:
        """What this rank brings to the all-gather."""
        if self.part is not None:
            return self.part
        flat = self.flat
        if self.reads_host:  # cast over there: half the bytes would be cast by the CPU otherwise
            flat = flat.to(self.device, non_blocking=self.pin)
        return flat if flat.dtype is self.compute_dtype else flat.to(self.compute_dtype)

    def _row_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """For a custom all-gather, of one row of S per rank: its memory, and the input in its place there."""
        source = self.gather_input()
        make = torch.empty if self.gather_comm is None else self.gather_comm.allocate
        size = (self.num_shards * self.numel,)
        output = make(size, dtype=self.compute_dtype, device=self.device)
        rank = self.axes.coordinate(self.axes.shard)
        if self.part is not None and self.post_forward is not None:
            rank = self.post_forward.rank
        part = output.narrow(0, rank * source.numel(), source.numel())
        part.copy_(source)
        self.custom_gathered = output
        return [output], [part]

    def copy_out(self) -> None:
        """After the all-gather: the gathered rows into the parameters' places."""
        if self.custom_gathered is not None:
            allocate(self.unsharded)
            pairs = self.copy_pairs(self.custom_gathered.view(self.num_shards, -1))
            foreach_copy_([region for region, _ in pairs], [held for _, held in pairs])
            self.custom_gathered = None
        elif self.region_views and self.gathered is not self.unsharded:
            if not self.zero_copy:
                allocate(self.unsharded)
            foreach_copy_(self.region_views, self.gathered_views)

    def cast_whole(self) -> None:
        """Unshard without a shard axis: the cast copy, or nothing."""
        if self.has_own_unsharded:
            allocate(self.unsharded)
            self.unsharded.copy_(self.flat)

    def free_gathered(self) -> None:
        """After ``copy_out`` has run on the device."""
        if self.gathered is not self.unsharded:
            release(self.gathered)
        self.drop_part()

    def free_unsharded(self) -> None:
        """Frees what the unsharded parameters live in, unless the user keeps it."""
        if self.has_own_unsharded and not self.keep_storage:
            release(self.unsharded)

    def keep_part(self, ranks: int) -> None:
        """Before ``free_unsharded``: keeps what the next all-gather, over ``ranks`` ranks only, needs."""
        if self.shard_group is None or ranks >= self.shard_group.size():
            return
        in_rows = self.gather_comm is not None
        if self.post_forward is None or (self.post_forward.ranks, self.post_forward.in_rows) != (
            ranks,
            in_rows,
        ):
            self.post_forward = PostForwardGroup(self, ranks, in_rows=in_rows)
        self.part = self.post_forward.keep()
        self.gather_group = self.post_forward.group

    def drop_part(self) -> None:
        """Lets the next all-gather be of the shards again."""
        if self.part is not None and self.post_forward is not None:
            self.post_forward.drop()
            self.part = None
            self.gather_group = self.shard_group


# Reshard to fewer ranks: between forward and backward k neighbouring ranks hold the parameters once.
#
# ``reshard_after_forward=k`` spends memory (n/k times a shard) to gather within k ranks only, which
# are one machine's if k is the number of its devices. What rank j of k keeps are the rows that
# ranks j*n/k to (j+1)*n/k of the shard axis have in the gathered buffer: gathering them over the k
# ranks fills that buffer as the gather over all n does.


class PostForwardGroup:
    """What a bucket's rank keeps of the unsharded parameters, and with whom it shares them.

    It lies as the next all-gather sends it: of each parameter in place its n/k rows, then rows of the others.

    Attributes:
        in_rows: whether it lies in rows of all parameters instead, as custom all-gathers send it.
        group: the k ranks that hold the parameters once together.
        rank: this rank's place among them.
        buffer: (n/k * S,) in compute dtype; has storage while it is kept.
    """

    def __init__(self, bucket: Bucket, ranks: int, *, in_rows: bool = False) -> None:
        mesh = post_forward_mesh(bucket.axes, ranks)
        self.ranks = ranks
        self.in_rows = in_rows
        self.group = mesh.get_group("within")
        self.rank = mesh.get_local_rank("within")
        rows = bucket.num_shards // ranks
        self.buffer = torch.empty(
            rows * bucket.numel, dtype=bucket.compute_dtype, device=bucket.device
        )
        first = self.rank * rows
        if in_rows:
            pairs = bucket.copy_pairs(self.buffer.view(rows, -1), first)
        else:
            pairs = bucket.member_pairs(bucket.members(self.buffer), first)
        self._sources, self._targets = map(list, zip(*pairs, strict=True))
        release(self.buffer)

    def keep(self) -> torch.Tensor:
        """Copies this rank's rows out of the unsharded parameters."""
        allocate(self.buffer)
        foreach_copy_(self._targets, self._sources)
        return self.buffer

    def drop(self) -> None:
        """Frees them."""
        release(self.buffer)


def pieces(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """A bucket's buffer as tensors of a collective: one for each zero-copy parameter, one for the others."""
    return [flat] if len(sizes) == 1 else list(flat.split(sizes))


# Version counters: which values the unsharded parameters hold, told to autograd.
#
# Autograd reads what an operation has saved for backward only if the tensor's version counter is
# what it was then. So the engine sets the counters of the unsharded parameters: to a number of the
# weights' values while these are there, and to another one while the memory is free or an
# all-gather writes to it. A backward after a change of the weights, or one that the engine was not
# told of, then ends in an error and never computes with what happens to be in the memory.
# ``explain`` says in the engine's words what it was.
#
# A counter has 32 bits. The highest is set while a bucket is free; the others are the bucket's
# number then, and else a part of the bucket's number, a part of that of the values, and some room
# for in-place changes by the user, which raise the counter by one each.
#
# Whether the weights at rest have changed, their own version counters tell, but for fused and
# foreach optimizers, which leave a DTensor's as it was. So optimizer steps are counted too, by a
# hook on every optimizer with a DTensor (one rank may step others alone, and would then gather
# what no other rank does). Nothing sees changes of ``param.data``, nor those of ``torch._foreach_``
# functions on DTensors outside of an optimizer: unless the user asks for it, nothing is kept
# gathered from one forward of the root to the next.

FREE = 1 << 31
NUMBER_BITS, VALUE_BITS, CHANGE_BITS = 11, 12, 8  # with that of ``FREE`` 32

_numbers = count(1)
numbered_buckets: weakref.WeakValueDictionary[int, Bucket] = weakref.WeakValueDictionary()

_version_of = attrgetter("_version")
_steps: int | None = None  # of all optimizers so far; None until the first bucket asks


class _Steps:
    """The steps of one optimizer.

    Attributes:
        last: the number of its last step, counted over all optimizers.
        params: ids of the parameters that it optimizes.
        copies: whether it may write to parameters of which it has copies: some of its own are of no unit.
    """

    def __init__(self) -> None:
        self.last = -1
        self.params: set[int] = set()
        self.copies = False

    def note(self, optimizer: Optimizer, step: int) -> None:
        """Step ``step`` was made."""
        self.last = step
        groups = optimizer.param_groups
        if len(self.params) != sum(len(group["params"]) for group in groups):
            params = [param for group in groups for param in group["params"]]
            self.params = set(map(id, params))
            self.copies = any(isinstance(p, DTensor) and owner_of(p) is None for p in params)


_of_optimizers: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
# Who makes more optimizers than that between a forward and its backward?
_of_deleted: deque[_Steps] = deque(maxlen=8)


@untraced
def _count(optimizer: Optimizer, *_: Any) -> None:
    global _steps
    assert _steps is not None
    groups = optimizer.param_groups  # maybe of other DTensors, master weights that it copies from
    if any(isinstance(param, DTensor) for group in groups for param in group["params"]):
        _steps += 1
        steps = _of_optimizers.get(optimizer)
        if steps is None:
            steps = _of_optimizers[optimizer] = _Steps()
            weakref.finalize(optimizer, _of_deleted.append, steps).atexit = False
        steps.note(optimizer, _steps)


class Versions:
    """The version counters of one bucket, as it was built last.

    Attributes:
        weights: the number of the values that were gathered last; each change of the weights makes another.
    """

    def __init__(self, bucket: Bucket) -> None:
        global _steps
        if _steps is None:
            _steps = 0
            register_optimizer_step_post_hook(_count)
        self.number = next(_numbers)
        self.weights = 0
        self._bucket = weakref.ref(bucket)
        self._sharded = [param.sharded for param in bucket.params]
        self._at_rest = [*self._sharded, *(param.local for param in bucket.params)]
        self._seen = (-1, -1)  # optimizer steps, and the sum of the counters at rest
        self._unsharded_of: Any = None
        self._unsharded: tuple[torch.Tensor, ...] = ()
        numbered_buckets[self.number] = bucket

    def note_weights(self) -> bool:
        """Takes the weights as they are now. Returns whether they had changed."""
        now = self._now()
        changed = self._differs(now)
        if changed:
            self.weights += 1
        self._seen = now
        return changed

    def weights_changed(self) -> bool:
        """Whether the weights were seen to change since ``note_weights``."""
        return self._differs(self._now())

    def _differs(self, now: tuple[int, int]) -> bool:
        steps, versions = self._seen
        return now[1] != versions or (now[0] != steps and self._were_stepped(steps))

    def _now(self) -> tuple[int, int]:
        assert _steps is not None
        with torch_function_off():
            return _steps, sum(map(_version_of, self._at_rest))

    def _were_stepped(self, since: int) -> bool:
        """Whether an optimizer that has one of the weights, or copies to them, has made a step."""
        params = set(map(id, self._sharded))
        return any(
            steps.last > since and (steps.copies or not params.isdisjoint(steps.params))
            for steps in chain(_of_optimizers.values(), _of_deleted)
        )

    def set_unsharded(self) -> None:
        """Tells autograd that the unsharded parameters and their stand-ins hold the values of ``weights``."""
        bucket = self._bucket()
        tensors = self._of_unsharded()
        if bucket is not None and bucket.stand_ins is not None:
            tensors += tuple(bucket.stand_ins)
        number = self.number % (1 << NUMBER_BITS) << VALUE_BITS
        number |= self.weights % (1 << VALUE_BITS)
        set_versions(tensors, (number << CHANGE_BITS,) * len(tensors))

    def set_free(self) -> None:
        """Tells autograd that the memory of the unsharded parameters is free."""
        tensors = self._of_unsharded()
        set_versions(tensors, (FREE | self.number,) * len(tensors))

    def _of_unsharded(self) -> tuple[torch.Tensor, ...]:
        bucket = self._bucket()
        assert bucket is not None
        if self._unsharded_of is not bucket.compute_params:  # of another precision, or made anew
            self._unsharded_of = params = bucket.compute_params
            local = [local_tensor_of(p) for p in params if isinstance(p, DTensor)]
            self._unsharded = (*params, *local)
        return self._unsharded


# Storage that comes and goes while the tensors stay.


def release(tensor: torch.Tensor) -> None:
    """Frees the storage of ``tensor``; every view of it is dead until ``allocate``."""
    if type(tensor) is torch.Tensor:
        tensor.untyped_storage().resize_(0)
        return
    for inner in inner_tensors(tensor):
        inner.untyped_storage().resize_(0)


def allocate(tensor: torch.Tensor) -> None:
    """Gives a released ``tensor`` storage again, with undefined content; storage that was kept stays."""
    for inner in (tensor,) if type(tensor) is torch.Tensor else inner_tensors(tensor):
        storage, size = inner.untyped_storage(), inner.numel() * inner.element_size()
        if storage.size() != size:  # torch would take other memory for the same size too
            storage.resize_(size)
