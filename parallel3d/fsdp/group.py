"""ParamGroup: one unit's parameters through SHARDED -> gathering -> UNSHARDED -> SHARDED."""

import weakref
from collections.abc import Sequence
from enum import Enum, auto
from operator import call, is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d._compat import untraced
from parallel3d.errors import StateError
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.extension_bucket import ExtensionBucket
from parallel3d.fsdp.buckets.gate import Gate
from parallel3d.fsdp.buckets.hybrid_bucket import HybridBucket
from parallel3d.fsdp.buckets.joint_gather import JointGather, plan_gathers
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.precision.buffers import BufferCasts
from parallel3d.fsdp.precision.eval_precision import switch_precision
from parallel3d.fsdp.replacement import check_replacement, gradient_for
from parallel3d.fsdp.running.freshness import weights_stamp

__all__ = ["GroupState", "ParamGroup"]


_WATCHED = "_parallel3d_watched_by"  # on an unsharded parameter: the unit its gradient hook calls


class GroupState(Enum):
    """Where a group's unsharded parameters are."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    WHOLE = auto()  # sharded, and other Parameters show: ``full_params``, ``state_dict``


class ParamGroup:
    """The buckets of one unit.

    Attributes:
        state: see ``GroupState``.
        slots: (holder, name, sharded parameter, unsharded parameter) of each place that holds one.
        holders: the same by holder: (holder, the sharded parameters by name, the unsharded ones).
        found: of each place how to look there, its name, and what was there; also where there was none.
        trainable: number of parameters that get a gradient.
        kept: whether the user's ``unshard()`` gathered the group: shown until ``reshard()``, or until a
            forward or backward reshards it.
        held: the weights' stamp when the group was left gathered for the next forward, or None.
        for_evaluation: whether it is held by a forward without a backward, for others like it.
        parted: whether the buckets keep parts between forward and backward (reshard to fewer ranks).
        gathers: what the all-gathers under way are of.
        hybrids: the buckets whose shards are cut over replicate too.
        full: whether the buckets compute in the parameters' own dtype; see ``eval_precision``.
        gated: whether forward sees outputs of the buckets' gates; see ``gate``.
        buffers: the unit's buffers, where they are cast.
        shown: whether the modules' attributes are the unsharded parameters (they are the sharded ones at
            rest, also while an unsharded copy is held).
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.state = GroupState.SHARDED
        self.shown = False
        self.full = self.gated = False
        self.buffers: BufferCasts | None = None
        self.trainable = 0
        self.kept = False
        self.held: object = None
        self.for_evaluation = False
        self.parted = False
        self.gathers: Sequence[Bucket | JointGather] = []
        self.computing: set[int] = set()
        self.slots: list[tuple[dict, str, nn.Parameter, nn.Parameter]] = []
        self.found: tuple[list, ...] = ()
        self._unit: weakref.ref | None = None
        self.refresh()

    def refresh(self) -> None:
        """After the buckets were built: the swap list and the gradient hooks."""
        for bucket in self.buckets:
            if isinstance(
                bucket, ExtensionBucket
            ):  # its parameters are there after the first gather
                bucket.made = weakref.WeakMethod(self.refresh)
        self.list_slots()
        self.hybrids = [bucket for bucket in self.buckets if isinstance(bucket, HybridBucket)]
        if self._unit is not None:
            self.watch_gradients(self._unit)
        self.count_trainable()

    def extend(self, other: "ParamGroup") -> None:
        """Takes the buckets of ``other`` too."""
        self.buckets += other.buckets
        if self.buffers is not None and other.buffers is not None:
            self.buffers.extend(other.buffers)
        self.refresh()

    def list_slots(self) -> None:
        """Notes where the parameters are put."""
        self.slots = [
            (holder, name, param.sharded, compute)
            for bucket in self.buckets
            for param, compute in zip(bucket.params, self._seen(bucket), strict=True)
            for holder, name in param.slots
            if holder.get(name) is not None  # the user may have removed one
        ]
        params = [param for bucket in self.buckets for param in bucket.params]
        places = [(*slot, param.sharded) for param in params for slot in param.slots]
        self.found = (
            [holder.get for holder, _, _ in places],
            [name for _, name, _ in places],
            [None if holder.get(name) is None else sharded for holder, name, sharded in places],
        )
        by_holder: dict[int, tuple[Any, dict[str, nn.Parameter], dict[str, nn.Parameter]]] = {}
        for holder, name, sharded, compute in self.slots:
            _, at_rest, computing = by_holder.setdefault(id(holder), (holder, {}, {}))
            at_rest[name], computing[name] = sharded, compute
        self.holders = list(by_holder.values())
        self.computing = {id(compute) for _, _, _, compute in self.slots}

    def _seen(self, bucket: Bucket) -> Sequence[Any]:
        gate = bucket.gate if self.gated else None
        return bucket.compute_params if gate is None else gate.outputs

    def use_gates(self, unit: weakref.ref | None) -> None:
        """Lets forward see outputs of gates of ``unit``, or with None no longer.

        Gates that are new are still to be opened.
        """
        assert not self.shown
        self.gated = unit is not None
        for bucket in self.buckets:
            bucket.gate = None if unit is None else bucket.gate or Gate(bucket, unit)
        self.list_slots()

    def watch_gradients(self, unit: weakref.ref) -> None:
        """Calls ``unit().on_grad(bucket, index, parameter)`` whenever autograd has a gradient."""
        self._unit = unit
        for bucket in self.buckets:
            for index, compute in enumerate(bucket.compute_params):
                if getattr(compute, _WATCHED, None) is unit:
                    continue  # its bucket was not built anew
                if compute.dtype.is_floating_point or compute.dtype.is_complex:
                    setattr(compute, _WATCHED, unit)
                    was = compute.requires_grad
                    compute.requires_grad_(True)  # the hook can be set on no other parameter
                    compute.register_post_accumulate_grad_hook(_GradHook(unit, bucket, index))
                    compute.requires_grad_(was)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point parameters at rest."""
        dtypes = (bucket.dtype for bucket in self.buckets)
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of the unsharded parameters."""
        return id(tensor) in self.computing

    def count_trainable(self) -> None:
        """Lets the computing parameters follow ``requires_grad`` of the sharded ones."""
        self.trainable = sum(bucket.count_trainable() for bucket in self.buckets)
        if self.gated and any(bucket.gate is None for bucket in self.buckets):
            self.use_gates(None)  # of what was trained before, or was elsewhere

    def adopt(self) -> None:
        """Takes back Parameters and values that ordinary calls have replaced or moved."""
        assert not self.shown
        getters, names, found = self.found
        if not all(map(is_, map(call, getters, names), found)):
            self._adopt_replaced()
        moved = [bucket.adopt() for bucket in self.buckets]
        if any(moved):
            self.refresh()

    def _adopt_replaced(self) -> None:
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.local_views, strict=True):
                for holder, name in param.slots:
                    current = holder.get(name)
                    if current is param.sharded or current is None:
                        continue
                    check_replacement(param, current)
                    with torch.no_grad():
                        if param.sharded.is_meta and not current.is_meta:
                            param.place(param.local_part(current))  # its bucket moves with it
                        elif isinstance(current, DTensor):
                            param.sharded.copy_(current)
                        else:
                            view.copy_(param.shard_of(current, tp_local=False))
                        param.sharded.grad = gradient_for(param, current)
                    param.sharded.requires_grad_(current.requires_grad)
                    holder[name] = param.sharded
        self.list_slots()  # one may have been removed, or be there again

    @property
    def is_mixed(self) -> bool:
        """Whether a conversion has reached some parameters of a bucket, and others not."""
        return any(len(bucket.kinds()) > 1 for bucket in self.buckets)

    # -- unshard / reshard ---------------------------------------------------------------------------

    def issue_unshard(self, comm: Comm) -> None:
        """Starts the all-gathers if the group is sharded, and not shown by its root (see ``Residents``)."""
        if self.state is GroupState.SHARDED:
            if self.gated and self.shown:
                return
            buckets = self.buckets
            for hybrid in self.hybrids:
                if hybrid.is_new:
                    comm.renew_copy(hybrid)
            self.gathers = buckets if len(buckets) < 2 else plan_gathers(buckets)
            for gather in self.gathers:
                comm.issue_gather(gather)
            self.state = GroupState.GATHERING
        elif self.state is GroupState.WHOLE:
            unit = self._unit() if self._unit is not None else None
            name = unit.label if unit is not None else ""
            raise StateError(
                f"unit {name} shows its parameters in another form, as in full_params or while a state_dict "
                "is made; leave that before forward, backward and unshard()"
            )

    def renew_copies(self, comm: Comm) -> None:
        """Where the optimizer's shards are cut over replicate: what is gathered follows the weights."""
        for hybrid in self.hybrids:
            comm.renew_copy(hybrid)

    def unshard(self, comm: Comm) -> None:
        """Makes the unsharded parameters ready for use on the current stream."""
        self.issue_unshard(comm)
        if self.state is GroupState.GATHERING:
            for gather in self.gathers:
                comm.finish_gather(gather)
            self.gathers = []
            self.state = GroupState.UNSHARDED

    def reshard(self, comm: Comm, parts: int | None = None) -> None:
        """Frees the unsharded parameters; with ``parts`` those many ranks keep them between each other."""
        self.kept = False
        self.held = None
        if parts is None:
            self.drop_parts()
        if self.state is GroupState.GATHERING:
            self.unshard(comm)  # the collective is under way on the other ranks too
        if self.state is GroupState.UNSHARDED:
            for bucket in self.buckets:
                if parts is not None:
                    bucket.keep_part(parts)
                    self.parted = True
                bucket.free_unsharded()
            self.state = GroupState.SHARDED

    def drop_parts(self) -> None:
        """Forgets what a reshard to fewer ranks has kept."""
        if self.parted:
            self.parted = False
            for bucket in self.buckets:
                bucket.drop_part()

    def show(self) -> None:
        """Puts the unsharded parameters into the modules."""
        if not self.shown:
            for holder, _, computing in self.holders:
                holder.update(computing)
            if self.buffers is not None and not self.full:
                self.buffers.show()
            self.shown = True

    def hide(self) -> None:
        """Puts the sharded Parameters back."""
        if self.shown:
            for holder, at_rest, _ in self.holders:
                holder.update(at_rest)
            if self.buffers is not None:
                self.buffers.hide()
            self.shown = False

    def use_precision(self, full: bool, comm: Comm) -> None:
        """Lets the group compute in the parameters' own dtype, or in the policy's again."""
        if full is self.full:
            return
        kept = self.kept
        self.hide()
        self.reshard(comm)
        for bucket in self.buckets:
            switch_precision(bucket, full)
        self.full = full
        self.refresh()
        if kept:
            self.keep()

    def release_gradients(self) -> None:
        """Frees the memory of gradients that are no longer there."""
        for bucket in self.buckets:
            bucket.grads.pool.release()

    # -- staying gathered ----------------------------------------------------------------------------

    def keep(self) -> None:
        """The user wants the group gathered and shown."""
        self.kept = True
        self.for_evaluation = False
        self.stamp()

    def hold(self, *, without_backward: bool = False) -> None:
        """Leaves the group gathered for the next forward; shown if the user keeps it so."""
        if not self.kept:
            self.hide()
            self.for_evaluation = without_backward
        if self.held is None and self.state is GroupState.UNSHARDED:
            self.stamp()

    def drop_stale(self, comm: Comm, *, training: bool) -> None:
        """Before a forward: frees what an earlier one left, unless kept or held and still true.

        What an evaluation left serves the next one only: a training step must not compute with weights
        that were changed where no stamp sees it (``.data``), as EMA implementations put theirs in and out.
        """
        self.drop_parts()
        if self.state is not GroupState.UNSHARDED:
            return
        other_use = self.for_evaluation and training
        if self.held is None or other_use or self.is_stale:
            kept = self.kept
            self.hide()
            self.reshard(comm)
            if kept:
                self.keep()

    def gather_anew(self, comm: Comm) -> None:
        """Within a forward: what is shown must hold what the shards hold."""
        self.hide()
        self.reshard(comm)
        self.adopt()
        self.renew_copies(comm)
        self.unshard(comm)
        self.show()
        self.stamp()

    def stamp(self) -> None:
        """Notes what the weights are that the group has gathered."""
        self.held = weights_stamp(self.buckets)

    @property
    def is_stale(self) -> bool:
        """Whether the weights have changed since the group was left gathered, if it was."""
        return self.held is not None and self.held != weights_stamp(self.buckets)

    def abandon(self, comm: Comm) -> None:
        """After an exception: nothing in flight, nothing gathered."""
        self.hide()
        for gather in self.gathers:
            if gather.gathering is not None:  # the collective is under way on the other ranks too
                comm.finish_gather(gather)
                gather.free_unsharded()
        self.gathers = []
        if self.state is GroupState.GATHERING:
            self.state = GroupState.UNSHARDED
        self.reshard(comm)


class _GradHook:
    """Hands a gradient over and frees it from the parameter. It keeps neither unit nor bucket alive."""

    __slots__ = ("bucket", "index", "unit")

    def __init__(self, unit: weakref.ref, bucket: Bucket, index: int) -> None:
        self.unit = unit
        self.bucket = weakref.ref(bucket)
        self.index = index

    @untraced
    def __call__(self, param: Any) -> None:
        unit, bucket = self.unit(), self.bucket()
        if unit is not None and bucket is not None:
            unit.on_grad(bucket, self.index, param)
