"""Bucket: parameters of one unit with one dtype, one requires_grad and one mesh, in contiguous buffers.

One all-gather and one reduce-scatter carry all of a bucket. Each parameter has a segment of ``padded_numel``
elements in a rank's shard: its chunk and, if the rows don't divide evenly, padding. With n the size of the
shard axis and S the sum of the segments (``numel``), the buffers are:

- ``flat``, (S,): this rank's shards at rest. The sharded parameters' local tensors are views of it, so the
  all-gather needs no packing and a cast is one kernel.
- ``unsharded``, (n * S,): the unsharded parameters, one after another, which forward sees as views of it.
  With n = 1 and no cast it is ``flat`` itself.
- ``gathered``, (n * P,), with P the sum of the segments of the parameters that are not zero-copy: one row
  of P per rank, as the all-gather writes it, copied to their places in ``unsharded`` right after it.

Zero-copy parameters, first in the bucket, are large and cut evenly along dim 0. Their rows lie rank by rank
in ``unsharded``: the all-gather writes them there, and the reduce-scatter reads their gradients where
autograd has put them. Tensors and views of buffers last as long as the model; only their storage is allocated
and freed.
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
from parallel3d._util.storage import with_own_storage
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.collectives import all_gather
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
from parallel3d.fsdp.reduction import (
    DEFAULT_REDUCER,
    AllReduce,
    BucketMemory,
    BucketSettings,
    Comm,
    Reducer,
    Stage,
)
from parallel3d.fsdp.wire import WireReducer


class Bucket:
    """Parameters of one unit that are gathered together and whose gradients are reduced together.

    The module's docstring describes the buffers, n, S and zero-copy parameters.

    Attributes:
        params: its parameters: zero-copy ones first, those whose gradient may be partial over tp last.
        layout: where each parameter lies in the buffers.
        settings: what the user and options have set.
        precision: the dtypes that it computes in now, with the buffers in these dtypes. other_precision: the
            same for the other dtypes that it has computed in, if there are any (``full_precision_in_eval``).
        given_policy: the unit's mixed precision policy.
        offload: the ``options.memory.CpuOffload`` that keeps shards in CPU memory; None without offload.
        shard_group: process group of the all-gather; None: nothing is sharded.
        gather_group: process group of the next all-gather: ``shard_group``, or that of the fewer ranks of
            ``reshard_after_forward=k``.
        replicate_groups, over_replicate: the process groups that gradients are all-reduced over, and the
            ``Stage`` of a reduction for each.
        tp_group: process group that partial gradients are summed over; None: there are none.
        grads: the ``BucketGradients``, from their arrival in backward to ``.grad``.
        versions: sets and reads the version counters of the unsharded parameters.
        device, storage_device: the device that computes, and the one of ``flat`` and of gradients at rest.
            pin: whether that memory is pinned. reads_host: whether the two devices differ.
        post_forward_shard: with ``reshard_after_forward=k``, between forward and backward, this rank's shard
            over k ranks; else None. ``precision.post_forward`` describes it.
        gathering: (the work or event of the all-gather under way, its inputs); None: none is under way.
        custom_gathered: the output of the user's own all-gather; see ``set_custom_all_gather``.
        on_rebuilt: returns a function to call after the unsharded parameters were rebuilt, or None.
        gathers_shards: whether the all-gather reads the shards in ``flat`` directly, so that parameters may
            be zero-copy and one call may gather several buckets. gathers_copy: whether it reads a copy of
            them, which ``renew`` updates.
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
        least = params[0].dtype.itemsize, zero_copy_bytes(device_type)
        order = bucket_order([*map(segment_of, params)], *least)
        self.unit, self.axes = unit, axes
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
        now = self.precision
        text = f"{len(self.params)} of {self.dtype}, {self.layout.numel} elements a rank, "
        sharded = self.shard_group is not None
        text += f"gathered over {self.num_shards} ranks" if sharded else "not sharded, computes"
        text += f" in {now.compute_dtype}, reduced in {now.reduce_dtype}"
        if now.wire_dtype is not None:
            text += f", sent in {now.wire_dtype}"
        if sharded:
            text += f", {self.layout.zero_copy} without a copy, class {type(self).__name__}"
        return text.replace("torch.", "")

    def change(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)

    def set_params(self, params: list[ShardedParam]) -> None:
        """Sets ``params``, already in the bucket's order, and their layout; ``build`` makes the buffers."""
        self.params = params
        packs_all = not self.gathers_shards or self.shard_group is None
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
        return self.shard_group if (group := self.settings.scatter_group) is None else group

    @property
    def gather_groups(self) -> list[ProcessGroup]:
        """The process groups to all-gather over, one after the other, to get whole tensors from shards."""
        return [] if self.shard_group is None else [self.shard_group]

    @property
    def to_rest(self) -> Sequence[Stage]:
        """The last stages of a reduction, which copy its result to ``storage_device``; usually none."""
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
        """Sets devices, dtypes and empty gradients; allocates no buffer."""
        self.device, self.storage_device, self.pin = device, device, False
        if self.offload is not None:
            self.device, self.storage_device, self.pin = self.offload.places(device, self.axes.mesh)
        self.reads_host = self.storage_device != self.device
        self.dtype = self.params[0].dtype
        self.other_precision: Precision | None = None
        self.set_precision(own=self.precision.own)
        self.grads = BucketGradients(self)
        self.post_forward_shard: torch.Tensor | None = None
        self.gather_group: Any = self.shard_group
        self.custom_gathered: torch.Tensor | None = None

    def set_precision(self, *, own: bool) -> None:
        """Sets the dtypes to compute, reduce and accumulate in: the parameters' own if ``own``, else the
        policy's. The buffers are made by ``build_unsharded``."""
        grad_dtype = self.params[0].grad_dtype
        self.precision = Precision.of(self.given_policy, self.dtype, grad_dtype, own=own)

    @property
    def takes_wider_gradients(self) -> bool:
        """Whether gradients wider than the unsharded parameters are reduced without a cast (torch 2.15)."""
        wider = self.precision.reduce_dtype.itemsize > self.precision.compute_dtype.itemsize
        return follows_grad_dtype and (wider or self.params[0].grad_dtype == "any")

    def build_unsharded(self) -> None:
        """Makes the all-gather's buffers and the unsharded parameters in the dtypes of ``precision``."""
        n, layout, now = self.num_shards, self.layout, self.precision
        now.unsharded = self.flat
        now.has_own_unsharded = n > 1 or now.compute_dtype != self.dtype or self.reads_host
        memory, kind = self.settings.memory, (now.compute_dtype, self.device)
        if now.has_own_unsharded:
            now.unsharded = memory.make("unsharded", n * layout.numel, *kind)
        now.gathered = now.unsharded
        if n > 1:
            now.gathered = memory.make("gathered", n * layout.packed, *kind)
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
            memory.release(now.gathered)
        if now.has_own_unsharded:
            memory.release(now.unsharded)

    def _regions(self) -> Sequence[torch.Tensor]:
        """Returns for each parameter its part of the buffer ``unsharded``: (n * segment,)."""
        sizes = [self.num_shards * size for size in self.layout.segment_sizes]
        return self.precision.unsharded.split(sizes)

    def note_weights(self, comm: Comm) -> None:
        """Records which version of the weights the next all-gather reads; see ``Versions``."""
        if self.post_forward_shard is None:  # which is of the weights that were gathered before
            self.versions.note_weights()

    def renew(self, comm: Comm, *, if_changed: bool = False) -> None:
        """Updates the copy of the shards that the all-gather reads, in buckets with ``gathers_copy``; with
        ``if_changed`` only if the weights have changed. Does nothing here."""

    def leave_precision(self) -> None:
        """Called while the bucket is sharded, before it is switched to other dtypes."""

    def enter_precision(self) -> None:
        """Called after it was switched back to dtypes that it has computed in before."""

    def free_other_precision(self) -> None:
        """Frees the unsharded parameters of ``other_precision``, whose memory ``keep_storage`` has kept."""
        other = self.other_precision
        if other is not None and other.has_own_unsharded:
            self.settings.memory.release(other.unsharded)

    def local_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns for each parameter a view of its rows in ``flat``, (S,) sharded, of ``local_shape``."""
        if self.layout.templates is not None:  # in each backward: no Python call per parameter
            return list(views_like(flat, self.layout.templates))
        segments = flat.split(self.layout.segment_sizes)
        return [p.geometry.local_view(s) for p, s in zip(self.params, segments, strict=True)]

    def kinds(self) -> set[tuple[torch.dtype, torch.device]]:
        """Returns the (dtype, device) pairs of sharded parameters: several if only some were converted."""
        return {(p.local.dtype, p.local.device) for p in self.params}

    def adopt(self) -> bool:
        """Copies the parameters' values into new buffers if a call such as ``to_empty`` or ``double`` has
        given them other memory. Returns whether it has; raises Parallel3dError if they now have several
        dtypes or devices."""
        if all(map(is_, map(local_tensor_of, self.versions.sharded), self.local_views)):
            return False
        locals_ = [param.local for param in self.params]
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
        """Sets ``requires_grad`` of unsharded parameters to the sharded ones'; returns how many are True."""
        with torch_function_off():  # DTensor's takes longer than all the rest
            trained = [*map(_REQUIRES_GRAD, self.versions.sharded)]
        if trained != [*map(_REQUIRES_GRAD, self.precision.compute_params)]:
            for compute, requires_grad in zip(self.precision.compute_params, trained, strict=True):
                compute.requires_grad_(requires_grad)
        return sum(trained)

    # -- reduction -----------------------------------------------------------------------------------

    @property
    def divisor(self) -> float:
        """The number that the sum of the ranks' gradients is divided by."""
        factor = self.settings.divide_factor
        return (self.axes.mean_over or self.axes.data_size) if factor is None else factor

    @property
    def reducer(self) -> Reducer:
        """The collectives that reduce its gradients: the user's, ``wire_dtype``'s, or the default ones."""
        chosen, now = self.settings.reducer, self.precision
        if chosen is not DEFAULT_REDUCER or now.wire_dtype is None:
            return chosen
        return WireReducer(now.wire_dtype, now.reduce_dtype)

    @property
    def sent_dtype(self) -> torch.dtype:
        """The dtype of the reduce-scatter's inputs: ``wire_dtype``, or without one the reduce dtype."""
        wire = self.precision.wire_dtype
        return self.precision.reduce_dtype if wire is None or self.scatter_group is None else wire

    @property
    def reduced_zero_copy(self) -> int:
        """How many gradients, the first ones, the reduce-scatter reads where autograd has put them."""
        return 0 if self.settings.reducer.by_row else self.layout.zero_copy

    def reduce_input(self, since: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns memory for the gradients of the parameters from index ``since`` on: a row per shard rank.

        ``dtype`` None: the dtype in which gradients are sent if they arrive in it, else the reduce dtype.
        """
        merged = self.grads.merged
        if merged is not None and (memory := merged.memory(self)) is not None:
            return memory
        size = self.num_shards * sum(self.layout.segment_sizes[since:])
        reducer = DEFAULT_REDUCER if self.shard_group is None else self.settings.reducer
        sent, now = self.sent_dtype, self.precision
        usual = sent if sent is now.compute_dtype else now.reduce_dtype
        return reducer.allocate(size, dtype or usual, self.device)

    @property
    def lends_inputs(self) -> bool:
        """Whether the reduce-scatter's inputs lie in memory that ``settings.memory`` lends (fixed addresses).
        Not if nothing is sharded (the input becomes the gradient), with the user's own collectives, or with
        ``wire_dtype``."""
        settings = self.settings
        usual = settings.reducer is DEFAULT_REDUCER and self.precision.wire_dtype is None
        return settings.memory.is_fixed and usual and self.shard_group is not None

    # -- unshard -------------------------------------------------------------------------------------

    def copy_pairs(
        self, rows: torch.Tensor, first: int = 0, *, since: int = 0, until: int | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns two lists, for a copy of gathered rows: views of ``unsharded``, and for each the view of
        ``rows`` that has the same elements.

        Args:
            rows: (k, elements): for k shard ranks, from rank ``first`` on, the segments of the parameters
                with indices in ``range(since, until)``.
        """
        unsharded: list[torch.Tensor] = []
        sharded: list[torch.Tensor] = []
        # Views made in it could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            columns = rows.split(self.layout.segment_sizes[since:until], dim=1)
            regions = self._regions()[since:until]
            parts = zip(self.params[since:until], regions, columns, strict=True)
            for param, region, column in parts:
                for view, held in param.geometry.copy_pairs(region, column, first):
                    unsharded.append(view)
                    sharded.append(held)
        return unsharded, sharded

    def members(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Splits ``shard``, (k * S,) with the shards of k ranks, into the inputs of one coalesced all-gather:
        one for each zero-copy parameter, and one for the rest."""
        if len(self.layout.member_sizes) == 1:
            return [shard]
        k = shard.numel() // self.layout.numel
        return list(shard.split([k * size for size in self.layout.member_sizes]))

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Allocates the all-gather's outputs. Returns (outputs, inputs); the inputs are in compute dtype."""
        kept = None if self.post_forward_shard is None else self.precision.post_forward
        in_rows = self.settings.gather_comm is not None if kept is None else kept.in_rows
        if in_rows and self.shard_group is not None:
            return self._row_buffers()
        self.custom_gathered = None
        memory = self.settings.memory
        if self.layout.zero_copy:
            memory.allocate(self.precision.unsharded)
        memory.allocate(self.precision.gathered)
        return self.precision.gather_outputs, self.members(self.gather_input())

    def start_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        return all_gather(
            outputs, inputs, self.gather_group, unit=self.unit, comm=self.settings.gather_comm
        )

    def gather_input(self) -> torch.Tensor:
        """Returns what this rank sends in the all-gather, in compute dtype: its shard, (S,), or with
        ``reshard_after_forward=k`` in backward its larger shard over k ranks."""
        if self.post_forward_shard is not None:
            return self.post_forward_shard
        return self.cast_shard(self.settings.memory)

    def cast_shard(self, memory: BucketMemory) -> torch.Tensor:
        """Returns this rank's shard, (S,), in compute dtype on the device; a copy lies in ``memory``."""
        flat, dtype = self.flat, self.precision.compute_dtype
        if self.reads_host:  # cast on the device: the CPU would take longer
            flat = memory.copy("fetched", flat, flat.dtype, self.device, non_blocking=self.pin)
        return flat if flat.dtype is dtype else memory.copy("cast", flat, dtype, self.device)

    def _row_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns ([output], [input]) of an all-gather by one call on rows: the output, in the user's memory,
        has one row of S elements per rank, and the input is this rank's row of it."""
        source = self.gather_input()
        comm = self.settings.gather_comm
        make = torch.empty if comm is None else comm.allocate
        size = (self.num_shards * self.layout.numel,)
        output = make(size, dtype=self.precision.compute_dtype, device=self.device)
        kept = None if self.post_forward_shard is None else self.precision.post_forward
        rank = self.axes.coordinate(self.axes.shard) if kept is None else kept.rank
        self.custom_gathered = output
        return [output], [output.narrow(0, rank * source.numel(), source.numel()).copy_(source)]

    def copy_out(self) -> None:
        if self.custom_gathered is not None:
            self.settings.memory.allocate(self.precision.unsharded)
            plan_copy(self.custom_gathered.view(self.num_shards, -1), [self], [0])()
            self.custom_gathered = None
        elif self.precision.copy_gathered is not None:
            if not self.layout.zero_copy:
                self.settings.memory.allocate(self.precision.unsharded)
            self.precision.copy_gathered()

    def unshard_without_gather(self) -> None:
        """Where nothing is sharded: casts ``flat`` to ``unsharded``, unless that is ``flat`` itself."""
        if self.precision.has_own_unsharded:
            self.settings.memory.allocate(self.precision.unsharded)
            self.precision.unsharded.copy_(self.flat)

    def free_gathered(self) -> None:
        if self.precision.gathered is not self.precision.unsharded:
            self.settings.memory.release(self.precision.gathered)
        self.free_post_forward_shard()

    def free_unsharded(self) -> None:
        if self.precision.has_own_unsharded and not self.settings.keep_storage:
            self.settings.memory.release(self.precision.unsharded)

    def to_sharded_post_forward(self, ranks: int) -> None:
        """For ``reshard_after_forward=ranks``: keeps this rank's shard over so many ranks, copied from the
        unsharded parameters before these are freed. The next all-gather is then over these ranks."""
        if self.shard_group is None or ranks >= self.shard_group.size():
            return
        in_rows = self.settings.gather_comm is not None
        kept = self.precision.post_forward
        if kept is None or (kept.ranks, kept.in_rows) != (ranks, in_rows):
            self.precision.post_forward = kept = PostForwardGroup(self, ranks, in_rows)
        self.post_forward_shard = kept.keep()
        self.gather_group = kept.group

    def free_post_forward_shard(self) -> None:
        """Frees the shard that ``to_sharded_post_forward`` kept; the next gather is over all shard ranks."""
        if self.post_forward_shard is not None and self.precision.post_forward is not None:
            self.precision.post_forward.drop()
            self.post_forward_shard = None
            self.gather_group = self.shard_group


class PostForwardGroup:
    """With ``reshard_after_forward=k``: the shard over k ranks that a rank keeps from forward to backward.

    The all-gather of backward is then over k consecutive ranks only, which are on one machine if k is the
    number of its devices. Rank j of the k ranks keeps the shards of shard ranks j*n/k to (j+1)*n/k: an
    all-gather over them fills the same buffer as one over all n ranks.

    Attributes:
        in_rows: whether the buffer is n/k rows of S elements, as custom all-gathers take it. If not, it has
            the n/k rows of each zero-copy parameter, then the rows of the others.
        group: the k ranks. rank: this rank's index among them.
        buffer: (n/k * S,), the shard, in compute dtype; ``memory`` gives it storage while it is kept.
    """

    def __init__(self, bucket: Bucket, ranks: int, in_rows: bool) -> None:
        mesh = post_forward_mesh(bucket.axes, ranks)
        self.ranks, self.in_rows = ranks, in_rows
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
        self.memory = bucket.settings.memory
        self.memory.release(self.buffer)

    def keep(self) -> torch.Tensor:
        """Copies the shard out of the unsharded parameters, and returns it."""
        self.memory.allocate(self.buffer)
        foreach_copy_(self._targets, self._sources)
        return self.buffer

    def drop(self) -> None:
        self.memory.release(self.buffer)


# Autograd reads a tensor that was saved for backward only if its version counter is what it was then. So the
# engine sets the counters of the unsharded parameters: to a version of the weights while they hold its
# values, and to another number while they are freed or gathered. A backward after a change of the weights, or
# one that the engine was not told of, then raises (``watch`` translates the error) and never reads other
# values.
#
# A counter has 32 bits. The highest is set while a bucket is free, and the others are the bucket's number.
# Otherwise they are part of the bucket's number, part of the version of its weights, and room for in-place
# changes by the user, each of which raises the counter by one.
#
# Changes of the weights at rest are seen by their own version counters. Fused and foreach optimizers leave a
# DTensor's as it was, so the steps of optimizers with DTensors are counted too (those of others may differ
# between ranks, and so would what they gather). Changes of ``param.data``, and by ``torch._foreach_``
# functions outside of an optimizer, are not seen: by default nothing is kept gathered from one root forward
# to the next.

FREE = 1 << 31
NUMBER_BITS, VALUE_BITS, CHANGE_BITS = 11, 12, 8  # with that of ``FREE`` 32

_numbers = count(1)
numbered_buckets: weakref.WeakValueDictionary[int, Bucket] = weakref.WeakValueDictionary()

_version_of = attrgetter("_version")
_REQUIRES_GRAD = attrgetter("requires_grad")


class Versions:
    """Sets and reads the version counters of one bucket's tensors, so that autograd raises if a backward
    would read freed parameters or other weights than its forward.

    Made anew by each ``Bucket.build``.

    Attributes:
        sharded: the sharded Parameters.
        weights: a number of the weights' state that was gathered last; each noticed change increments it.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.number = next(_numbers)
        self._first = self.number % (1 << NUMBER_BITS) << VALUE_BITS
        self.weights = 0
        self._bucket = weakref.ref(bucket)
        self.sharded = [param.sharded for param in bucket.params]
        self._at_rest = [*self.sharded, *map(local_tensor_of, self.sharded)]
        self._seen = (-1, -1)  # optimizer steps, and the sum of the counters at rest
        self._unsharded_of: Any = None
        self._unsharded: tuple[torch.Tensor, ...] = ()
        self._watched: list[torch.Tensor] = []  # those of them that lie in the bucket's buffer
        self._storage = 0
        self._set = 0  # what ``set_unsharded`` has set
        numbered_buckets[self.number] = bucket

    def note_weights(self) -> bool:
        """Records that the present weights are gathered; returns whether a change of them was noticed."""
        if (now := self._now()) == self._seen:
            return False
        changed = self._differs(now)
        if changed:
            self.weights += 1
        self._seen = now
        return changed

    def weights_changed(self) -> bool:
        return self._differs(self._now())

    def _differs(self, now: tuple[int, int]) -> bool:
        steps, versions = self._seen
        if now[0] == steps or now[1] != versions:
            return now[1] != versions
        params = set(map(id, self.sharded))
        return any(
            record.last > steps and (record.copies or not params.isdisjoint(record.params))
            for record in chain(OptimizerSteps.of_alive.values(), OptimizerSteps.of_deleted)
        )

    def _now(self) -> tuple[int, int]:
        """Returns (number of steps of all optimizers, sum of the sharded parameters' version counters)."""
        with torch_function_off():
            return OptimizerSteps.total, sum(map(_version_of, self._at_rest))

    def set_unsharded(self) -> None:
        """Sets the unsharded parameters' version counters to the number of the gathered weights."""
        tensors = self._of_unsharded()
        self._set = (self._first | self.weights % (1 << VALUE_BITS)) << CHANGE_BITS
        set_versions(tensors, (self._set,) * len(tensors))

    def written(self) -> list[str]:
        """Returns the names of unsharded parameters that were changed in place since ``set_unsharded``."""
        tensors = self._of_unsharded()
        bucket = self._bucket()
        assert bucket is not None
        # A compiled ``.data = ...`` gives it other memory, since torch 2.15 without another version.
        moved = (
            [t for t in self._watched if storage_of(t) != self._storage] if has_compiled() else ()
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
        """Sets the unsharded parameters' version counters to a number that means that they are freed."""
        tensors = self._of_unsharded()
        set_versions(tensors, (FREE | self.number,) * len(tensors))

    def saved_as(self, fails: Callable[[], object]) -> bool | None:
        """Finds out whether a tensor saved for backward is (a view of) an unsharded parameter of the bucket.

        Args:
            fails: tries to read the saved tensor; returns whether autograd refused because of its version.

        Returns:
            None: it is not of this bucket. True: the parameters were freed when it was read or saved. False:
                they had other values when it was saved.
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
        """Returns the tensors whose counters are set: unsharded parameters, and DTensors' local tensors."""
        bucket = self._bucket()
        assert bucket is not None
        params = bucket.precision.compute_params
        if self._unsharded_of is not params:  # of another dtype, or rebuilt
            self._unsharded_of = params
            local = [local_tensor_of(p) for p in params if isinstance(p, DTensor)]
            self._unsharded = (*params, *local)
            self._storage = storage_of(bucket.precision.unsharded)
            self._watched = [t for t in self._unsharded if storage_of(t) == self._storage != 0]
        return self._unsharded


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number that identifies the storage of ``tensor``; 0 if it is of a tensor subclass."""
    return tensor.untyped_storage()._cdata if type(tensor) in (torch.Tensor, nn.Parameter) else 0
