"""ParamGroup: one unit's parameters through SHARDED -> GATHERING -> UNSHARDED -> SHARDED; and its modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from parallel3d._torch.autograd import set_grad_dtype, untraced
from parallel3d._torch.dtensor import keep_partial_gradients
from parallel3d._torch.fully_shard import FULLY_SHARD_KEYS
from parallel3d._util.reachable import PLAIN_TYPES, tensors_with_graph
from parallel3d.errors import StateError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.coalesced import CoalescedGather, plan_gathers
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.members import UNIT_ATTRIBUTE, check_loose, missing_values, units_modules
from parallel3d.fsdp.param import lost_write

# An attribute of unsharded parameters: a weak reference to the unit that the gradient hook calls.
WATCHED_BY = "_parallel3d_watched_by"


class ShardedState(Enum):
    """Where a group's values are."""

    SHARDED = auto()
    GATHERING = auto()  # its all-gathers are issued
    UNSHARDED = auto()
    SHARDED_POST_FORWARD = auto()  # sharded over fewer ranks from a forward until its backward


class Registered(Enum):
    """Which parameters the modules' attributes are."""

    SHARDED = auto()  # as at rest
    UNSHARDED = auto()
    OTHER = auto()  # those of ``full_params``, or of a ``state_dict`` that is being made


class Retain(Enum):
    """Why a group stays unsharded when a pass is over."""

    NO = auto()
    NEXT_FORWARD = auto()  # the next forward or evaluation uses it
    # By ``unshard()``: it stays registered too, until ``reshard()`` or a pass that reshards.
    USER = auto()


class Event(Enum):
    """What changes a group's state; see ``TRANSITIONS``."""

    ISSUE = auto()  # its all-gathers are issued
    FINISH = auto()  # the unsharded parameters are ready for use
    FREE = auto()  # the unsharded parameters are freed
    FREE_PARTLY = auto()  # the unsharded parameters are freed, but each rank keeps a larger shard
    DROP = auto()  # the larger shards are freed
    REGISTER = auto()  # the unsharded parameters are registered in the modules
    UNREGISTER = auto()  # the sharded ones are registered again
    SHOW_OTHER = auto()  # parameters of neither kind are registered
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
"""(state, event) -> next state. Other pairs raise KeyError; see ``ParamGroup.enter``."""

_OF_MODULES = {Event.REGISTER, Event.UNREGISTER, Event.SHOW_OTHER, Event.HIDE_OTHER}
_SHARDED = (ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD)


class Beside(Protocol):
    """What an option registers together with the unsharded parameters, see ``options/precision``."""

    def register(self, group: ParamGroup) -> None:
        """Called after the unsharded parameters were registered."""

    def unregister(self) -> None:
        """Called after the sharded parameters were registered again."""


class ParamGroup:
    """The buckets of one unit.

    Attributes:
        state, registered, retain: see the enums. ``enter`` alone changes the first two.
        module_infos: (holder, name, sharded parameter, unsharded parameter) for each attribute of a module.
            The holder is the module's ``_parameters``, or an ``OwnSetattr``.
        holders: (holder, its sharded parameters by name, its unsharded parameters by name).
        trainable: number of parameters that get a gradient.
        gathers: the buckets, or ``CoalescedGather``, whose all-gathers are under way.
        on_meta: whether parameters are on the meta device.
        renewed: the buckets that gather from a copy of their shards, which is renewed when weights change.
        direct: the buckets whose unsharded parameters are the shards themselves, as no axis shards them.
        own_dtype: whether the buckets compute in the parameters' own dtype, and not in the policy's.
        beside: what is registered together with the unsharded parameters.
        computing: ids of the unsharded parameters.
    """

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

    def enter(self, event: Event) -> None:
        """Changes ``state`` or ``registered`` as ``TRANSITIONS`` says."""
        if event in _OF_MODULES:
            self.registered = TRANSITIONS[self.registered, event]
        else:
            self.state = TRANSITIONS[self.state, event]

    @property
    def is_sharded(self) -> bool:
        """Whether the unsharded parameters are freed, and no all-gather is under way."""
        return self.state in _SHARDED

    @property
    def is_registered(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self.registered is Registered.UNSHARDED

    @property
    def is_in_other_form(self) -> bool:
        """Whether parameters of neither kind are registered; see ``Registered.OTHER``."""
        return self.registered is Registered.OTHER

    @property
    def unit(self) -> Any:
        """The unit, or None before ``watch_gradients``."""
        return None if self._unit is None else self._unit()

    # -- buckets and modules -------------------------------------------------------------------------

    def refresh(self) -> None:
        """Updates what depends on the buckets' tensors, after buckets were built."""
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
        """Replaces the buckets by ``rebuild(buckets)``, unless that is None or the group is in use."""
        if self.is_sharded and self.registered is Registered.SHARDED:
            with torch.inference_mode(False), torch.no_grad():
                buckets = rebuild(self.buckets)
            if buckets is not None:
                self.buckets = buckets
                self.refresh()

    def renew_buffers(self) -> None:
        """Makes the unsharded parameters and the all-gather's buffers anew, unless the group is in use."""
        if self.is_sharded and self.registered is Registered.SHARDED:
            for bucket in self.buckets:
                bucket.build_unsharded()
            self.refresh()

    def extend(self, other: ParamGroup) -> None:
        """Adds the buckets of ``other``."""
        self.buckets += other.buckets
        self.beside += other.beside
        self.refresh()

    def list_module_infos(self) -> None:
        """Lists the modules' attributes that are parameters of the group."""
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
        self.holders = list(by_holder.values())
        self.computing = {id(compute) for _, _, _, compute in self.module_infos}

    def watch_gradients(self, unit: weakref.ref) -> None:
        """Hooks the unsharded parameters: ``unit().take_gradient(bucket, index, grad)`` is called for each
        gradient."""
        self._unit = unit
        for bucket in self.buckets:
            hook = partial(_take_gradient, unit, weakref.ref(bucket))  # keeps neither alive
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

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point parameter at rest; None: there is none."""
        dtypes = (bucket.dtype for bucket in self.buckets)
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)

    def count_trainable(self) -> None:
        """Sets ``requires_grad`` of the unsharded parameters to that of the sharded ones."""
        self.trainable = sum(bucket.count_trainable() for bucket in self.buckets)

    def adopt(self, *, partly: bool = False) -> None:
        """Copies values back to the buckets' buffers after calls such as ``to_empty`` or ``double`` have
        replaced the parameters or their memory.

        Args:
            partly: whether only one of the unit's modules was converted or loaded. A bucket with parameters
                of other modules is then left until these have been, too.
        """
        self.adopt_replaced()
        buckets = self.buckets
        if partly:
            buckets = [bucket for bucket in buckets if len(bucket.kinds()) == 1]
        elif self.on_meta and any(len(bucket.kinds()) > 1 for bucket in buckets):
            raise self._no_values()  # some parameters were loaded, others not
        moved = [bucket.adopt() for bucket in buckets]
        if any(moved):
            self.refresh()

    def adopt_replaced(self) -> None:
        """Finds parameters that were written to ``module._parameters`` directly. Their values are copied to
        the sharded parameters, which are registered again.

        Assignments to attributes are handled at once (``members.watch_assignments``).
        """
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
        """Issues the all-gathers if the group is sharded; ``compute``: see ``Comm.issue_gather``."""
        if self.registered is Registered.OTHER:
            label = "" if self.unit is None else self.unit.label
            raise StateError(
                f"unit {label} shows its parameters in another form, as in full_params or while a "
                "state_dict is made; leave that before forward, backward and unshard()"
            )
        if self.state not in _SHARDED:
            return
        if self.on_meta:
            self.check_has_values()
        unit = self.unit
        if unit is not None and unit.context is not None and unit.context.same_order is not None:
            unit.context.same_order.gathers(unit)
        self.note_weights(comm)
        self.gathers = self.buckets if len(self.buckets) < 2 else plan_gathers(self.buckets)
        for gather in self.gathers:
            comm.issue_gather(gather, compute)
        self.enter(Event.ISSUE)

    def note_weights(self, comm: Comm) -> None:
        """Notes the version of the weights that the next all-gathers bring."""
        for bucket in self.buckets:
            bucket.note_weights(comm)

    def check_has_values(self) -> None:
        """Raises StateError if parameters are on the meta device, and the forward's inputs are not."""
        if self.on_meta and (self.unit is None or not self.unit.ready_context().inputs_on_meta):
            raise self._no_values()

    def _no_values(self) -> StateError:
        return missing_values([] if self.unit is None else self.unit.ready_context().root.modules)

    def renew_copies(self, comm: Comm, *, if_changed: bool = False) -> None:
        """Renews the copies that buckets gather from; ``if_changed``: only if weights were seen to change."""
        for bucket in self.renewed:
            bucket.renew(comm, if_changed=if_changed)

    def unshard(self, comm: Comm, compute: Any = None) -> None:
        """Issues the all-gathers if need be and finishes them: the current stream may use the parameters;
        ``compute``: see ``Comm.issue_gather``."""
        self.issue_unshard(comm, compute)
        if self.state is ShardedState.GATHERING:
            for gather in self.gathers:
                comm.finish_gather(gather, compute)
            self.gathers = []
            self.enter(Event.FINISH)
            for bucket in self.buckets:
                bucket.versions.set_unsharded()

    def check_unwritten(self) -> None:
        """Raises StateError if unsharded parameters were written, which would be lost when they are freed."""
        if self.state is ShardedState.UNSHARDED:
            written = [b.versions.written() for b in self.buckets if b.precision.has_own_unsharded]
            if any(written):
                raise lost_write(self.unit, [*chain.from_iterable(written)])

    def reshard(self, comm: Comm, ranks: int | None = None) -> None:
        """Frees the unsharded parameters.

        Args:
            ranks: number of ranks over which the parameters stay sharded until the next all-gather. None: all
                shard ranks.
        """
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
            self.enter(Event.FREE if ranks is None else Event.FREE_PARTLY)

    def keep_storage(self, keep: bool) -> None:
        """Sets whether the unsharded parameters keep their memory while the group is sharded."""
        for bucket in self.buckets:
            bucket.change(keep_storage=keep)
            if not keep and self.is_sharded:
                bucket.free_unsharded()
                bucket.free_other_precision()

    def free_post_forward_shards(self) -> None:
        """Frees the larger shards that a reshard to fewer ranks has kept."""
        if self.state is ShardedState.SHARDED_POST_FORWARD:
            for bucket in self.buckets:
                bucket.free_post_forward_shard()
            self.enter(Event.DROP)

    def register_unsharded(self) -> None:
        """Registers the unsharded parameters in the modules."""
        if self.registered is not Registered.UNSHARDED:
            # First, so that ``register_sharded`` undoes an interrupted call.
            self.enter(Event.REGISTER)
            for holder, _, computing in self.holders:
                holder.update(computing)
            for beside in self.beside:
                beside.register(self)

    def register_sharded(self) -> None:
        """Registers the sharded parameters again, if the unsharded ones are registered."""
        if self.registered is Registered.UNSHARDED:
            for holder, at_rest, _ in self.holders:
                holder.update(at_rest)
            for beside in self.beside:
                beside.unregister()
            self.enter(Event.UNREGISTER)

    # -- staying unsharded ---------------------------------------------------------------------------

    def hold(self) -> None:
        """Keeps the group unsharded for the next forward; it stays registered if the user retains it."""
        if self.retain is not Retain.USER:
            self.register_sharded()
            self.retain = Retain.NEXT_FORWARD

    def drop_stale(self, comm: Comm) -> None:
        """Frees unsharded parameters that an earlier forward has left, unless they are retained and no change
        of the weights was seen since. Called before a forward."""
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
        """Gathers and registers the present weights within a forward in which they have changed."""
        self.register_sharded()
        self.reshard(comm)
        self.adopt()
        self.renew_copies(comm)
        self.unshard(comm)
        self.register_unsharded()

    @property
    def is_stale(self) -> bool:
        """Whether the group is unsharded, and the weights were seen to change since it was gathered."""
        return self.state is ShardedState.UNSHARDED and any(
            bucket.versions.weights_changed() for bucket in self.buckets
        )

    def note_changes(self) -> bool:
        """Marks the unsharded parameters of ``direct`` buckets as changed for autograd, if the weights were.

        A backward of an earlier forward then raises. Returns whether there were changes.
        """
        changed = [bucket for bucket in self.direct if bucket.versions.note_weights()]
        for bucket in changed:
            bucket.versions.set_unsharded()
        return bool(changed)

    @property
    def weights(self) -> list[int]:
        """For each bucket the version of the weights that was gathered last."""
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
            self.enter(Event.FINISH)
        self.reshard(comm)


@untraced
def _take_gradient(unit: weakref.ref, bucket: weakref.ref, index: int, param: Any) -> None:
    """Hook of an unsharded parameter: hands its gradient to the unit, and sets ``.grad`` to None."""
    alive, its_bucket = unit(), bucket()
    if alive is not None and its_bucket is not None:
        grad, param.grad = param.grad, None
        alive.take_gradient(its_bucket, index, grad)


# What is registered in a root's modules: compared with what was there in the last forward, by
# identity and within C; only if that differs are the modules walked, see ``members.check_loose``.
# This rests on no event, so that none can be missed.

REGISTERED_ATTRIBUTE = "_parallel3d_registered"  # of a root's first module: a ``_Registered``
_CONTAINERS = attrgetter("_modules", "_parameters")
_IS_TRAINABLE = attrgetter("requires_grad")


class _Registered:
    """The modules and parameters that were registered in the modules of one root at its last forward.

    It is an attribute of the root's first module, and refers to what is below that module alone.
    """

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
        """Whether ``modules`` still have the same ones, and what was frozen still is."""
        now = list(self._read(modules))
        return (
            len(now) == len(self._found)
            and all(map(is_, now, self._found))
            and not any(map(_IS_TRAINABLE, self._frozen))
        )


def check_registered(root: Any) -> None:
    """Takes over what was registered in the modules of ``root`` since its last forward.

    Raises:
        Parallel3dError: a trainable parameter in its modules is of no unit, and was not ignored.
    """
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
    """The attributes of a unit's modules, without those that ``nn.Module`` has by itself.

    They are read after each forward, so what is to be read is listed once.
    """

    def __init__(self, tops: Iterable[weakref.ref[nn.Module]]) -> None:
        self._tops = list(tops)  # weakly: they have the unit, which has this
        self._modules: list[weakref.ref[nn.Module]] = []
        self._names: list[list[str]] = []
        self._sizes: list[int] = []

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that were computed with autograd's record: on attributes, and in what lies there."""
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
    """Numbers that differ where a module or an attribute was added."""
    return [*map(len, dicts), *(len(attributes["_modules"]) for attributes in dicts)]


class Members:
    """The modules of one unit. They hold the unit, which refers to them weakly.

    Attributes:
        handles: by id of a module, the unit's hooks before a forward, after it, and after a load.
        attributes: see ``Attributes``.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self.handles: dict[int, list[RemovableHandle]] = {}
        self._tops: set[int] | None = None
        self.attributes = Attributes(())

    @property
    def modules(self) -> list[nn.Module]:
        """The modules given to ``fully_shard``."""
        return [module for ref in self._modules if (module := ref()) is not None]

    @property
    def tops(self) -> set[int]:
        """Ids of those modules that are not inside another one of the unit."""
        if self._tops is None:  # found in the first forward: looked for with each, many take long
            modules = self.modules
            inside = {id(m) for outer in modules for m in outer.modules() if m is not outer}
            self._tops = {id(m) for m in modules} - inside
        return self._tops

    def attach(self, module: nn.Module, unit: Any) -> None:
        """Adds ``module``, with the hooks of ``unit``."""
        self._modules.append(weakref.ref(module))
        self._tops, self.attributes = None, Attributes(self._modules)
        vars(module)[UNIT_ATTRIBUTE] = unit
        self.handles[id(module)] = [
            module.register_forward_pre_hook(unit.pre_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(unit.post_forward),
            module.register_load_state_dict_post_hook(unit.after_load),
        ]

    def detach(self) -> list[nn.Module]:
        """Removes all modules and the hooks on them; returns the modules."""
        modules = self.modules
        for module in modules:
            for handle in self.handles[id(module)]:
                handle.remove()
        self._modules, self.handles = [], {}
        return modules

    def hook_ids(self, module: nn.Module) -> list[int]:
        """Keys of the unit's hooks in ``module``'s dicts of hooks."""
        return [handle.id for handle in self.handles[id(module)]]


class UnitsToGather:
    """Answers the schedule's questions about units, which it knows by weak references."""

    def is_gathering(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is not None and found.group.state is ShardedState.GATHERING

    def may_be_next(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is not None and bool(found.group.buckets) and not found.backward_begun

    def is_read_in_backward(self, unit: Hashable) -> bool:
        found = unit()  # type: ignore[operator]
        return found is not None and found.unshard_in_backward

    def named_in_forward(self, unit: Hashable) -> Sequence[Hashable] | None:
        return unit().forward_prefetch  # type: ignore[operator]

    def named_in_backward(self, unit: Hashable) -> Sequence[Hashable] | None:
        found = unit()  # type: ignore[operator]
        return None if found is None else found.backward_prefetch


# Deferred prefetch: where a unit's backward gathers the unit before it, if it has large gradients.
#
# The usual place is the backward's beginning. But then the memory at its end is two gathered
# units, a unit's gradients, and the input of the last reduction, which nothing needs that long.
# The link carries that reduction first in any case; so the next gather is issued when half of the
# gradients are there, and the reduction's input is freed then: what it took, the gather takes.
# Half a backward overlaps the one, half the other.


def bucket_to_count(unit: Any) -> Bucket | None:
    """The bucket whose gradients say when half of the backward is over; None where that is not worth it."""
    if unit.backward_prefetch is not None or unit.reduce_unused or not unit.sync:
        return None
    for bucket in unit.group.buckets:
        if (
            bucket.reduced_zero_copy
            and not bucket.layout.small_grads[0]
            and bucket.settings.max_inputs == 1
        ):
            return bucket if bucket.precision.compute_params[0].requires_grad else None
    return None


class DeferredPrefetch:
    """Counts the gradients that a deferred all-gather waits for.

    Attributes:
        unit: the unit whose gradients they are.
        awaited: how many elements of large gradients must still arrive before the all-gather is issued.
    """

    def __init__(self, bucket: Bucket, unit: Any, context: Any) -> None:
        self.bucket = weakref.ref(bucket)  # which holds this: no cycle
        self.unit = unit.ref
        self.context = weakref.ref(context)
        self.awaited = sum(bucket.layout.segment_sizes[: bucket.reduced_zero_copy]) / 2
        bucket.grads.on_large = self.count

    def count(self, index: int) -> None:
        """Called when the gradient of the zero-copy parameter ``index`` has arrived."""
        bucket, context = self.bucket(), self.context()
        assert bucket is not None
        self.awaited -= bucket.layout.segment_sizes[index]
        if self.awaited <= 0 and context is not None:
            context.comm.free_inputs()
            context.issue_deferred()

    def drop(self) -> None:
        """Stops counting."""
        bucket = self.bucket()
        if bucket is not None:
            bucket.grads.on_large = None
