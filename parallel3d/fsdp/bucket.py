"""Bucket: parameters of one unit with one dtype, one requires_grad and one mesh, in contiguous buffers.

One all-gather and one reduce-scatter carry all of a bucket. Each parameter has a segment of ``padded_numel``
elements in a rank's shard: its chunk and, if the rows don't divide evenly, padding. With n the size of the
shard axis and S the sum of the segments (``numel``), the buffers are:

- ``flat``, (S,): this rank's shards at rest. The sharded parameters' local tensors are views of it, so the
  all-gather needs no packing and a cast is one kernel.
- ``unsharded``, (n * S,): the unsharded parameters, one after another. What forward sees are views of it.
  With n = 1 and no cast it is ``flat`` itself.
- ``gathered``, (n * P,), with P the sum of the segments of the parameters that are not zero-copy: one row
  of P per rank, as the all-gather writes it. It has memory during the all-gather only; then its rows are
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, count
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import (
    follows_grad_dtype,
    has_compiled,
    set_versions,
    torch_function_off,
)
from parallel3d._torch.dtensor import local_tensor_of
from parallel3d._torch.kernels import foreach_copy_, views_like
from parallel3d._torch.simulated import inner_tensors
from parallel3d._util.storage import with_own_storage
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.gradients import BucketGradients
from parallel3d.fsdp.layout import bucket_order
from parallel3d.fsdp.param import (
    OptimizerSteps,
    ShardedParam,
    mark_unsharded,
    segment_of,
    zero_copy_bytes,
)
from parallel3d.fsdp.placement import DataAxes, post_forward_mesh
from parallel3d.fsdp.records import BufferLayout, Precision, plan_copy
from parallel3d.fsdp.reduction import DEFAULT_REDUCER, AllReduce, BucketSettings, Stage


class Bucket:
    """See the module's docstring.

    Attributes:
        params: its parameters: zero-copy ones first, those whose gradient may be partial over tp last.
        layout: how they lie in the buffers.
        settings: what the user and options have set.
        precision: the dtypes that it computes in now, and its buffers in them.
        other_precision: the same for the dtypes that it has computed in before; None: there are no others.
        given_policy: the unit's policy.
        offload: where shards are at rest, if not on the device that computes; see ``offload.CpuOffload``.
        shard_group: process group of the all-gather; None: nothing is sharded.
        gather_group: process group of the next all-gather: ``shard_group``, or one of fewer ranks.
        replicate_groups: process groups that gradients are all-reduced over.
        over_replicate: the stages of a reduction that sum over replicate.
        tp_group: process group that partial gradients are summed over; None: there are none.
        grads: the gradients on their way to ``.grad``, and those accumulated there.
        versions: the version counters of the unsharded parameters.
        device: where the bucket computes. storage_device: where ``flat`` and gradients at rest are. pin:
            whether that memory is pinned. reads_host: whether the two devices differ.
        post_forward_shard: the shard over fewer ranks that this rank has between forward and backward; None:
            it has none. ``precision.post_forward`` describes it.
        gathering: (the work or event of the all-gather under way, its inputs); None: none is.
        custom_gathered: the output of the user's all-gather.
        on_rebuilt: returns a function to call after the unsharded parameters were rebuilt.
        gathers_shards: whether it gathers its shards as they lie, so that parameters may be zero-copy and
            one all-gather may carry it together with other buckets.
        gathers_copy: whether it gathers from a copy of its shards, see ``renew``.
    """

    gathers_shards = True
    gathers_copy = False
    on_rebuilt: Callable[[], Callable[[], None] | None] | None = None
    gathering: Any = None
    settings = BucketSettings()

    def __init__(
        self,
        unit: str,
        params: list[ShardedParam],
        axes: DataAxes,
        policy: MixedPrecisionPolicy,
        offload: Any = None,
    ) -> None:
        device_type = axes.mesh.device_type
        self.unit = unit
        least = params[0].dtype.itemsize, zero_copy_bytes(device_type)
        order = bucket_order([*map(segment_of, params)], *least)
        self.axes = axes
        self.given_policy = policy
        self.offload = offload
        self.num_shards = params[0].num_shards
        self.precision = Precision.of(policy, params[0].dtype, params[0].grad_dtype, own=False)
        self._find_groups(params)
        self.set_params([params[index] for index in order])
        first = self.params[0]
        device = (first.local if first.initial is None else first.initial).device
        self.build(device if device.type in ("meta", device_type) else torch.device(device_type))

    def __str__(self) -> str:
        """Returns what a log says of it: how many parameters of which kind, and what is communicated how."""
        name = str(self.dtype).removeprefix("torch.")
        rank = f"{len(self.params)} of {name}, {self.layout.numel} elements a rank"
        dtypes = (
            f"{self.precision.compute_dtype}, reduced in {self.precision.reduce_dtype}".replace(
                "torch.", ""
            )
        )
        if self.shard_group is None:
            return f"{rank}, not sharded, computes in {dtypes}"
        gathered = f"gathered over {self.num_shards} ranks in {dtypes}"
        return f"{rank}, {gathered}, {self.layout.zero_copy} without a copy, class {type(self).__name__}"

    def change(self, **changes: Any) -> None:
        """Changes ``settings``."""
        self.settings = replace(self.settings, **changes)

    def set_params(self, params: list[ShardedParam]) -> None:
        """Makes ``params``, which are in order, its parameters, before ``build``."""
        packs_all = not self.gathers_shards or self.shard_group is None
        self.params = params
        self.layout = BufferLayout.of(params, self.axes.mesh.device_type, packs_all=packs_all)

    def _find_groups(self, params: list[ShardedParam]) -> None:
        axes = self.axes
        self.shard_group: ProcessGroup | None = None
        self.replicate_groups: list[ProcessGroup] = []
        empty = all(p.geometry.padded_numel == 0 for p in params)  # nothing to communicate
        for axis in (axes.shard, axes.replicate):
            if axis is None or axes.size(axis) == 1 or empty:
                continue
            if axis == axes.shard and self.num_shards > 1:
                self.shard_group = axes.group(axis)
            else:
                self.replicate_groups.append(axes.group(axis))
        self.over_replicate: list[Stage] = [AllReduce(group) for group in self.replicate_groups]
        tp_groups = (
            p.on.summed_group
            for p in params
            if p.may_be_partial or (p.layout.tp_grad == "partial" and p.tp_size > 1)
        )
        self.tp_group: ProcessGroup | None = next(tp_groups, None)

    @property
    def scatter_group(self) -> ProcessGroup | None:
        """Process group of the reduce-scatter."""
        return self.shard_group if (group := self.settings.scatter_group) is None else group

    @property
    def gather_groups(self) -> list[ProcessGroup]:
        """Process groups over which a whole tensor is gathered, one after the other."""
        return [] if self.shard_group is None else [self.shard_group]

    @property
    def to_rest(self) -> Sequence[Stage]:
        """The last stages of a reduction: they bring the result to ``storage_device``."""
        return self.offload.stages if self.reads_host else ()

    # -- storage -----------------------------------------------------------------------------------

    def build(self, device: torch.device) -> None:
        """Makes buffers, views and parameters on ``device``, with the parameters' initial values."""
        self._describe(device)
        # Zeros: padding must stay finite, as norms and casts run over whole buffers.
        self.flat = torch.zeros(
            self.layout.numel, dtype=self.dtype, device=self.storage_device, pin_memory=self.pin
        )
        self.local_views = [with_own_storage(v) for v in self.local_parts(self.flat)]
        for param, view in zip(self.params, self.local_views, strict=True):
            if param.initial is not None:
                view.copy_(param.shard_of(param.initial, tp_local=True))
                param.initial = None
            param.place(view)
        self.versions = Versions(self)
        self.build_unsharded()

    def _describe(self, device: torch.device) -> None:
        """Sets devices, dtypes and sizes, and what depends on them alone."""
        params = self.params
        self.device, self.storage_device, self.pin = device, device, False
        if self.offload is not None:
            self.device, self.storage_device, self.pin = self.offload.places(device, self.axes.mesh)
        self.reads_host = self.storage_device != self.device
        self.dtype = params[0].dtype
        self.other_precision: Precision | None = None
        self.set_precision(own=self.precision.own)
        self.grads = BucketGradients(self)
        self.post_forward_shard: torch.Tensor | None = None
        self.gather_group: Any = self.shard_group
        self.custom_gathered: torch.Tensor | None = None

    def set_precision(self, *, own: bool) -> None:
        """Sets the dtypes that the bucket computes, reduces and accumulates in, without buffers."""
        grad_dtype = self.params[0].grad_dtype
        self.precision = Precision.of(self.given_policy, self.dtype, grad_dtype, own=own)

    @property
    def takes_wider_gradients(self) -> bool:
        """Whether a gradient that is wider than the unsharded parameter reaches the reduction as it is; in
        torch it does since 2.15."""
        wider = self.precision.reduce_dtype.itemsize > self.precision.compute_dtype.itemsize
        return follows_grad_dtype and (wider or self.params[0].grad_dtype == "any")

    def build_unsharded(self) -> None:
        """Makes the all-gather's buffers and the unsharded parameters, in the present dtypes."""
        n, layout, now = self.num_shards, self.layout, self.precision
        now.unsharded = self.flat
        now.has_own_unsharded = n > 1 or now.compute_dtype != self.dtype or self.reads_host
        if now.has_own_unsharded:
            size = n * layout.numel
            now.unsharded = torch.empty(size, dtype=now.compute_dtype, device=self.device)
        now.gathered = now.unsharded
        if n > 1:
            now.gathered = now.unsharded.new_empty(n * layout.packed)
        now.copy_gathered = None
        if layout.packed and now.gathered is not now.unsharded:
            rows = now.gathered.view(n, layout.packed)
            now.copy_gathered = plan_copy(rows, [self], [layout.zero_copy])
        regions = self._regions()
        outputs = [*regions[: layout.zero_copy], now.gathered]
        now.gather_outputs = outputs[: len(layout.member_sizes)]
        now.compute_params = [
            # .data has a version counter of its own: gathering again in backward must not count as an
            # in-place change of a saved tensor.
            nn.Parameter(
                p.as_compute(p.geometry.contiguous_view(r).data), requires_grad=p.requires_grad
            )
            for p, r in zip(self.params, regions, strict=True)
        ]
        for param, compute in zip(self.params, now.compute_params, strict=True):
            vars(compute).update(param.attributes())
            mark_unsharded(compute, param, is_freed=now.has_own_unsharded)
        if now.gathered is not now.unsharded:
            release(now.gathered)
        if now.has_own_unsharded:
            release(now.unsharded)

    def _regions(self) -> Sequence[torch.Tensor]:
        """Returns for each parameter its (n * segment,) of ``unsharded``."""
        sizes = [self.num_shards * size for size in self.layout.segment_sizes]
        return self.precision.unsharded.split(sizes)

    def note_weights(self, comm: Comm) -> None:
        """Notes the version of the weights that the next all-gather brings; see ``Versions``."""
        if self.post_forward_shard is None:  # which is of the weights that were gathered before
            self.versions.note_weights()

    def renew(self, comm: Comm, *, if_changed: bool = False) -> None:
        """Renews the copy of the shards that an option gathers from; ``if_changed``: only if they changed."""

    def leave_precision(self) -> None:
        """Called before the bucket, which is sharded, is switched to another dtype."""

    def enter_precision(self) -> None:
        """Called after the bucket was switched back to a dtype that it has computed in before."""

    def free_other_precision(self) -> None:
        """Frees unsharded parameters, kept by ``keep_storage``, of the dtype that is not in use."""
        other = self.other_precision
        if other is not None and other.has_own_unsharded:
            release(other.unsharded)

    def local_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns for each parameter its rows in a sharded buffer (S,), without padding: ``local_shape``."""
        if self.layout.templates is not None:  # in each backward: no Python call per parameter
            return list(views_like(flat, self.layout.templates))
        segments = flat.split(self.layout.segment_sizes)
        return [p.geometry.local_view(s) for p, s in zip(self.params, segments, strict=True)]

    def kinds(self) -> set[tuple[torch.dtype, torch.device]]:
        """Returns each (dtype, device) of sharded parameters: several if only some were converted."""
        return {(p.local.dtype, p.local.device) for p in self.params}

    def adopt(self) -> bool:
        """Copies values to the buffers that an ordinary call (``to_empty``, ``double``, ...) moved elsewhere.
        Returns whether any had moved.

        Raises:
            Parallel3dError: the parameters have several dtypes or devices now.
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
        # Not in inference mode: tensors made in it could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            for param, local in zip(self.params, locals_, strict=True):
                param.set_dtype(local.dtype)
            grads = self.grads
            self._take(locals_)
            self.grads.carry_over(grads)
        return True

    def _take(self, locals_: list[torch.Tensor]) -> None:
        """Rebuilds the bucket on the device of ``locals_``, the parameters' shards, with their values."""
        self.build(locals_[0].device)
        for view, local in zip(self.local_views, locals_, strict=True):
            view.copy_(local)

    def count_trainable(self) -> int:
        """Sets ``requires_grad`` of the unsharded parameters to the sharded ones'; returns their number."""
        with torch_function_off():  # DTensor's takes longer than all the rest
            trained = [param.sharded.requires_grad for param in self.params]
        if trained != [compute.requires_grad for compute in self.precision.compute_params]:
            for compute, requires_grad in zip(self.precision.compute_params, trained, strict=True):
                compute.requires_grad_(requires_grad)
        return sum(trained)

    # -- reduction -----------------------------------------------------------------------------------

    @property
    def divisor(self) -> float:
        """What the sum of the ranks' gradients is divided by."""
        factor = self.settings.divide_factor
        return (self.axes.mean_over or self.axes.data_size) if factor is None else factor

    @property
    def reduced_zero_copy(self) -> int:
        """How many gradients, the first ones, are reduced from where autograd has put them."""
        return 0 if self.settings.reducer.by_row else self.layout.zero_copy

    def reduce_input(self, since: int) -> torch.Tensor:
        """Returns memory for the gradients from index ``since`` on: a row per shard rank, in reduce dtype."""
        merged = self.grads.merged
        if merged is not None and (memory := merged.memory(self)) is not None:
            return memory
        size = self.num_shards * sum(self.layout.segment_sizes[since:])
        reducer = DEFAULT_REDUCER if self.shard_group is None else self.settings.reducer
        return reducer.allocate(size, self.precision.reduce_dtype, self.device)

    # -- unshard -------------------------------------------------------------------------------------

    def copy_pairs(
        self, rows: torch.Tensor, first: int = 0, *, since: int = 0, until: int | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns views of ``unsharded``, and the views of ``rows`` with the same elements.

        Args:
            rows: (k, segments): what the shard ranks from ``first`` on hold of the parameters from index
                ``since`` to before ``until``.
        """
        unsharded: list[torch.Tensor] = []
        sharded: list[torch.Tensor] = []
        # Views made in it could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            columns = rows.split(self.layout.segment_sizes[since:until], dim=1)
            regions = self._regions()[since:until]
            for param, region, column in zip(
                self.params[since:until], regions, columns, strict=True
            ):
                for view, held in param.geometry.copy_pairs(region, column, first):
                    unsharded.append(view)
                    sharded.append(held)
        return unsharded, sharded

    def members(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Splits ``shard``, (k * S,) in the order of the all-gather call, into the inputs of that call."""
        if len(self.layout.member_sizes) == 1:
            return [shard]
        k = shard.numel() // self.layout.numel
        return list(shard.split([k * size for size in self.layout.member_sizes]))

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Allocates and returns the outputs and inputs of the all-gather; the inputs are in compute dtype."""
        kept = None if self.post_forward_shard is None else self.precision.post_forward
        in_rows = self.settings.gather_comm is not None if kept is None else kept.in_rows
        if in_rows and self.shard_group is not None:
            return self._row_buffers()
        self.custom_gathered = None
        if self.layout.zero_copy:
            allocate(self.precision.unsharded)
        allocate(self.precision.gathered)
        return self.precision.gather_outputs, self.members(self.gather_input())

    def start_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        """Issues the all-gather; returns the work to wait for, or None."""
        return all_gather(
            outputs, inputs, self.gather_group, unit=self.unit, comm=self.settings.gather_comm
        )

    def gather_input(self) -> torch.Tensor:
        """Returns this rank's shard, (S,) in compute dtype, or what it has of it over fewer ranks."""
        if self.post_forward_shard is not None:
            return self.post_forward_shard
        flat = self.flat
        if self.reads_host:  # cast on the device: the CPU would take longer
            flat = flat.to(self.device, non_blocking=self.pin)
        dtype = self.precision.compute_dtype
        return flat if flat.dtype is dtype else flat.to(dtype)

    def _row_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the buffers of a custom all-gather: an output of one row of S per rank, and one of them."""
        source = self.gather_input()
        comm = self.settings.gather_comm
        make = torch.empty if comm is None else comm.allocate
        size = (self.num_shards * self.layout.numel,)
        output = make(size, dtype=self.precision.compute_dtype, device=self.device)
        kept = None if self.post_forward_shard is None else self.precision.post_forward
        rank = self.axes.coordinate(self.axes.shard) if kept is None else kept.rank
        shard = output.narrow(0, rank * source.numel(), source.numel())
        shard.copy_(source)
        self.custom_gathered = output
        return [output], [shard]

    def copy_out(self) -> None:
        """Copies what was gathered to the unsharded parameters, after the all-gather."""
        if self.custom_gathered is not None:
            allocate(self.precision.unsharded)
            plan_copy(self.custom_gathered.view(self.num_shards, -1), [self], [0])()
            self.custom_gathered = None
        elif self.precision.copy_gathered is not None:
            if not self.layout.zero_copy:
                allocate(self.precision.unsharded)
            self.precision.copy_gathered()

    def unshard_without_gather(self) -> None:
        """Unshards without an all-gather, if nothing is sharded: by the cast copy, or not at all."""
        if self.precision.has_own_unsharded:
            allocate(self.precision.unsharded)
            self.precision.unsharded.copy_(self.flat)

    def free_gathered(self) -> None:
        """Frees the all-gather's output, after ``copy_out``."""
        if self.precision.gathered is not self.precision.unsharded:
            release(self.precision.gathered)
        self.free_post_forward_shard()

    def free_unsharded(self) -> None:
        """Frees the unsharded parameters, unless the user keeps their memory."""
        if self.precision.has_own_unsharded and not self.settings.keep_storage:
            release(self.precision.unsharded)

    def to_sharded_post_forward(self, ranks: int) -> None:
        """Keeps this rank's shard over ``ranks`` ranks, before ``free_unsharded``."""
        if self.shard_group is None or ranks >= self.shard_group.size():
            return
        in_rows = self.settings.gather_comm is not None
        kept = self.precision.post_forward
        if kept is None or (kept.ranks, kept.in_rows) != (ranks, in_rows):
            self.precision.post_forward = kept = PostForwardGroup(self, ranks, in_rows)
        self.post_forward_shard = kept.keep()
        self.gather_group = kept.group

    def free_post_forward_shard(self) -> None:
        """Frees the shard over fewer ranks: the next all-gather is over all shard ranks."""
        if self.post_forward_shard is not None and self.precision.post_forward is not None:
            self.precision.post_forward.drop()
            self.post_forward_shard = None
            self.gather_group = self.shard_group


class PostForwardGroup:
    """The shard of a bucket over fewer ranks that a rank keeps between forward and backward.

    With ``reshard_after_forward=k`` a rank keeps n/k shards, so that the next all-gather needs only k
    consecutive ranks, which are on one machine if k is the number of its devices. Rank j of the k ranks keeps
    the shards of the shard ranks from j*n/k to (j+1)*n/k. So an all-gather over the k ranks fills the same
    gathered buffer as one over all n ranks.

    Attributes:
        in_rows: whether the shard has rows of S, as custom all-gathers take it. If not, it has the n/k rows
            of each zero-copy parameter, then the rows of the others.
        group: the k ranks.
        rank: this rank's place among them.
        buffer: (n/k * S,), the shard, in compute dtype; it has storage while it is kept.
    """

    def __init__(self, bucket: Bucket, ranks: int, in_rows: bool) -> None:
        mesh = post_forward_mesh(bucket.axes, ranks)
        self.ranks = ranks
        self.in_rows = in_rows
        self.group = mesh.get_group("within")
        self.rank = mesh.get_local_rank("within")
        rows = bucket.num_shards // ranks
        self.buffer = torch.empty(
            rows * bucket.layout.numel, dtype=bucket.precision.compute_dtype, device=bucket.device
        )
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        for since, shard in enumerate([self.buffer] if in_rows else bucket.members(self.buffer)):
            until = since + 1 if since < bucket.layout.zero_copy and not in_rows else None
            unsharded, kept = bucket.copy_pairs(
                shard.view(rows, -1), self.rank * rows, since=since, until=until
            )
            self._sources += unsharded
            self._targets += kept
        release(self.buffer)

    def keep(self) -> torch.Tensor:
        """Copies the shard out of the unsharded parameters, and returns it."""
        allocate(self.buffer)
        foreach_copy_(self._targets, self._sources)
        return self.buffer

    def drop(self) -> None:
        """Frees the shard."""
        release(self.buffer)


# Version counters: they tell autograd which values the unsharded parameters hold.
#
# Autograd reads a tensor that was saved for backward only if its version counter is what it was then. So
# the engine sets the counters of the unsharded parameters: to a version of the weights while they hold its
# values, and to another number while they are freed or gathered. A backward after a change of the weights,
# or one that the engine was not told of, then raises (``watch`` translates the error) and never reads
# other values.
#
# A counter has 32 bits. The highest is set while a bucket is free, and the others are the bucket's number.
# Otherwise they are part of the bucket's number, part of the version of its weights, and room for in-place
# changes by the user, each of which raises the counter by one.
#
# Changes of the weights at rest are seen by their own version counters. Fused and foreach optimizers leave
# a DTensor's as it was, so the steps of optimizers with DTensors are counted too (those of others may
# differ between ranks, and so would what they gather). Changes of ``param.data``, and by
# ``torch._foreach_`` functions outside of an optimizer, are not seen: unless the user asks for it, nothing
# is kept gathered from one forward of the root to the next.

FREE = 1 << 31
NUMBER_BITS, VALUE_BITS, CHANGE_BITS = 11, 12, 8  # with that of ``FREE`` 32

_numbers = count(1)
numbered_buckets: weakref.WeakValueDictionary[int, Bucket] = weakref.WeakValueDictionary()

_version_of = attrgetter("_version")


class Versions:
    """The version counters of one bucket, from one ``build`` to the next.

    Attributes:
        number: the bucket's number.
        weights: the version of the weights that was gathered last; each change of them makes another.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.number = next(_numbers)
        self._first = self.number % (1 << NUMBER_BITS) << VALUE_BITS
        self.weights = 0
        self._bucket = weakref.ref(bucket)
        self._sharded = [param.sharded for param in bucket.params]
        self._at_rest = [*self._sharded, *(param.local for param in bucket.params)]
        self._seen = (-1, -1)  # optimizer steps, and the sum of the counters at rest
        self._unsharded_of: Any = None
        self._unsharded: tuple[torch.Tensor, ...] = ()
        self._watched: list[torch.Tensor] = []  # those of them that lie in the bucket's buffer
        self._storage = 0
        self._set = 0  # what ``set_unsharded`` has set
        numbered_buckets[self.number] = bucket

    def note_weights(self) -> bool:
        """Notes that the present weights are gathered. Returns whether they were seen to change before."""
        now = self._now()
        changed = self._differs(now)
        if changed:
            self.weights += 1
        self._seen = now
        return changed

    def weights_changed(self) -> bool:
        """Returns whether the weights were seen to change since ``note_weights``."""
        return self._differs(self._now())

    def _differs(self, now: tuple[int, int]) -> bool:
        steps, versions = self._seen
        if now[0] == steps or now[1] != versions:
            return now[1] != versions
        params = set(map(id, self._sharded))
        return any(
            record.last > steps and (record.copies or not params.isdisjoint(record.params))
            for record in chain(OptimizerSteps.of_alive.values(), OptimizerSteps.of_deleted)
        )

    def _now(self) -> tuple[int, int]:
        """Returns (steps of all optimizers, sum of the weights' counters)."""
        with torch_function_off():
            return OptimizerSteps.total, sum(map(_version_of, self._at_rest))

    def set_unsharded(self) -> None:
        """Tells autograd that the unsharded parameters hold version ``weights``."""
        tensors = self._of_unsharded()
        self._set = (self._first | self.weights % (1 << VALUE_BITS)) << CHANGE_BITS
        set_versions(tensors, (self._set,) * len(tensors))

    def written(self) -> list[str]:
        """Returns the names of the unsharded parameters that were written since ``set_unsharded``."""
        tensors = self._of_unsharded()
        bucket = self._bucket()
        assert bucket is not None
        # A compiled ``.data = ...`` gives it other memory, since torch 2.15 without another version.
        moved = (
            [t for t in self._watched if _storage_of(t) != self._storage] if has_compiled() else ()
        )
        if sum(map(_version_of, tensors)) == self._set * len(tensors) and not moved:
            return []
        written = {id(tensor) for tensor in tensors if tensor._version != self._set}
        written.update(map(id, moved))
        return [
            param.name
            for param, compute in zip(bucket.params, bucket.precision.compute_params, strict=True)
            if id(compute) in written or id(getattr(compute, "_local_tensor", None)) in written
        ]

    def set_free(self) -> None:
        """Tells autograd that the unsharded parameters are freed."""
        tensors = self._of_unsharded()
        set_versions(tensors, (FREE | self.number,) * len(tensors))

    def saved_as(self, fails: Callable[[], bool]) -> bool | None:
        """Finds out whether a saved tensor that ``fails`` to be read is (a view of) an unsharded parameter.

        Returns:
            None: it is not. True: the parameters were freed when it was read or saved. False: the parameters
            had other values when it was saved.
        """
        tensors = self._of_unsharded()
        now = tuple(tensor._version for tensor in tensors)
        older = range(self.weights, max(self.weights - 64, -1), -1)
        held = ((self._first | weights % (1 << VALUE_BITS)) << CHANGE_BITS for weights in older)
        try:
            for version in (FREE | self.number, *held):
                set_versions(tensors, (version,) * len(tensors))
                if not fails():
                    return bool(FREE & (version | max(now)))
        finally:
            set_versions(tensors, now)
        return None

    def _of_unsharded(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that have the counters: unsharded parameters, and DTensors' local tensors."""
        bucket = self._bucket()
        assert bucket is not None
        params = bucket.precision.compute_params
        if self._unsharded_of is not params:  # of another dtype, or rebuilt
            self._unsharded_of = params
            local = [local_tensor_of(p) for p in params if isinstance(p, DTensor)]
            self._unsharded = (*params, *local)
            self._storage = _storage_of(bucket.precision.unsharded)
            self._watched = [t for t in self._unsharded if _storage_of(t) == self._storage != 0]
        return self._unsharded


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if type(tensor) in (torch.Tensor, nn.Parameter) else 0


def release(tensor: torch.Tensor) -> None:
    """Frees the storage of ``tensor``. Views of it must not be read until ``allocate``."""
    for inner in (tensor,) if type(tensor) is torch.Tensor else inner_tensors(tensor):
        inner.untyped_storage().resize_(0)


def allocate(tensor: torch.Tensor) -> None:
    """Gives a released ``tensor`` storage again, with undefined content; storage that was kept stays."""
    for inner in (tensor,) if type(tensor) is torch.Tensor else inner_tensors(tensor):
        storage, size = inner.untyped_storage(), inner.numel() * inner.element_size()
        if storage.size() != size:  # for the same size, too, torch would allocate other memory
            storage.resize_(size)
