"""fully_shard: makes a module (or several as one) a unit of the sharding engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import overload

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d._torch.fully_shard import (
    DataParallelMeshDims,
    TorchMixedPrecisionPolicy,
    enter_module_state,
)
from parallel3d._util.arguments import as_bool
from parallel3d._util.replaced_params import mark_replaced
from parallel3d._util.rollback import unchanged_on_error
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_offload,
    in_own_dtype,
    keeps_its_dtype,
    own_policy,
)
from parallel3d.fsdp.bucket import Bucket, Offload
from parallel3d.fsdp.group import ParamGroup
from parallel3d.fsdp.interop import register_state, state_of
from parallel3d.fsdp.members import (
    check_ignored,
    check_modules,
    check_no_spmd,
    check_reshard,
    managed_modules,
    managed_params,
    note_ignored,
    units_modules,
    watch_assignments,
)
from parallel3d.fsdp.module import FSDPModule
from parallel3d.fsdp.options import replicated as _replicated  # noqa: F401 (registers itself)
from parallel3d.fsdp.options.checks import guard_of
from parallel3d.fsdp.options.gather_extension import ExtensionBucket, is_extended
from parallel3d.fsdp.options.hfsdp import HybridBucket, cut_over_replicate
from parallel3d.fsdp.options.offload import CpuOffload
from parallel3d.fsdp.options.precision import cast_around, kept_in_full, set_up_precision
from parallel3d.fsdp.param import ShardedParam, holder_of, mark_taken
from parallel3d.fsdp.placement import checked_mesh, data_axes
from parallel3d.fsdp.spmd import ShardPlacementFn, requested_placements, spmd_axes
from parallel3d.fsdp.unit import Unit

# Parameters tied across units: the units become one, as if their modules had been given in one
# list.
#
# Then the shared parameter is gathered when the first of them runs and freed when all have run,
# and its gradient is reduced once, when all uses have contributed.


@dataclass(frozen=True)
class Tie:
    """A parameter of a new unit that an older one has already.

    Attributes:
        name: its name in the new unit.
        owner: what the older unit has made of it.
        places: the modules and attributes of the new unit that hold it.
    """

    name: str
    owner: ShardedParam
    places: list[tuple[nn.Module, str]]

    @property
    def unit(self) -> Unit:
        """The older unit."""
        unit = self.owner.unit() if self.owner.unit is not None else None
        assert unit is not None
        return unit


def check_ties(ties: Sequence[Tie], policy: MixedPrecisionPolicy) -> None:
    """Raises if the units can't become one."""
    for tie in ties:
        unit = tie.unit
        if unit.policy != policy:
            raise Parallel3dError(
                f"parameter {tie.name} is tied to {tie.owner.name} of unit {unit.label}, so the two units "
                f"become one; but their policies differ ({policy} and {unit.policy}): give both the same"
            )
        if guard_of(unit) is not None:
            raise StateError(
                f"parameter {tie.name} is tied to {tie.owner.name} of unit {unit.label}, which is updated in "
                "backward already; apply fully_shard to both before optim.step_in_backward"
            )
        if unit.context is not None:
            raise StateError(
                f"parameter {tie.name} is tied to {tie.owner.name} of unit {unit.label}, which has run "
                "already; apply fully_shard to both before the first forward"
            )


def join(unit: Unit, ties: Sequence[Tie]) -> None:
    """Makes the older units part of ``unit``, the new one."""
    for tie in ties:
        for module, name in tie.places:
            if module._parameters[name] is not tie.owner.sharded:  # else the module stands in both
                holder = holder_of(module)
                tie.owner.put_at([(holder, name)])
                holder[name] = tie.owner.sharded
    olders: list[Unit] = []
    for tie in ties:
        if tie.unit is not unit and all(tie.unit is not older for older in olders):
            olders.append(tie.unit)
    for older in olders:
        _absorb(unit, older)


def _absorb(unit: Unit, older: Unit) -> None:
    for module in older.members.detach():
        unit.members.attach(module, unit)
    unit.group.extend(older.group)
    for bucket in unit.group.buckets:
        for param in bucket.params:
            param.unit = unit.ref
    mine, others = unit.reshard_after_forward, older.reshard_after_forward
    if mine != others:
        unit.reshard_after_forward = None if None in (mine, others) else False


# make_buckets: which bucket each parameter of a unit goes into.


def make_buckets(
    unit: str,
    params: Sequence[ShardedParam],
    policy: MixedPrecisionPolicy,
    offload: Offload | None = None,
) -> list[Bucket]:
    """Sorts a unit's parameters into buckets, in order of their first parameter.

    Each bucket has its parameters' own axes. Parameters on meta may get values one by one, so they are apart
    from those that have some. Those that keep their dtype have a policy that says so.
    """
    grouped: dict[tuple[type[Bucket], *tuple[object, ...]], list[ShardedParam]] = {}
    policies: dict[object, MixedPrecisionPolicy] = {}
    # By ranks: two equal meshes in one process have groups of other names.
    meshes = {id(param.tp_mesh): param.tp_mesh for param in params}
    ranks = {i: None if m is None else tuple(m.mesh.tolist()) for i, m in meshes.items()}
    for param in params:
        tp = ranks[id(param.tp_mesh)]
        assert param.initial is not None
        meta = param.initial.is_meta
        kind = HybridBucket if param.axes.over_replicate else Bucket
        if is_extended(param.initial):
            kind = ExtensionBucket
        own = in_own_dtype(policy, param.dtype) if param.keeps_dtype else policy
        dtypes = param.dtype, param.grad_dtype
        key = (kind, dtypes, param.requires_grad, param.num_shards, tp, param.axes, meta, own)
        grouped.setdefault(key, []).append(param)
        policies[key] = own
    return [
        key[0](unit, members, members[0].axes, policies[key], offload)
        for key, members in grouped.items()
    ]


_classes: dict[type, type] = {}


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: TorchMixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shard_optimizer_over_replicate: bool = False,
) -> FSDPModule: ...
@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: TorchMixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shard_optimizer_over_replicate: bool = False,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: TorchMixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (holds nothing)
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shard_optimizer_over_replicate: bool = False,
) -> FSDPModule | list[FSDPModule]:
    """Shards the parameters of ``module`` that no unit inside it has, and makes it a unit.

    Apply it bottom-up: to the blocks, then to the whole model. At rest each parameter is a DTensor of
    the plain model's global shape; during forward and backward the module sees the whole (under tensor
    parallelism: the whole local) parameter. Arguments are those of ``torch.distributed.fsdp.fully_shard``,
    and the last.

    Args:
        module: the unit. A list is one unit whose parameters are gathered when the first of its modules
            runs and freed when all have run. Modules inside others of the list are left out.
        mesh: axes ``replicate`` and / or ``shard``, and maybe ``tp``, by name: see ``data_axes``.
            With ``tp`` every parameter becomes a DTensor on the whole mesh. None: one axis over all ranks.
        reshard_after_forward: free parameters after forward and gather them again in backward. None:
            True except for the root, which evaluation frees too. False keeps them for the next evaluation,
            unless the weights change (not through ``.data``: that is not seen). A number, which divides the
            shard axis: keep them sharded over so many ranks.
        shard_placement_fn: called once with each parameter; returns ``Shard(dim)``,
            ``ShardPlacementResult(placement, mesh_info)`` where the parameter has a mesh of its own (torch's
            ``FSDPMeshInfo`` or a ``DeviceMesh``; gradients are averaged over its ranks), or None for the
            default: dim 0, or the first that a DTensor can express.
        mp_policy: dtypes.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, their gradients and so the optimizer's state in
            the CPU's memory.
        ignored_params: parameters to leave as they are: not moved, sharded or reduced.
        dp_mesh_dims: which axes of ``mesh`` are data axes, where parameters are DTensors on the whole of it;
            forward sees them so. See ``fsdp/spmd.py``.
        shard_optimizer_over_replicate: HFSDP: on an HSDP mesh, shard what the optimizer sees over replicate x
            shard, and keep a copy in compute dtype that is sharded over shard, renewed once after each
            change of the weights, which all ranks must make. What goes through ``.data``, through the
            local tensors of ``state_dict()``, or through ``torch._foreach_`` functions outside of an
            optimizer, is not seen: call ``torch.autograd.graph.increment_version(parameters)`` after it.
            Parameters of which no dim divides by all data ranks stay as they are. See
            ``fsdp/options/hfsdp.py``.

    Returns:
        ``module`` itself, its class extended by ``FSDPModule``.

    Raises:
        Parallel3dError: not a module, a container without a forward, a unit already, a parameter of
            another unit; an argument that can't be. Nothing is changed.
        MeshError: a mesh without usable axes.
    """
    modules = check_modules(module)
    ignored = check_ignored(ignored_params)
    policy = own_policy(mp_policy)
    check_offload(offload_policy)
    offload = CpuOffload(offload_policy) if isinstance(offload_policy, CPUOffloadPolicy) else None
    mesh = checked_mesh(mesh)
    axes = data_axes(mesh) if dp_mesh_dims is None else spmd_axes(mesh, dp_mesh_dims)
    managed = list(managed_params(modules, ignored))
    found = [each for each in managed if each.owner is None]
    wanted = requested_placements(
        shard_placement_fn, [(each.name, each.param) for each in found], axes
    )
    if as_bool("shard_optimizer_over_replicate", shard_optimizer_over_replicate):
        check_no_spmd(axes)
        wanted = [
            cut_over_replicate(each.name, each.param, requested)
            for each, requested in zip(found, wanted, strict=True)
        ]
    reshard = check_reshard(
        reshard_after_forward, {axes} | {requested.axes for requested in wanted}
    )
    ties = [Tie(each.name, each.owner, each.places) for each in managed if each.owner is not None]
    check_ties(ties, policy)
    name = type(modules[0]).__name__
    watch_assignments()
    with ExitStack() as stack, torch.no_grad():
        for root in modules:
            stack.enter_context(unchanged_on_error(root))
        params = [
            ShardedParam(each.name, each.param, each.places, *requested)
            for each, requested in zip(found, wanted, strict=True)
        ]
        full = kept_in_full(modules, policy)
        for each, sharded in zip(found, params, strict=True):
            # One that others hold too can't: they could not compute with it.
            sharded.keeps_dtype = all(id(holder) in full for holder, _ in each.places) or (
                keeps_its_dtype(policy, each.name, each.param)
            )
        buckets = make_buckets(name, params, policy, offload)
        _move_buffers(modules, mesh.device_type)
        unit = Unit(modules, ParamGroup(buckets), policy, reshard, mesh.device_type)
        set_up_precision(unit)
        for each, sharded in zip(found, params, strict=True):
            mark_taken(each.param, sharded)  # the user's object: a tied use in another unit shows
            mark_replaced(each.param, *each.places[0], f"{each.name} of unit {unit.label}")
            sharded.unit = weakref.ref(unit)
        note_ignored(units_modules(modules), ignored)
        for inner in managed_modules(modules, ignored):  # for dynamo
            vars(inner).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
        cast_around(modules, policy)
        for root in modules:
            root.__class__ = _extended_class(type(root))
            register_state(root)
        join(unit, ties)
    for root in modules:
        enter_module_state(root, state_of(root))  # after all that may raise: it is not rolled back
    return module  # type: ignore[return-value]


fully_shard.state = state_of  # type: ignore[attr-defined]  # as torch's has it


def _move_buffers(modules: list[nn.Module], device_type: str) -> None:
    """Moves buffers to the mesh's device; meta ones stay for ``materialize``."""
    device = torch.device(device_type)
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type not in (device.type, "meta"):
                    module._buffers[name] = buffer.to(device)


def _extended_class(cls: type) -> type:
    extended = _classes.get(cls)
    if extended is None:
        extended = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__doc__": cls.__doc__})
        extended.__module__ = cls.__module__
        _classes[cls] = extended
    return extended
