"""ParamGroup: one unit's parameters through SHARDED -> GATHERING -> UNSHARDED -> SHARDED."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from operator import call, is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import untraced
from parallel3d._torch.dtensor import keep_partial_gradients
from parallel3d._torch.kernels import foreach_copy_
from parallel3d.errors import StateError
from parallel3d.fsdp.bucket import Bucket, allocate
from parallel3d.fsdp.collectives import all_gather
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.param import ShardedParam, check_replacement, gradient_for

WATCHED_BY = "_parallel3d_watched_by"  # on an unsharded parameter: the unit its gradient hook calls


class ShardedState(Enum):
    """Where a group's values are."""

    SHARDED = auto()
    GATHERING = auto()  # an all-gather is under way, or its result was not asked for yet
    UNSHARDED = auto()
    SHARDED_POST_FORWARD = (
        auto()
    )  # over fewer ranks, from the end of a forward until the next gather


class Registered(Enum):
    """What the modules' attributes are."""

    SHARDED = auto()  # the sharded Parameters, which are there at rest
    UNSHARDED = auto()
    OTHER = auto()  # what ``full_params`` shows, or ``state_dict`` while it is made


class Retain(Enum):
    """Why a group stays unsharded when a pass is over."""

    NO = auto()
    NEXT_FORWARD = auto()  # the next forward, or evaluation, uses it
    USER = auto()  # ``unshard()``: registered too, until ``reshard()`` or a pass that reshards


class Event(Enum):
    """What changes a group's state; see ``TRANSITIONS``."""

    ISSUE = auto()  # its all-gathers are issued
    FINISH = auto()  # what they have brought is ready for use
    FREE = auto()  # the unsharded parameters' memory is freed
    FREE_PARTLY = auto()  # the same, but fewer ranks keep them between each other
    DROP = auto()  # what those have kept is freed
    REGISTER = auto()  # the unsharded parameters are put into the modules
    UNREGISTER = auto()  # the sharded ones are put back
    SHOW_OTHER = auto()  # others are put there, of neither kind
    HIDE_OTHER = auto()


TRANSITIONS: dict[tuple[Any, Event], Any] = {
    (ShardedState.SHARDED, Event.ISSUE): ShardedState.GATHERING,
    (ShardedState.SHARDED_POST_FORWARD, Event.ISSUE): ShardedState.GATHERING,
    (ShardedState.GATHERING, Event.FINISH): ShardedState.UNSHARDED,
    (ShardedState.UNSHARDED, Event.FREE): ShardedState.SHARDED,
    (ShardedState.UNSHARDED, Event.FREE_PARTLY): ShardedState.SHARDED_POST_FORWARD,
    (ShardedState.SHARDED_POST_FORWARD, Event.DROP): ShardedState.SHARDED,
    (Registered.SHARDED, Event.REGISTER): Registered.UNSHARDED,
    (Registered.UNSHARDED, Event.UNREGISTER): Registered.SHARDED,
    (Registered.SHARDED, Event.SHOW_OTHER): Registered.OTHER,
    (Registered.OTHER, Event.HIDE_OTHER): Registered.SHARDED,
}
"""What each event makes of a state; a pair that is not here can't happen. See ``ParamGroup._enter``."""

_OF_MODULES = {Event.REGISTER, Event.UNREGISTER, Event.SHOW_OTHER, Event.HIDE_OTHER}
_SHARDED = (ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD)


class Beside(Protocol):
    """What an option puts into the modules together with the unsharded parameters."""

    def register(self, group: ParamGroup) -> None:
        """After these were put there."""

    def unregister(self) -> None:
        """After the sharded ones were put back."""


Rebuild = Callable[[list[Bucket]], "list[Bucket] | None"]


class ParamGroup:
    """The buckets of one unit.

    Attributes:
        state, registered, retain: see the enums. The first two change by ``_enter`` alone.
        module_infos: (holder, name, sharded parameter, unsharded parameter) of each place that holds one.
        holders: the same by holder: (holder, the sharded parameters by name, the unsharded ones).
        found: of each place how to look there, its name, and what was there; also where there was none.
        trainable: number of parameters that get a gradient.
        gathers: what the all-gathers under way are of.
        on_meta: whether parameters are still on the meta device.
        renewed: the buckets that gather from a copy of their shards, renewed when weights may have changed.
        direct: the buckets that no axis shards, whose unsharded parameters are the weights themselves.
        own_dtype: whether the buckets compute in the parameters' own dtype, and not in the policy's.
        stands_in: whether forward sees ``stand_ins`` of the buckets.
        beside: what is registered with the unsharded parameters.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.state = ShardedState.SHARDED
        self.registered = Registered.SHARDED
        self.retain = Retain.NO
        self.own_dtype = self.stands_in = False
        self.beside: list[Beside] = []
        self.trainable = 0
        self.gathers: Sequence[Bucket | CoalescedGather] = []
        self.computing: set[int] = set()
        self.module_infos: list[tuple[dict, str, nn.Parameter, nn.Parameter]] = []
        self.found: tuple[list, ...] = ()
        self._unit: weakref.ref | None = None
        self.refresh()

    def _enter(self, event: Event) -> None:
        """The one place where ``state`` and ``registered`` change."""
        if event in _OF_MODULES:
            self.registered = TRANSITIONS[self.registered, event]
        else:
            self.state = TRANSITIONS[self.state, event]

    @property
    def is_sharded(self) -> bool:
        """Whether nothing is gathered."""
        return self.state in _SHARDED

    @property
    def is_registered(self) -> bool:
        """Whether the modules' attributes are the unsharded parameters."""
        return self.registered is Registered.UNSHARDED

    @property
    def is_in_other_form(self) -> bool:
        """Whether other Parameters show: those of ``full_params``, or of a ``state_dict`` that is made."""
        return self.registered is Registered.OTHER

    # -- what it is made of ----------------------------------------------------------------------------

    def refresh(self) -> None:
        """After the buckets were built: the swap list and the gradient hooks."""
        for bucket in self.buckets:
            bucket.made = weakref.WeakMethod(self.refresh)
        self.list_places()
        self.renewed = [bucket for bucket in self.buckets if bucket.gathers_copy]
        self.direct = [bucket for bucket in self.buckets if not bucket.has_own_unsharded]
        if self._unit is not None:
            self.watch_gradients(self._unit)
        self.on_meta = any(bucket.device.type == "meta" for bucket in self.buckets)
        self.count_trainable()

    def rebuild(self, rebuild: Rebuild) -> None:
        """Replaces the buckets by what ``rebuild`` makes of them, unless the group is in use.

        Args:
            rebuild: returns None where they stay.
        """
        if self.is_sharded and self.registered is Registered.SHARDED:
            with torch.inference_mode(False), torch.no_grad():
                buckets = rebuild(self.buckets)
            if buckets is not None:
                self.buckets = buckets
                self.refresh()

    def renew_buffers(self) -> None:
        """Makes the gather's buffers anew, for who has to see them made."""
        if self.is_sharded and self.registered is Registered.SHARDED:
            for bucket in self.buckets:
                bucket.build_unsharded()
            self.refresh()

    def extend(self, other: ParamGroup) -> None:
        """Takes the buckets of ``other`` too."""
        self.buckets += other.buckets
        self.beside += other.beside
        self.refresh()

    def list_places(self) -> None:
        """Notes where the parameters are put."""
        self.module_infos = [
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
        for holder, name, sharded, compute in self.module_infos:
            _, at_rest, computing = by_holder.setdefault(id(holder), (holder, {}, {}))
            at_rest[name], computing[name] = sharded, compute
        self.holders = list(by_holder.values())
        self.computing = {id(compute) for _, _, _, compute in self.module_infos}

    def _seen(self, bucket: Bucket) -> Sequence[Any]:
        stand_ins = bucket.stand_ins if self.stands_in else None
        return bucket.compute_params if stand_ins is None else stand_ins

    def use_stand_ins(self, stand_ins: Sequence[Sequence[torch.Tensor]] | None) -> None:
        """Lets forward see these, for each bucket one tensor a parameter; None: the unsharded parameters."""
        assert not self.is_registered
        self.stands_in = stand_ins is not None
        for number, bucket in enumerate(self.buckets):
            bucket.stand_ins = None if stand_ins is None else stand_ins[number]
        self.list_places()

    def watch_gradients(self, unit: weakref.ref) -> None:
        """Calls ``unit().take_gradient(bucket, index, gradient)`` whenever autograd has one."""
        self._unit = unit
        for bucket in self.buckets:
            for index, compute in enumerate(bucket.compute_params):
                if getattr(compute, WATCHED_BY, None) is unit:
                    continue  # its bucket was not built anew
                if compute.dtype.is_floating_point or compute.dtype.is_complex:
                    setattr(compute, WATCHED_BY, unit)
                    was = compute.requires_grad
                    compute.requires_grad_(True)  # the hook can be set on no other parameter
                    keep_partial_gradients(compute)
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
        if self.stands_in and any(bucket.stand_ins is None for bucket in self.buckets):
            self.use_stand_ins(None)  # they were of what was trained before, or was elsewhere

    def adopt(self, *, partly: bool = False) -> None:
        """Takes back Parameters and values that ordinary calls have replaced or moved.

        Args:
            partly: one of the unit's several modules was converted or loaded: buckets of which it has only
                some parameters wait for the other modules.
        """
        self.adopt_replaced()
        buckets = self.buckets
        if partly:
            buckets = [bucket for bucket in buckets if len(bucket.kinds()) == 1]
        elif self.on_meta and any(len(bucket.kinds()) > 1 for bucket in buckets):
            raise self._no_values()  # some were loaded, and some not
        moved = [bucket.adopt() for bucket in buckets]
        if any(moved):
            self.refresh()

    def adopt_replaced(self) -> None:
        """Takes the values of Parameters that were put into the modules unnoticed; puts the units' own back.

        Assignment is noticed at once (``members.watch_assignments``); this finds what was written into
        ``module._parameters`` directly.
        """
        assert not self.is_registered
        getters, names, found = self.found
        if all(map(is_, map(call, getters, names), found)):
            return
        for bucket in self.buckets:
            for param in bucket.params:
                for holder, name in param.slots:
                    current = holder.get(name)
                    if current is not param.sharded and current is not None:
                        self.take(param, current)
                        holder[name] = param.sharded
        self.list_places()  # one may have been removed, or be there again

    def take(self, param: ShardedParam, given: nn.Parameter) -> None:
        """Gives ``param`` the values of ``given``, which was put in its place, and its gradient.

        Raises:
            Parallel3dError: they can't be those of ``param``.
        """
        check_replacement(param, given)
        with torch.no_grad():
            if param.sharded.is_meta and not given.is_meta:
                param.place(param.local_part(given))  # its bucket moves with it
            elif isinstance(given, DTensor):
                param.sharded.copy_(given)
            else:
                param.local.copy_(param.shard_of(given, tp_local=False))
            param.sharded.grad = gradient_for(param, given)
        param.sharded.requires_grad_(given.requires_grad)

    # -- unshard / reshard ---------------------------------------------------------------------------

    def issue_unshard(self, comm: Comm) -> None:
        """Starts the all-gathers if the group is sharded."""
        if self.registered is Registered.OTHER:
            raise StateError(
                f"unit {self._label} shows its parameters in another form, as in full_params or while a "
                "state_dict is made; leave that before forward, backward and unshard()"
            )
        if self.state not in _SHARDED or (self.stands_in and self.is_registered):
            return  # the latter: there is nothing to gather
        if self.on_meta:
            self.check_has_values()
        buckets = self.buckets
        self.note_weights(comm)
        self.gathers = buckets if len(buckets) < 2 else plan_gathers(buckets)
        for gather in self.gathers:
            comm.issue_gather(gather)
        self._enter(Event.ISSUE)

    @property
    def _label(self) -> str:
        unit = self._unit() if self._unit is not None else None
        return "" if unit is None else unit.label

    def note_weights(self, comm: Comm) -> None:
        """Which values are used from now on."""
        for bucket in self.buckets:
            bucket.note_weights(comm)

    def check_has_values(self) -> None:
        """Raises StateError if parameters are on the meta device, and the forward's inputs aren't."""
        if not self.on_meta:
            return
        unit = self._unit() if self._unit is not None else None
        if unit is None or not unit.ready_context().inputs_on_meta:
            raise self._no_values()

    def _no_values(self) -> StateError:
        """Names the parameters of the whole model that are on the meta device."""
        unit = self._unit() if self._unit is not None else None
        root = unit.ready_context().root if unit is not None else None
        tops = root.modules if root is not None else []
        names = [name for top in tops for name, param in top.named_parameters() if param.is_meta]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return StateError(
            f"parameters are still on the meta device, without values: {shown}. Give them some before "
            "the first forward: parallel3d.materialize(model, seed=...) initialises them, the same on every "
            "mesh; model.load_state_dict(state, assign=True) or parallel3d.checkpoint load them"
        )

    def renew_copies(self, comm: Comm, *, if_changed: bool = False) -> None:
        """Of the buckets that gather from a copy of their shards: it follows the weights.

        Args:
            if_changed: only those of weights that were seen to change.
        """
        for bucket in self.renewed:
            bucket.renew(comm, if_changed=if_changed)

    def unshard(self, comm: Comm) -> None:
        """Makes the unsharded parameters ready for use on the current stream."""
        self.issue_unshard(comm)
        if self.state is ShardedState.GATHERING:
            for gather in self.gathers:
                comm.finish_gather(gather)
            self.gathers = []
            self._enter(Event.FINISH)
            for bucket in self.buckets:
                bucket.versions.set_unsharded()

    def reshard(self, comm: Comm, ranks: int | None = None) -> None:
        """Frees the unsharded parameters.

        Args:
            ranks: so many ranks keep them between each other; None: all that they are sharded over.
        """
        self.retain = Retain.NO
        if ranks is None:
            self.drop_parts()
        if self.state is ShardedState.GATHERING:
            self.unshard(comm)  # the collective is under way on the other ranks too
        if self.state is ShardedState.UNSHARDED:
            for bucket in self.buckets:
                if ranks is not None:
                    bucket.keep_part(ranks)
                bucket.free_unsharded()
                if bucket.has_own_unsharded:
                    bucket.versions.set_free()
            self._enter(Event.FREE if ranks is None else Event.FREE_PARTLY)

    def keep_storage(self, keep: bool) -> None:
        """Whether the unsharded parameters keep their memory while the group is sharded."""
        for bucket in self.buckets:
            bucket.keep_storage = keep
            if not keep and self.is_sharded:
                bucket.free_unsharded()
                bucket.free_other_precision()

    def drop_parts(self) -> None:
        """Forgets what a reshard to fewer ranks has kept."""
        if self.state is ShardedState.SHARDED_POST_FORWARD:
            for bucket in self.buckets:
                bucket.drop_part()
            self._enter(Event.DROP)

    def register_unsharded(self) -> None:
        """Puts the unsharded parameters into the modules."""
        if self.registered is not Registered.UNSHARDED:
            self._enter(
                Event.REGISTER
            )  # first: what undoes it then undoes what an interruption has left
            for holder, _, computing in self.holders:
                holder.update(computing)
            for each in self.beside:
                each.register(self)

    def register_sharded(self) -> None:
        """Puts the sharded Parameters back, where the unsharded ones are."""
        if self.registered is Registered.UNSHARDED:
            for holder, at_rest, _ in self.holders:
                holder.update(at_rest)
            for each in self.beside:
                each.unregister()
            self._enter(Event.UNREGISTER)

    def show_other(self) -> None:
        """The modules' attributes are Parameters of neither kind from now on."""
        self._enter(Event.SHOW_OTHER)

    def hide_other(self) -> None:
        """The sharded Parameters were put back there."""
        self._enter(Event.HIDE_OTHER)

    # -- staying unsharded ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Leaves the group unsharded for the next forward; registered if the user wants it so."""
        if self.retain is not Retain.USER:
            self.register_sharded()
            self.retain = Retain.NEXT_FORWARD

    def drop_stale(self, comm: Comm) -> None:
        """Before a forward: frees what an earlier one left, unless the user has asked for it and it still
        holds the weights, as far as counters tell."""
        self.drop_parts()
        if self.state is not ShardedState.UNSHARDED:
            return
        if self.retain is Retain.NO or self.is_stale:
            retain = self.retain
            self.register_sharded()
            self.reshard(comm)
            if retain is Retain.USER:
                self.retain = retain

    def gather_anew(self, comm: Comm) -> None:
        """Within a forward: what is registered must hold what the shards hold."""
        self.register_sharded()
        self.reshard(comm)
        self.adopt()
        self.renew_copies(comm)
        self.unshard(comm)
        self.register_unsharded()

    @property
    def is_stale(self) -> bool:
        """Whether the weights were seen to change since the group was gathered."""
        return self.state is ShardedState.UNSHARDED and any(
            bucket.versions.weights_changed() for bucket in self.buckets
        )

    def note_changes(self) -> bool:
        """Tells autograd, where the unsharded parameters are the weights themselves and these were seen to
        change: what forward has computed with before is there no more. Whether that is so.
        """
        changed = [bucket for bucket in self.direct if bucket.versions.note_weights()]
        for bucket in changed:
            bucket.versions.set_unsharded()
        return bool(changed)

    @property
    def weights(self) -> list[int]:
        """The numbers of the values that were gathered last."""
        return [bucket.versions.weights for bucket in self.buckets]

    def abandon(self, comm: Comm) -> None:
        """After an exception: nothing in flight, nothing gathered."""
        self.register_sharded()
        for gather in self.gathers:
            if gather.gathering is not None:  # the collective is under way on the other ranks too
                comm.finish_gather(gather)
                gather.free_unsharded()
        self.gathers = []
        if self.state is ShardedState.GATHERING:
            self._enter(Event.FINISH)
        self.reshard(comm)


# CoalescedGather: one all-gather for several buckets of a unit, such as a frozen one and its adapters'.
#
# Buckets are apart for the sake of their gradients; on the wire their shards go together.


class CoalescedGather:
    """Buckets that compute in one dtype and are sharded over one group.

    Attributes:
        unit: name of the unit, for the record.
        gathering: the all-gather under way; see ``Bucket``.
    """

    reads_host = False

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.shard_group: ProcessGroup | None = buckets[0].shard_group
        self.packed = sum(bucket.packed for bucket in buckets)
        self.unit = buckets[0].unit
        self.gathering: Any = None
        self._output: torch.Tensor | None = None

    def start_gather(self, outputs: list[torch.Tensor], parts: list[torch.Tensor]) -> Any:
        """Issues the all-gather; returns what to wait for."""
        assert self.shard_group is not None
        return all_gather(outputs, parts, self.shard_group, unit=self.unit)

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs and inputs of the all-gather, in compute dtype: what travels in place, and of all buckets
        together what is packed."""
        first = self.buckets[0]
        outputs, inputs, packed = [], [], []
        for bucket in self.buckets:
            if bucket.zero_copy:
                allocate(bucket.unsharded)
            mine = bucket.members(bucket.flat.to(first.compute_dtype))
            inputs += mine[: bucket.zero_copy]
            packed += mine[bucket.zero_copy :]
            outputs += bucket.gather_outputs[: bucket.zero_copy]
        if packed:
            part = torch.cat(packed)
            self._output = part.new_empty(first.num_shards * self.packed)
            inputs.append(part)
            outputs.append(self._output)
        return outputs, inputs

    def copy_out(self) -> None:
        """The gathered rows into the parameters' places."""
        if self._output is None:
            return
        with torch.inference_mode(False), torch.no_grad():  # whichever mode gathered, and this is
            sizes = [bucket.packed for bucket in self.buckets]
            columns = self._output.view(-1, self.packed).split(sizes, dim=1)
        for bucket, held in zip(self.buckets, columns, strict=True):
            if not bucket.zero_copy:
                allocate(bucket.unsharded)
            if bucket.packed:
                pairs = bucket.copy_pairs(held, since=bucket.zero_copy)
                foreach_copy_([region for region, _ in pairs], [part for _, part in pairs])

    def free_gathered(self) -> None:
        """After ``copy_out``."""
        self._output = None

    def cast_whole(self) -> None:
        """Nothing here is whole at rest: what isn't sharded is gathered by itself."""

    def free_unsharded(self) -> None:
        """Frees what the unsharded parameters live in."""
        for bucket in self.buckets:
            bucket.free_unsharded()


def plan_gathers(buckets: Sequence[Bucket]) -> list[Bucket | CoalescedGather]:
    """What to gather by one call each: buckets joined where they can be, in order of their first."""
    joined: dict[object, list[Bucket]] = {}
    for bucket in buckets:
        alone = (
            not bucket.joinable
            or bucket.shard_group is None
            or bucket.gather_comm is not None
            or bucket.part is not None
            or bucket.reads_host
        )
        key = id(bucket) if alone else (bucket.compute_dtype, bucket.shard_group, bucket.device)
        joined.setdefault(key, []).append(bucket)
    return [each[0] if len(each) == 1 else CoalescedGather(each) for each in joined.values()]


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
            grad, param.grad = param.grad, None
            unit.take_gradient(bucket, self.index, grad)
