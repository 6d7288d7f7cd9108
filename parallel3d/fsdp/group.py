"""ParamGroup: one unit's parameters through SHARDED -> GATHERING -> UNSHARDED -> SHARDED; and its modules."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from parallel3d._torch.autograd import functorch_is_active, set_grad_dtype
from parallel3d._torch.dtensor import keep_partial_gradients
from parallel3d._torch.fully_shard import FULLY_SHARD_KEYS
from parallel3d._util.trees import PLAIN_TYPES, tensors_with_graph
from parallel3d.errors import StateError
from parallel3d.fsdp.bucket import Bucket, storage_of
from parallel3d.fsdp.coalesced import CoalescedGather, plan_gathers
from parallel3d.fsdp.members import UNIT_ATTRIBUTE, check_loose, missing_values, units_modules
from parallel3d.fsdp.param import lost_write
from parallel3d.fsdp.reduction import Comm

# An attribute of unsharded parameters: a weak reference to the unit that the gradient hook calls.
WATCHED_BY = "_parallel3d_watched_by"


class ShardedState(Enum):
    """Whether a group's parameters are sharded, being gathered, or unsharded."""

    __hash__ = object.__hash__  # in C: Enum's own is a Python function

    SHARDED = auto()
    GATHERING = auto()  # its all-gathers are issued
    UNSHARDED = auto()
    SHARDED_POST_FORWARD = auto()  # sharded over fewer ranks from a forward until its backward


class Registered(Enum):
    """Which Parameters are registered as attributes in a group's modules now."""

    __hash__ = object.__hash__

    SHARDED = auto()  # as at rest
    UNSHARDED = auto()
    OTHER = auto()  # those of ``full_params``, or of a ``state_dict`` that is being made


class Retain(Enum):
    """Why a group stays unsharded after a forward or backward."""

    NO = auto()
    NEXT_FORWARD = auto()  # the next forward or evaluation uses it
    # By ``unshard()``: it stays registered too, until ``reshard()`` or a pass that reshards.
    USER = auto()


TRANSITIONS = {
    (ShardedState.SHARDED, ShardedState.GATHERING),
    (ShardedState.SHARDED_POST_FORWARD, ShardedState.GATHERING),
    (ShardedState.GATHERING, ShardedState.UNSHARDED),
    (ShardedState.UNSHARDED, ShardedState.SHARDED),
    (ShardedState.UNSHARDED, ShardedState.SHARDED_POST_FORWARD),
    (ShardedState.SHARDED_POST_FORWARD, ShardedState.SHARDED),
    (Registered.SHARDED, Registered.UNSHARDED),
    (Registered.UNSHARDED, Registered.SHARDED),
    (Registered.SHARDED, Registered.OTHER),
    (Registered.OTHER, Registered.SHARDED),
}
"""What may follow what; see ``ParamGroup.enter``."""

_SHARDED = (ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD)


class Beside(Protocol):
    """Something that an option registers in the modules whenever the unsharded parameters are registered,
    such as buffers in another dtype (``options.precision.BufferCasts``)."""

    def register(self, group: ParamGroup) -> None: ...
    def unregister(self) -> None: ...


class SharedPlace(Protocol):
    """Memory for the buffers of several groups, one at a time (``options.memory``)."""

    def has_room(self) -> bool:
        """Whether this group can be gathered into the memory without freeing another group."""

    def take(self, comm: Comm) -> None:
        """Called before this group is gathered: frees the other group that uses the memory."""


class ParamGroup:
    """The parameters of one unit: its buckets, their sharded state, and what the modules' attributes are.

    Attributes:
        state, registered, retain: values of the enums; only ``enter`` changes the first two.
        module_infos: (holder, name, sharded parameter, unsharded parameter) for each attribute of a module.
            The holder is the module's ``_parameters``, or an ``OwnSetattr``.
        puts: ``update`` of each holder. at_rest, unsharded: what to call it with: {name: parameter}, of the
            sharded and of the unsharded ones.
        trainable: number of parameters that get a gradient.
        gathers: the buckets, or ``CoalescedGather``, whose all-gathers are under way.
        on_meta: whether parameters are on the meta device.
        renewed: the buckets that gather from a copy of their shards, which is renewed when weights change.
        direct: the buckets whose unsharded parameters are the shards themselves, as no axis shards them.
        own_dtype: whether the buckets compute in the parameters' own dtype, and not in the policy's.
        computing: ids of the unsharded parameters.
        beside: what options register together with the unsharded parameters. place: memory shared with other
            groups; None: the group has its own.
    """

    place: SharedPlace | None = None

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.state = ShardedState.SHARDED
        self.registered = Registered.SHARDED
        self.retain = Retain.NO
        self.own_dtype = False
        self.beside: list[Beside] = []
        self.trainable = 0
        self.gathers: Sequence[Bucket | CoalescedGather] = []
        self.computing: set[int] = set()
        self.module_infos: list[tuple[dict, str, nn.Parameter, nn.Parameter]] = []
        self._expected: tuple[list, ...] = ()
        self._unit: weakref.ref | None = None
        self.refresh()

    def enter(self, new: ShardedState | Registered) -> None:
        """Changes ``state`` or ``registered`` to ``new``, as ``TRANSITIONS`` allows."""
        if isinstance(new, Registered):
            assert (self.registered, new) in TRANSITIONS, f"{self.registered} -> {new}"
            self.registered = new
        else:
            assert (self.state, new) in TRANSITIONS, f"{self.state} -> {new}"
            self.state = new

    @property
    def is_sharded(self) -> bool:
        """Whether the group is neither unsharded nor being gathered."""
        return self.state in _SHARDED

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the memory of unsharded parameters, which resharding frees."""
        if functorch_is_active():  # its tensors have no storage
            return False
        own = (b.precision.unsharded for b in self.buckets if b.precision.has_own_unsharded)
        return (storage := storage_of(tensor)) != 0 and storage in map(storage_of, own)

    @property
    def is_registered(self) -> bool:
        return self.registered is Registered.UNSHARDED

    @property
    def is_in_other_form(self) -> bool:
        return self.registered is Registered.OTHER

    @property
    def unit(self) -> Any:
        return None if self._unit is None else self._unit()

    # -- buckets and modules -------------------------------------------------------------------------

    def refresh(self) -> None:
        """Updates all attributes computed from the buckets' tensors, after buckets were built or replaced."""
        for bucket in self.buckets:
            bucket.on_rebuilt = weakref.WeakMethod(self.refresh)
        self.list_module_infos()
        self.renewed = [bucket for bucket in self.buckets if bucket.gathers_copy]
        self.direct = [bucket for bucket in self.buckets if not bucket.precision.has_own_unsharded]
        if self._unit is not None:
            self.watch_gradients(self._unit)
        self.on_meta = any(bucket.device.type == "meta" for bucket in self.buckets)
        self.count_trainable()

    def rebuild(self, rebuild: Callable[[list[Bucket]], list[Bucket] | None]) -> None:
        """Replaces the buckets by ``rebuild(buckets)``, unless it returns None or the group is in use."""
        if self.is_sharded and self.registered is Registered.SHARDED:
            with torch.inference_mode(False), torch.no_grad():
                buckets = rebuild(self.buckets)
            if buckets is not None:
                self.buckets = buckets
                self.refresh()

    def renew_buffers(self) -> None:
        """Makes new unsharded parameters and all-gather buffers, unless the group is in use; those in other
        dtypes are made when they are needed again."""
        if self.is_sharded and self.registered is Registered.SHARDED:
            for bucket in self.buckets:
                bucket.other_precision = None
                bucket.build_unsharded()
            self.refresh()

    def extend(self, other: ParamGroup) -> None:
        self.buckets += other.buckets
        self.beside += other.beside
        self.refresh()

    def list_module_infos(self) -> None:
        """Sets ``module_infos`` and what is computed from it, for the attributes that modules have now."""
        infos = [
            (holder, name, param.sharded, compute)
            for bucket in self.buckets
            for param, compute in zip(bucket.params, bucket.precision.compute_params, strict=True)
            for holder, name in param.module_infos
        ]
        self.module_infos = [info for info in infos if info[0].get(info[1]) is not None]
        # For each attribute: how to get it, its name, and what it is at rest. None: the user has removed it.
        self._expected = (
            [holder.get for holder, *_ in infos],
            [name for _, name, *_ in infos],
            [None if holder.get(name) is None else at_rest for holder, name, at_rest, _ in infos],
        )
        by_holder: dict[int, tuple[Any, dict[str, nn.Parameter], dict[str, nn.Parameter]]] = {}
        for holder, name, sharded, compute in self.module_infos:
            _, at_rest, computing = by_holder.setdefault(id(holder), (holder, {}, {}))
            at_rest[name], computing[name] = sharded, compute
        self.puts = [holder.update for holder, *_ in by_holder.values()]
        self.at_rest = [at_rest for _, at_rest, _ in by_holder.values()]
        self.unsharded = [computing for *_, computing in by_holder.values()]
        self.computing = {id(compute) for _, _, _, compute in self.module_infos}

    def watch_gradients(self, unit: weakref.ref) -> None:
        """Registers post-accumulate hooks on the unsharded parameters, which call ``unit.take_gradient``."""
        self._unit = unit
        take = self.unit.take_gradient
        for bucket in self.buckets:
            hook = partial(take, unit, weakref.ref(bucket))  # keeps neither alive
            for index, compute in enumerate(bucket.precision.compute_params):
                if getattr(compute, WATCHED_BY, None) is unit:
                    continue  # its bucket was not rebuilt
                if compute.dtype.is_floating_point or compute.dtype.is_complex:
                    setattr(compute, WATCHED_BY, unit)
                    requires_grad = compute.requires_grad
                    compute.requires_grad_(True)  # torch sets the hook on no other parameter
                    keep_partial_gradients(compute)
                    if bucket.takes_wider_gradients:
                        set_grad_dtype(compute, "any")
                    compute.register_post_accumulate_grad_hook(partial(hook, index))
                    compute.requires_grad_(requires_grad)

    def count_trainable(self) -> None:
        """Sets ``requires_grad`` of unsharded parameters to the sharded ones'; counts ``trainable``."""
        self.trainable = 0
        for bucket in self.buckets:
            self.trainable += bucket.count_trainable()

    def adopt(self, *, partly: bool = False) -> None:
        """Copies values back to the buckets' buffers after calls such as ``to_empty`` or ``double`` have
        replaced the parameters or their memory. ``partly``: only one of the unit's several modules may have
        been converted; a bucket whose parameters then differ in dtype or device is left for a later call."""
        self.adopt_replaced()
        buckets = self.buckets
        if partly:
            buckets = [bucket for bucket in buckets if len(bucket.kinds()) == 1]
        elif self.on_meta and any(len(bucket.kinds()) > 1 for bucket in buckets):
            raise self._no_values()  # some parameters were loaded, others not
        moved = False
        for bucket in buckets:
            moved = bucket.adopt() or moved
        if moved:
            self.refresh()

    def adopt_replaced(self) -> None:
        """Finds Parameters written directly to ``module._parameters``, copies their values to the sharded
        ones and registers these again. (``watch`` handles assignments to attributes when they happen.)"""
        assert not self.is_registered
        getters, names, expected = self._expected
        if all(map(is_, map(call, getters, names), expected)):
            return
        for bucket in self.buckets:
            for param in bucket.params:
                for holder, name in param.module_infos:
                    current = holder.get(name)
                    if current is not param.sharded and current is not None:
                        param.take_values(current)
                        holder[name] = param.sharded
        self.list_module_infos()  # one may have been removed, or be there again

    # -- unshard / reshard ---------------------------------------------------------------------------

    def issue_unshard(self, comm: Comm, compute: Any = None) -> None:
        """Issues the all-gathers if the group is sharded. ``compute``: the current stream if known."""
        if self.registered is Registered.OTHER:
            raise StateError(
                f"unit {self.unit.label if self.unit else ''} shows its parameters in another form, as in "
                "full_params or while a state_dict is made; leave that before forward, backward and unshard()"
            )
        if self.state not in _SHARDED:
            return
        if self.on_meta:
            self.check_has_values()
        unit = self.unit
        if unit is not None and unit.context is not None and unit.context.same_order is not None:
            unit.context.same_order.gathers(unit)
        if self.place is not None:
            self.place.take(comm)
        for bucket in self.buckets:
            bucket.note_weights(comm)
        self.gathers = self.buckets if len(self.buckets) < 2 else plan_gathers(self.buckets)
        for gather in self.gathers:
            comm.issue_gather(gather, compute)
        self.enter(ShardedState.GATHERING)

    def check_has_values(self) -> None:
        """Raises StateError if parameters are on the meta device, and the forward's inputs are not."""
        if self.on_meta and (self.unit is None or not self.unit.ready_context().inputs_on_meta):
            raise self._no_values()

    def _no_values(self) -> StateError:
        return missing_values([] if self.unit is None else self.unit.ready_context().root.modules)

    def renew_copies(self, comm: Comm, *, if_changed: bool = False) -> None:
        """Updates the copies of shards that ``renewed`` buckets gather; ``if_changed``: see ``Bucket``."""
        for bucket in self.renewed:
            bucket.renew(comm, if_changed=if_changed)

    def unshard(self, comm: Comm, compute: Any = None) -> None:
        """Issues the all-gathers if need be, and makes the current stream wait for them."""
        self.issue_unshard(comm, compute)
        if self.state is ShardedState.GATHERING:
            for gather in self.gathers:
                comm.finish_gather(gather, compute)
            self.gathers = []
            self.enter(ShardedState.UNSHARDED)
            for bucket in self.buckets:
                bucket.versions.set_unsharded()

    def check_unwritten(self) -> None:
        """Raises StateError if unsharded parameters were changed in place, as resharding loses the change."""
        if self.state is ShardedState.UNSHARDED:
            written = [b.versions.written() for b in self.buckets if b.precision.has_own_unsharded]
            if any(written):
                raise lost_write(self.unit, [*chain.from_iterable(written)])

    def reshard(self, comm: Comm, ranks: int | None = None) -> None:
        """Frees the unsharded parameters; given ``ranks``, keeps a shard over so many ranks."""
        self.retain = Retain.NO
        if ranks is None:
            self.free_post_forward_shards()
        if self.state is ShardedState.GATHERING:
            self.unshard(comm)  # the collective is under way on the other ranks too
        if self.state is ShardedState.UNSHARDED:
            for bucket in self.buckets:
                if ranks is not None:
                    bucket.to_sharded_post_forward(ranks)
                bucket.free_unsharded()
                if bucket.precision.has_own_unsharded:
                    bucket.versions.set_free()
            self.enter(_SHARDED[ranks is not None])

    def keep_storage(self, keep: bool) -> None:
        """Sets whether resharding keeps the unsharded parameters' memory (``set_keep_unsharded_storage``)."""
        for bucket in self.buckets:
            bucket.change(keep_storage=keep)
            if not keep and self.is_sharded:
                bucket.free_unsharded()
                bucket.free_other_precision()

    def free_post_forward_shards(self) -> None:
        """Frees the shards over fewer ranks that ``reshard(ranks=...)`` has kept."""
        if self.state is ShardedState.SHARDED_POST_FORWARD:
            for bucket in self.buckets:
                bucket.free_post_forward_shard()
            self.enter(ShardedState.SHARDED)

    def register_unsharded(self) -> None:
        if self.registered is not Registered.UNSHARDED:
            # First, so that ``register_sharded`` undoes an interrupted call.
            self.enter(Registered.UNSHARDED)
            deque(map(call, self.puts, self.unsharded), maxlen=0)
            for beside in self.beside:
                beside.register(self)

    def register_sharded(self) -> None:
        if self.registered is Registered.UNSHARDED:
            deque(map(call, self.puts, self.at_rest), maxlen=0)
            for beside in self.beside:
                beside.unregister()
            self.enter(Registered.SHARDED)

    # -- staying unsharded ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Keeps the group unsharded for the next forward. Its sharded parameters are registered meanwhile,
        unless the user has called ``unshard()``."""
        if self.retain is not Retain.USER:
            self.register_sharded()
            self.retain = Retain.NEXT_FORWARD

    def drop_stale(self, comm: Comm) -> None:
        """Reshards, before a forward, a group that an earlier forward has left unsharded, unless it is
        retained and no change of the weights was noticed since."""
        self.free_post_forward_shards()
        if self.state is not ShardedState.UNSHARDED:
            return
        if self.retain is Retain.NO or self.is_stale:
            retain = self.retain
            self.register_sharded()
            self.reshard(comm)
            if retain is Retain.USER:
                self.retain = retain

    def gather_anew(self, comm: Comm) -> None:
        """Reshards and unshards the group within a forward, after the weights have changed in it."""
        self.register_sharded()
        self.reshard(comm)
        self.adopt()
        self.renew_copies(comm)
        self.unshard(comm)
        self.register_unsharded()

    @property
    def is_stale(self) -> bool:
        """Whether the group is unsharded and a change of the weights was noticed since it was gathered."""
        return self.state is ShardedState.UNSHARDED and any(
            bucket.versions.weights_changed() for bucket in self.buckets
        )

    def note_changes(self) -> bool:
        """For ``direct`` buckets whose weights have changed: raises the version counters of the unsharded
        parameters, so that a backward of an earlier forward is an error. Returns whether there were changes.
        """
        changed = [bucket.versions for bucket in self.direct if bucket.versions.note_weights()]
        for versions in changed:
            versions.set_unsharded()
        return bool(changed)

    @property
    def weights(self) -> list[int]:
        """``Versions.weights`` of each bucket, which identifies the weights that were gathered last."""
        return [bucket.versions.weights for bucket in self.buckets]

    def abandon(self, comm: Comm) -> None:
        """Finishes the all-gathers in flight and reshards, after an exception."""
        self.register_sharded()
        for gather in self.gathers:
            if gather.gathering is not None:  # the collective is under way on the other ranks too
                comm.finish_gather(gather)
                gather.free_unsharded()
        self.gathers = []
        if self.state is ShardedState.GATHERING:
            self.enter(ShardedState.UNSHARDED)
        self.reshard(comm)


# What is registered in a root's modules is compared with what was there in the last forward, by identity and
# within C; only if that differs are the modules walked, see ``members.check_loose``. No event can be missed.

REGISTERED_ATTRIBUTE = "_parallel3d_registered"  # of a root's first module: a ``_Registered``
_CONTAINERS = attrgetter("_modules", "_parameters")
_IS_TRAINABLE = attrgetter("requires_grad")


class _Registered:
    """The Parameters and modules found in the modules of one root at its last forward, to notice later
    changes. It is an attribute of the root's first module, and refers to what is inside that only."""

    def __init__(self, root: Any, modules: Sequence[nn.Module]) -> None:
        loose = list(check_loose(root, modules))
        tops = set(map(id, modules))
        inside = {id(each): each for module in modules for each in module.modules()}
        self._below = [
            module
            for key, module in inside.items()
            if key not in tops and all(isinstance(each, dict) for each in _CONTAINERS(module))
        ]
        self._found = list(self._read(modules))
        # Nobody ignored them; they were frozen.
        self._frozen = [param for param in loose if not param.requires_grad]

    def _read(self, modules: Iterable[nn.Module]) -> Iterable[Any]:
        containers = chain.from_iterable(map(_CONTAINERS, chain(modules, self._below)))
        return chain.from_iterable(map(dict.values, containers))

    def is_of(self, modules: Sequence[nn.Module]) -> bool:
        """Whether ``modules`` still hold the same modules and Parameters, with frozen ones still frozen."""
        now = list(self._read(modules))
        return (
            len(now) == len(self._found)
            and all(map(is_, now, self._found))
            and not any(map(_IS_TRAINABLE, self._frozen))
        )


def check_registered(root: Any) -> None:
    """Looks for modules and Parameters that were put into ``root`` since its last forward, and copies the
    values of Parameters that replace a unit's. Raises Parallel3dError for trainable ones that no unit has."""
    modules = root.modules
    registered = vars(modules[0]).get(REGISTERED_ATTRIBUTE)
    if registered is None or not registered.is_of(modules):
        vars(modules[0]).pop(REGISTERED_ATTRIBUTE, None)
        for unit in root.context.units:  # also those that this forward does not come to
            if not unit.group.is_registered and not unit.group.is_in_other_form:
                unit.group.adopt_replaced()
        vars(modules[0])[REGISTERED_ATTRIBUTE] = _Registered(root, modules)


# The tensors that a forward of a unit leaves on its modules' attributes.

_OURS = UNIT_ATTRIBUTE, REGISTERED_ATTRIBUTE
_STANDARD = frozenset((*vars(nn.Module()), *FULLY_SHARD_KEYS, *_OURS))


class Attributes:
    """Finds tensors on attributes of a unit's modules (``self.aux_loss = ...``) after each forward. Names of
    attributes are listed only when their number changes."""

    def __init__(self, tops: Iterable[weakref.ref[nn.Module]]) -> None:
        self._tops = list(tops)  # weakly: they have the unit, which has this
        self._modules: list[weakref.ref[nn.Module]] = []
        self._names: list[list[str]] = []
        self._sizes: list[int] = []

    def tensors(self) -> Iterator[torch.Tensor]:
        """Returns the tensors with an autograd graph on attributes, also in lists and other containers."""
        dicts = [vars(module) for ref in self._modules if (module := ref()) is not None]
        if not dicts or _sizes_of(dicts) != self._sizes:
            dicts = self._list()
        try:
            values = self._read(dicts)
        except KeyError:  # one was deleted, and another added
            dicts = self._list()
            values = self._read(dicts)
        for attributes in dicts:
            if buffers := attributes["_buffers"]:
                values += [b for b in buffers.values() if b is not None and b.requires_grad]
        return tensors_with_graph(values) if values else iter(())

    def _list(self) -> list[dict[str, Any]]:
        modules = list(units_modules([m for ref in self._tops if (m := ref()) is not None]))
        self._modules = [weakref.ref(module) for module in modules]
        dicts = [vars(module) for module in modules]
        self._sizes = _sizes_of(dicts)
        self._names = [[n for n in attributes if n not in _STANDARD] for attributes in dicts]
        return dicts

    def _read(self, dicts: list[dict[str, Any]]) -> list[Any]:
        return [
            value
            for attributes, names in zip(dicts, self._names, strict=True)
            for name in names
            if type(value := attributes[name]) not in PLAIN_TYPES
        ]


def _sizes_of(dicts: list[dict[str, Any]]) -> list[int]:
    """Returns numbers that change when a module or an attribute is added."""
    return [*map(len, dicts), *(len(attributes["_modules"]) for attributes in dicts)]


class Members:
    """The modules of one unit, and its hooks on them. It refers to the modules weakly; they hold the unit."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self.handles: dict[int, list[RemovableHandle]] = {}  # by id of a module: the unit's hooks
        self._tops: set[int] | None = None
        self.attributes = Attributes(())

    @property
    def modules(self) -> list[nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def tops(self) -> set[int]:
        """Ids of the unit's modules that are not inside another of its modules."""
        if self._tops is None:  # found in the first forward: looked for with each, many take long
            modules = self.modules
            inside = {id(m) for outer in modules for m in outer.modules() if m is not outer}
            self._tops = {id(m) for m in modules} - inside
        return self._tops

    def attach(self, module: nn.Module, unit: Any) -> None:
        self._modules.append(weakref.ref(module))
        self._tops, self.attributes = None, Attributes(self._modules)
        vars(module)[UNIT_ATTRIBUTE] = unit
        self.handles[id(module)] = [
            module.register_forward_pre_hook(unit.pre_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(unit.post_forward),
            module.register_load_state_dict_post_hook(unit.after_load),
        ]

    def detach(self) -> list[nn.Module]:
        modules = self.modules
        for module in modules:
            for handle in self.handles[id(module)]:
                handle.remove()
        self._modules, self.handles = [], {}
        return modules

    def hook_ids(self, module: nn.Module) -> list[int]:
        return [handle.id for handle in self.handles[id(module)]]


class UnitsToGather:
    """Implements ``schedule.ScheduledUnits`` for units given as weak references."""

    def is_gathering(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is not None and found.group.state is ShardedState.GATHERING

    def may_be_next(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is not None and bool(found.group.buckets) and not found.backward_begun

    def has_room(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is None or found.group.place is None or found.group.place.has_room()

    def is_read_in_backward(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is not None and found.unshard_in_backward

    def named_in_forward(self, unit: Hashable) -> Sequence[Hashable] | None:
        return unit().forward_prefetch  # type: ignore[operator]

    def named_in_backward(self, unit: Hashable) -> Sequence[Hashable] | None:
        found = unit()  # type: ignore[operator]
        return None if found is None else found.backward_prefetch


# Deferred prefetch: where a unit's backward gathers the unit before it, if it has large gradients. At its
# beginning, as usual, memory would hold the input of the last reduction beside two gathered units and a
# unit's gradients. The link carries that reduction first in any case; so the next gather is issued when half
# of the gradients are there, in the place of that input. Half a backward overlaps the one, half the other.


def bucket_to_count(unit: Any) -> Bucket | None:
    """Returns the bucket whose gradients ``DeferredPrefetch`` counts; None if it is not worth it."""
    if unit.backward_prefetch is not None or unit.reduce_unused or not unit.sync:
        return None
    for bucket in unit.group.buckets:
        has_large = bucket.reduced_zero_copy and not bucket.layout.small_grads[0]
        if has_large and bucket.settings.max_inputs == 1:
            return bucket if bucket.precision.compute_params[0].requires_grad else None
    return None


class DeferredPrefetch:
    """Issues a prefetch in the middle of a unit's backward: when half of its large gradients have arrived."""

    def __init__(self, bucket: Bucket, unit: Any, context: Any) -> None:
        self.bucket = weakref.ref(bucket)  # which holds this: no cycle
        self.unit = unit.ref
        self.context = weakref.ref(context)
        # How many elements of large gradients must still arrive before the all-gather is issued.
        self.awaited = sum(bucket.layout.segment_sizes[: bucket.reduced_zero_copy]) / 2
        bucket.grads.on_large = self.count

    def count(self, index: int) -> None:
        bucket, context = self.bucket(), self.context()
        assert bucket is not None
        self.awaited -= bucket.layout.segment_sizes[index]
        if self.awaited <= 0 and context is not None:
            context.comm.free_inputs()
            context.issue_deferred()

    def drop(self) -> None:
        bucket = self.bucket()
        if bucket is not None:
            bucket.grads.on_large = None
