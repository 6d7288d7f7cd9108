"""ParamGroup: one unit's parameters through SHARDED -> gathering -> UNSHARDED -> SHARDED."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import chain
from operator import attrgetter, call, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from parallel3d._torch.autograd import untraced
from parallel3d._torch.dtensor import get_local_tensor, keep_partial_gradients, make_dtensor
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.members import unit_of
from parallel3d.fsdp.options.gate import Gate
from parallel3d.fsdp.options.gather_extension import ExtensionBucket, with_late_extensions
from parallel3d.fsdp.options.hfsdp import HybridBucket
from parallel3d.fsdp.options.joint_gather import JointGather, plan_gathers
from parallel3d.fsdp.options.precision import BufferCasts, switch_precision
from parallel3d.fsdp.param import OwnSetattr, ShardedParam, mark_taken, owner_at, owner_of

if TYPE_CHECKING:
    from parallel3d.fsdp.unit import Unit


# What stands where a unit's Parameter was: whether its values may become the unit's, and its
# gradient.


def gradient_for(param: ShardedParam, given: torch.Tensor) -> torch.Tensor | None:
    """What ``.grad`` becomes when ``given`` takes the Parameter's place: that of ``given``, or None."""
    grad, dtype = given.grad, param.sharded.dtype
    if grad is None or isinstance(grad, DTensor):
        return None if grad is None else grad.to(dtype)
    return make_dtensor(param.shard_of(grad, tp_local=False).to(dtype, copy=True), param.spec)


def _is_of(param: ShardedParam, given: torch.Tensor) -> bool:
    """Whether ``given`` has the memory of ``param``."""
    if not isinstance(given, DTensor) or given.is_meta or param.sharded.is_meta:
        return False
    return get_local_tensor(given).is_set_to(param.local)


def check_replacement(param: ShardedParam, given: torch.Tensor) -> None:
    """Whether the values of ``given`` may become those of ``param``.

    Raises:
        Parallel3dError: it is no Parameter, or of another shape.
    """
    if not (isinstance(given, nn.Parameter) or _is_of(param, given)):
        raise Parallel3dError(
            f"a tensor that is no Parameter stands in place of parameter {param.name}, as "
            "torch.func.functional_call puts it there; its values would become the model's for good. Call it "
            "with the model's own parameters (or .detach() of them), or before fully_shard"
        )
    if given.shape != param.global_shape:
        raise Parallel3dError(
            f"parameter {param.name} of shape {tuple(param.global_shape)} was replaced by one of shape "
            f"{tuple(given.shape)}; give one of the same shape, or replace it before fully_shard"
        )


_WATCHED = "_parallel3d_watched_by"  # on an unsharded parameter: the unit its gradient hook calls


def unit_that_watches(unsharded: torch.Tensor) -> Any:
    """The unit that has ``unsharded`` as one of its unsharded parameters; None: it is another tensor."""
    unit = getattr(unsharded, _WATCHED, None)
    return None if unit is None else unit()


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
        held: whether the group was left gathered for the next forward, which the user has asked for.
        parted: whether the buckets keep parts between forward and backward (reshard to fewer ranks).
        gathers: what the all-gathers under way are of.
        on_meta: whether parameters are still on the meta device.
        hybrids: the buckets whose shards are cut over replicate too.
        direct: the buckets that no axis shards, whose unsharded parameters are the weights themselves.
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
        self.held = False
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
        self.direct = [bucket for bucket in self.buckets if not bucket.has_own_unsharded]
        if self._unit is not None:
            self.watch_gradients(self._unit)
        self.on_meta = any(bucket.device.type == "meta" for bucket in self.buckets)
        self.count_trainable()

    def take_late_extensions(self) -> None:
        """Before the first gather: parameters whose local tensors were given an extension by the user."""
        if self.state is GroupState.SHARDED and not self.shown:
            with torch.inference_mode(False), torch.no_grad():
                buckets = with_late_extensions(self.buckets)
            if buckets is not None:
                self.buckets = buckets
                self.refresh()

    def renew_buffers(self) -> None:
        """Makes the gather's buffers anew, for who has to see them made."""
        if self.state is GroupState.SHARDED and not self.shown:
            for bucket in self.buckets:
                bucket.build_unsharded()
            self.refresh()

    def extend(self, other: ParamGroup) -> None:
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
        """Calls ``unit().take_gradient(bucket, index, gradient)`` whenever autograd has one."""
        self._unit = unit
        for bucket in self.buckets:
            for index, compute in enumerate(bucket.compute_params):
                if getattr(compute, _WATCHED, None) is unit:
                    continue  # its bucket was not built anew
                if compute.dtype.is_floating_point or compute.dtype.is_complex:
                    setattr(compute, _WATCHED, unit)
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
        if self.gated and any(bucket.gate is None for bucket in self.buckets):
            self.use_gates(None)  # of what was trained before, or was elsewhere

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
        """Takes back Parameters that were put into the modules by other ways than assignment."""
        assert not self.shown
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
        self.list_slots()  # one may have been removed, or be there again

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

    @property
    def is_in_other_form(self) -> bool:
        """Whether other Parameters show: those of ``full_params``, or of a ``state_dict`` that is made."""
        return self.state is GroupState.WHOLE

    # -- unshard / reshard ---------------------------------------------------------------------------

    def issue_unshard(self, comm: Comm) -> None:
        """Starts the all-gathers if the group is sharded, and not shown by its root (see ``Residents``)."""
        if self.state is GroupState.SHARDED:
            if self.gated and self.shown:
                return
            if self.on_meta:
                self.check_has_values()
            buckets = self.buckets
            self.note_weights(comm)
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
        """Where the optimizer's shards are cut over replicate: what is gathered follows the weights.

        Args:
            if_changed: only those of weights that were seen to change.
        """
        for hybrid in self.hybrids:
            if not if_changed or hybrid.is_old:
                hybrid.renew(comm)

    def unshard(self, comm: Comm) -> None:
        """Makes the unsharded parameters ready for use on the current stream."""
        self.issue_unshard(comm)
        if self.state is GroupState.GATHERING:
            for gather in self.gathers:
                comm.finish_gather(gather)
            self.gathers = []
            self.state = GroupState.UNSHARDED
            for bucket in self.buckets:
                bucket.versions.set_unsharded()

    def reshard(self, comm: Comm, parts: int | None = None) -> None:
        """Frees the unsharded parameters; with ``parts`` those many ranks keep them between each other."""
        self.kept = self.held = False
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
                if bucket.has_own_unsharded:
                    bucket.versions.set_free()
            self.state = GroupState.SHARDED

    def keep_storage(self, keep: bool) -> None:
        """Whether the unsharded parameters keep their memory while the group is sharded."""
        for bucket in self.buckets:
            bucket.keep_storage = keep
            if not keep and self.state in (GroupState.SHARDED, GroupState.WHOLE):
                bucket.free_unsharded()
                bucket.free_other_precision()

    def drop_parts(self) -> None:
        """Forgets what a reshard to fewer ranks has kept."""
        if self.parted:
            self.parted = False
            for bucket in self.buckets:
                bucket.drop_part()

    def show(self) -> None:
        """Puts the unsharded parameters into the modules."""
        if not self.shown:
            self.shown = True  # first: ``hide`` then undoes what an interruption has left
            for holder, _, computing in self.holders:
                holder.update(computing)
            if self.buffers is not None and not self.full:
                self.buffers.show()

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

    # -- staying gathered ----------------------------------------------------------------------------

    def keep(self) -> None:
        """The user wants the group gathered and shown."""
        self.kept = self.held = True

    def hold(self) -> None:
        """Leaves the group gathered for the next forward; shown if the user keeps it so."""
        if not self.kept:
            self.hide()
        self.held = True

    def drop_stale(self, comm: Comm) -> None:
        """Before a forward: frees what an earlier one left, unless the user has asked for it and it still
        holds the weights, as far as counters tell."""
        self.drop_parts()
        if self.state is not GroupState.UNSHARDED:
            return
        if not self.held or self.is_stale:
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

    @property
    def is_stale(self) -> bool:
        """Whether the weights were seen to change since the group was gathered."""
        return self.state is GroupState.UNSHARDED and any(
            bucket.versions.stamp.is_old() for bucket in self.buckets
        )

    def note_changes(self) -> bool:
        """Tells autograd, where the unsharded parameters are the weights themselves and these were seen to
        change: what forward has computed with before is there no more. Whether that is so.
        """
        changed = [bucket for bucket in self.direct if bucket.versions.stamp.is_old()]
        for bucket in changed:
            bucket.versions.stamp.take()
            bucket.versions.set_unsharded()
        return bool(changed)

    @property
    def weights(self) -> list[int]:
        """The numbers of the values that were gathered last."""
        return [bucket.versions.stamp.number for bucket in self.buckets]

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
            grad, param.grad = param.grad, None
            unit.take_gradient(bucket, self.index, grad)


# What is registered in a root's modules: Parameters that are assigned, modules put in after
# sharding.
#
# A Parameter assigned where a unit has one (``module.weight = nn.Parameter(...)``,
# ``register_parameter``, ``load_state_dict(assign=True)``) gives it its values at once, and the
# module keeps the unit's own, so that an optimizer made from ``model.parameters()`` afterwards
# trains what forward computes with.
#
# Anything else that is new is looked for when the root's forward begins: what every module has is
# compared, by identity and within C, with what it had in the last one, and only if that differs
# are the modules walked. This rests on no event, so that none can be missed. A trainable parameter
# that no unit has, and nobody has ignored, is an error there: no rank would average its gradient
# with the others'.

REGISTERED_ATTRIBUTE = "_parallel3d_registered"  # of a root's first module, see ``_Registered``
_IGNORED = (
    "_parallel3d_ignored"  # of a module: names of its parameters that a unit was told to ignore
)

_CONTAINERS = attrgetter("_modules", "_parameters")
_IS_TRAINABLE = attrgetter("requires_grad")


# -- a Parameter is assigned ---------------------------------------------------------------------------

_watching = False


def watch_assignments() -> None:
    """From now on units take Parameters when they are assigned."""
    global _watching
    if not _watching:
        _watching = True
        register_module_parameter_registration_hook(_take_assigned)  # type: ignore[arg-type]


def _take_assigned(module: nn.Module, name: str, given: nn.Parameter) -> nn.Parameter | None:
    """Called by torch with every Parameter that is registered in any module; what it returns is put there."""
    owner = owner_at(module, name)
    if owner is None or OwnSetattr.is_putting or given is owner.sharded:
        return None
    unit = owner.unit() if owner.unit is not None else None
    if unit is None or unit.group.is_in_other_form or unit.group.owns(given):
        return None
    unit.come_to_rest()
    if unit.group.shown:
        raise StateError(
            f"parameter {owner.name} of unit {unit.label} was assigned while the unit's unsharded parameters "
            "are in its modules; assign it between steps, after reshard() if unshard() was called"
        )
    other = owner_of(given)
    if other is not None and other is not owner:
        raise Parallel3dError(
            f"parameter {owner.name} of unit {unit.label} was assigned {_describe(other)}, which would tie "
            "the two; tie parameters before fully_shard, or copy the values by copy_() under no_grad()"
        )
    unit.group.take(owner, given)
    mark_taken(given, owner)
    return owner.sharded


def _describe(param: ShardedParam) -> str:
    unit = param.unit() if param.unit is not None else None
    return f"parameter {param.name}" + ("" if unit is None else f" of unit {unit.label}")


# -- what is new in a root's modules ---------------------------------------------------------------------


def note_ignored(modules: Iterable[nn.Module], ignored: set[int]) -> None:
    """Notes which parameters of ``modules`` are among ``ignored``, by id."""
    for module in modules if ignored else ():
        names = {name for name, param in module._parameters.items() if id(param) in ignored}
        if names:
            vars(module)[_IGNORED] = names | vars(module).get(_IGNORED, set())


def check_registered(root: Unit) -> None:
    """When a forward of ``root`` begins.

    Raises:
        Parallel3dError: a trainable parameter in its modules is of no unit, and was not ignored.
    """
    modules = root.modules
    registered = vars(modules[0]).get(REGISTERED_ATTRIBUTE)
    if registered is None or not registered.is_of(modules):
        vars(modules[0]).pop(REGISTERED_ATTRIBUTE, None)
        assert root.context is not None
        for unit in root.context.units:  # also those that this forward does not come to
            if not unit.group.shown and not unit.group.is_in_other_form:
                unit.group.adopt_replaced()
        vars(modules[0])[REGISTERED_ATTRIBUTE] = _Registered(root, modules)


class _Registered:
    """What the modules of one root had when they were last found to be in order.

    The root's first module has it: it refers to what is below that module, and to nothing above.
    """

    def __init__(self, root: Unit, modules: Sequence[nn.Module]) -> None:
        loose = list(_check(root, modules))
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
        """Whether they still have the same, and what was frozen still is."""
        now = list(self._read(modules))
        return (
            len(now) == len(self._found)
            and all(map(is_, now, self._found))
            and not any(map(_IS_TRAINABLE, self._frozen))
        )


def _check(root: Unit, modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Raises if a parameter should be of a unit; yields those that need not, but for those ignored."""
    for prefix, module in _walk(modules):
        for name, param in module._parameters.items():
            if param is None or owner_at(module, name) is not None:
                continue
            if name in vars(module).get(_IGNORED, ()):
                continue
            owner = owner_of(param)
            if param.requires_grad or (owner is not None and param is owner.sharded):
                raise _error(root, prefix, module, name, owner)
            yield param


def _error(
    root: Unit, prefix: str, module: nn.Module, name: str, owner: ShardedParam | None
) -> Parallel3dError:
    full_name = f"{prefix}.{name}" if prefix else name
    where = (
        f"parameter {full_name} of a {type(module).__name__} in unit {_unit_around(root, prefix)}"
    )
    if owner is not None:
        return Parallel3dError(
            f"{where} is {_describe(owner)} too, but was put there after fully_shard: the unit would not "
            "gather it there. Tie parameters, and register parametrizations, before fully_shard"
        )
    return Parallel3dError(
        f"{where} is trainable, but no unit has it: it was put there after fully_shard, and its gradient "
        f"would not be reduced over the ranks. Put it there before fully_shard; or call fully_shard on "
        f"{prefix or 'its module'} with the same mesh, before the optimizer is made; or on that with "
        "ignored_params=[...], if each rank is to train its own; or freeze it: requires_grad_(False)"
    )


def _unit_around(root: Unit, prefix: str) -> str:
    """The label of the innermost unit whose module holds the one that ``prefix`` leads to."""
    module, label = root.modules[0], root.label
    for part in filter(None, prefix.split(".")):
        module = module._modules.get(part)  # type: ignore[assignment]
        if module is None:  # of a root of several modules: in another than the first
            return label
        unit = unit_of(module)
        label = label if unit is None else unit.label
    return label


def _walk(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """All modules in ``modules``, but for those in units of torch's own engine."""
    seen: set[int] = set()
    waiting = [("", module) for module in reversed(modules)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, TorchFSDPModule) and unit_of(module) is None:
            continue
        yield prefix, module
        for name, child in reversed(module._modules.items()):
            if child is not None:
                waiting.append((f"{prefix}.{name}" if prefix else name, child))
