"""Bucket: parameters of one unit with one dtype, one requires_grad and one mesh, in contiguous buffers.

Buffers, all flat (n = size of the shard axis, S = sum of the parameters' slots):

- ``flat`` (S): this rank's shards at rest; the sharded Parameters' local tensors share its memory, so
  the all-gather needs no packing and a cast is one kernel.
- ``unsharded`` (n * S): the parameters one after another; what forward sees are views of it. With n = 1
  and no cast it is ``flat`` itself. Those that travel in place (see ``in_place``), which come first, are
  gathered right into it.
- ``gathered`` (n * P; P = slots of the others): where those are gathered, one row of P per rank. Alive
  during the gather.

The last two keep their tensors and views for the model's life; only their storage comes and goes. The
inputs of the reduce-scatter, laid out as the outputs of the all-gather, belong to ``grads``.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from parallel3d._compat import follows_grad_dtype, grads_may_differ_in_dtype, local_tensor_of
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.buckets.gather_buffers import GatherBuffers
from parallel3d.fsdp.buckets.grads import GradientSlots
from parallel3d.fsdp.buckets.in_place import (
    count_in_place,
    is_small,
    packs_as_chunks,
    put_first,
)
from parallel3d.fsdp.buckets.offload import places_of
from parallel3d.fsdp.buckets.small_world import SmallWorld
from parallel3d.fsdp.buckets.versions import Versions
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.placing.axes import DataAxes
from parallel3d.fsdp.precision.eval_precision import in_own_dtype
from parallel3d.fsdp.storage import release, with_own_storage

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.gate import Gate
    from parallel3d.fsdp.comm import Comm
    from parallel3d.fsdp.comms.hooked_reduce import HookedReduce
    from parallel3d.fsdp.running.half_way import HalfWay
    from parallel3d.fsdp.running.step_guard import StepGuard

__all__ = ["Bucket"]


class Bucket(GatherBuffers):
    """See the module's docstring.

    Attributes:
        policy: dtypes, as they are now; see ``eval_precision``. ``full``: whether it is the parameters' own.
        in_place: how many parameters, the first ones, travel in place.
        packed: P, the slots of the others. ``packs_as_chunks``: whether gradients lie there as plain chunks.
        small_grads: by parameter, whether its gradient may wait to be packed with others.
        shard_group: group of the all-gather and reduce-scatter, None where nothing is sharded.
        replicate_groups: groups that gradients are all-reduced over.
        second_group: group of a second reduce-scatter, after that over shard; see ``hybrid_bucket``.
        tp_group: group that partial gradients are summed over, None where there can be none.
        grads: what the parameters' ``.grad`` hold and how reduced values get there.
        versions: what the unsharded parameters hold, told to autograd.
        device: where the bucket computes.
        home: device of ``flat`` and of gradients at rest; another one under CPU offload.
        pin: whether what is at home is in pinned memory.
        part: what this rank keeps between forward and backward where the unit reshards to fewer ranks.
        divide_factor: what sums over ranks are divided by; None: their number.
        reduce_unused: whether parameters without a gradient get a zero one.
        all_reduce_hook: called on the reduced flat gradient; on ``all_reduce_hook_stream`` if there is one.
        even_shapes: of the slots, where none of them has padding.
        comm_hook: what reduces gradients in place of our collectives; see ``hooked_reduce``.
        gather_comm, scatter_comm: collectives in place of ours; see ``custom_comm``.
        gather_group: group of the next all-gather: ``shard_group``, or the fewer ranks that keep a part.
        scatter_group: group of the reduce-scatter: ``shard_group``, or one of its own.
        max_inputs: how many reduce inputs may be in flight.
        force_sum: whether the user has asked for sums only, which ours always are.
        guard: where the parameters are updated within the backward: see ``StepGuard``.
        gate: what takes the gradients where the unsharded parameters are the shards; see ``gate``.
        half_way: what waits for half of the gradients.
        keep_storage: whether the unsharded parameters keep their memory while the unit is sharded.
    """

    gate: Gate | None = None
    joinable = (
        True  # whether one all-gather may carry it together with others; see ``joint_gather``
    )
    packs_all = False  # whether no parameter travels in place
    # What there is one of for each dtype that the bucket computes in; see ``eval_precision``.
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
        "small",
    )

    def __init__(
        self,
        unit: str,
        params: list[ShardedParam],
        axes: DataAxes,
        policy: MixedPrecisionPolicy,
        offload: Any = None,
    ) -> None:
        self.unit = unit
        self.params = put_first(params, axes.mesh.device_type)
        self.axes = axes
        self.given_policy = policy
        self.full = False
        self.offload = offload
        self._set_options()
        self.parts = self.params[0].parts
        self._find_groups()
        self.in_place = 0
        if self.shard_group is not None and not self.packs_all:
            self.in_place = count_in_place(self.params, axes.mesh.device_type)
        self.small_grads = [is_small(p, axes.mesh.device_type) for p in self.params]
        self.gathering: Any = None  # an all-gather under way: what to wait for, and its input
        self.build(self._device())

    def _set_options(self) -> None:
        self.divide_factor: float | None = None
        self.reduce_unused = False
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.all_reduce_hook_stream: Any = None
        self.comm_hook: HookedReduce | None = None
        self.gather_comm: Any = None
        self.scatter_comm: Any = None
        self.max_inputs = 1
        self.force_sum = False
        self.guard: StepGuard | None = None
        self.half_way: HalfWay | None = None
        self.keep_storage = False

    def _find_groups(self) -> None:
        axes = self.axes
        self.shard_group: ProcessGroup | None = None
        self.replicate_groups: list[ProcessGroup] = []
        self.second_group: ProcessGroup | None = None
        empty = all(p.slot_numel == 0 for p in self.params)  # nothing to communicate
        for axis in (axes.shard, axes.replicate):
            if axis is None or axes.size(axis) == 1 or empty:
                continue
            if axis == axes.shard and self.parts > 1:
                self.shard_group = axes.group(axis)
            else:
                self.replicate_groups.append(axes.group(axis))
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
        self.flat = torch.zeros(self.numel, dtype=self.dtype, device=self.home, pin_memory=self.pin)
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
        self.device, self.home, self.pin = places_of(device, self.axes.mesh, self.offload)
        self.offloaded = self.home != self.device
        self.dtype = params[0].dtype
        self.other_precision: dict[str, Any] | None = None
        self.set_dtypes()
        self.slot_sizes = [p.slot_numel for p in params]
        self.even_shapes = [p.chunk_shape for p in params] if all(p.even for p in params) else None
        self.numel = sum(self.slot_sizes)
        self.packed = sum(self.slot_sizes[self.in_place :])
        self.packs_as_chunks = all(map(packs_as_chunks, params[self.in_place :]))
        self.member_sizes = self.slot_sizes[: self.in_place]
        if self.packed or not self.in_place:
            self.member_sizes = [*self.member_sizes, self.packed]
        self.partial_start = sum(p.slot_numel for p in params if p.layout.tp_grad != "partial")
        self.grads = GradientSlots(self)
        self.small: SmallWorld | None = None
        self.part: torch.Tensor | None = None
        self.gather_group: Any = self.shard_group
        self.custom_gathered: torch.Tensor | None = None  # ``gathered`` of a custom all-gather

    def set_dtypes(self) -> None:
        """What it computes, sums and reduces in."""
        self.policy = policy = self.given_policy
        if self.full:
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
        params, n = self.params, self.parts
        self.gate = None
        self.has_own_unsharded = n > 1 or self.compute_dtype != self.dtype or self.offloaded
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
        pairs = self.copy_pairs(self.gathered.view(n, self.packed), since=self.in_place)
        self.region_views = [region for region, _ in pairs]
        self.gathered_views = [held for _, held in pairs]
        self.gather_outputs = [*regions[: self.in_place], self.gathered][: len(self.member_sizes)]
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
            self.versions.stamp.take()

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
        columns = packed.view(self.parts, -1).split(self.slot_sizes[since:], dim=1)
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
        wanted = [param.sharded.requires_grad for param in self.params]
        if wanted != [compute.requires_grad for compute in self.compute_params]:
            self.gate = None  # it is of those that have one
            for compute, requires_grad in zip(self.compute_params, wanted, strict=True):
                compute.requires_grad_(requires_grad)
        return sum(wanted)

    # -- reduction -----------------------------------------------------------------------------------

    @property
    def divisor(self) -> float:
        """What the sum of the ranks' gradients is divided by."""
        return self.axes.data_size if self.divide_factor is None else self.divide_factor

    @property
    def reduced_in_place(self) -> int:
        """How many gradients, the first ones, are reduced from where they are.

        None where the user reduces, who is given one row of S per rank.
        """
        own = self.comm_hook is None and self.scatter_comm is None
        return self.in_place if own else 0

    def reduce_input(self, since: int) -> torch.Tensor:
        """Memory for one row per shard rank of the gradients from index ``since`` on, in reduce dtype."""
        size = self.parts * sum(self.slot_sizes[since:])
        if self.scatter_comm is not None and self.shard_group is not None:
            return self.scatter_comm.allocate((size,), dtype=self.reduce_dtype, device=self.device)
        return torch.empty(size, dtype=self.reduce_dtype, device=self.device)
