"""fully_shard: makes a module (or several as one) a unit of the sharding engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TypedDict, Unpack, overload

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from parallel3d._torch.fully_shard import (
    DataParallelMeshDims,
    TorchMixedPrecisionPolicy,
    enter_module_state,
    fully_shard_state,
    set_fully_shard_state,
)
from parallel3d._util.arguments import as_bool
from parallel3d._util.forwards import set_class, unchanged_on_error
from parallel3d._util.replaced_params import mark_replaced
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    as_instance,
    check_block,
    check_offload,
    in_own_dtype,
    keeps_its_dtype,
    own_policy,
)
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.group import ParamGroup
from parallel3d.fsdp.interop import TorchState
from parallel3d.fsdp.members import (
    Managed,
    check_ignored,
    check_modules,
    check_reshard,
    managed_modules,
    managed_params,
    note_ignored,
    params_of,
    refuse_resizing,
    units_modules,
)
from parallel3d.fsdp.module import FSDPModule
from parallel3d.fsdp.options.checks import guard_of
from parallel3d.fsdp.options.gather_extension import ExtensionBucket, is_extended
from parallel3d.fsdp.options.hfsdp import HybridBucket, cut_over_replicate
from parallel3d.fsdp.options.memory import CpuOffload
from parallel3d.fsdp.options.precision import cast_around, kept_in_full, set_up_precision
from parallel3d.fsdp.param import ShardedParam, holder_of, mark_taken
from parallel3d.fsdp.placement import (
    ShardPlacementFn,
    checked_mesh,
    data_axes,
    requested_placements,
    spmd_axes,
    warn_of_replicas,
)
from parallel3d.fsdp.unit import Unit
from parallel3d.mesh.failures import tells_others


class _Options(TypedDict, total=False):
    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: ShardPlacementFn | None
    mp_policy: TorchMixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: Iterable[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    shard_optimizer_over_replicate: bool
    block: int | None


@overload
def fully_shard(module: nn.Module, **options: Unpack[_Options]) -> FSDPModule: ...
@overload
def fully_shard(module: list[nn.Module], **options: Unpack[_Options]) -> list[FSDPModule]: ...
@tells_others
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
    block: int | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Makes ``module`` a unit: shards its parameters, except for those of units inside it.

    Apply it bottom-up: to the blocks, then to the whole model. At rest each parameter is a DTensor of the
    plain model's global shape. During forward and backward the module sees the unsharded parameter (with
    tensor parallelism: this rank's part). Arguments but the last two are those of
    ``torch.distributed.fsdp.fully_shard``.

    Args:
        module: the module. A list makes one unit, whose parameters are gathered when the first of its modules
            runs and freed when all have run. Modules inside others of the list are left out.
        mesh: has axes ``replicate`` and / or ``shard``, and optionally ``tp``, by name: see ``data_axes``.
            With ``tp`` every parameter becomes a DTensor on the whole mesh. None: one axis over all ranks.
        reshard_after_forward: whether to free parameters after forward and gather them again in backward.
            None: True except for the root, which is freed in evaluation too. False keeps them for the next
            evaluation unless the weights change (changes through ``.data`` are not noticed). A number, which
            must divide the size of the shard axis: reshard them to so many ranks.
        shard_placement_fn: called once with each parameter. It returns ``Shard(dim)``,
            ``ShardPlacementResult(placement, mesh_info)`` if the parameter has a mesh of its own (torch's
            ``FSDPMeshInfo`` or a ``DeviceMesh``; gradients are averaged over its ranks), or None for the
            default: dim 0, or the first dim whose shards a DTensor can express. Of a parameter of a million
            elements of which that would pad more than an eighth: the first dim that the ranks divide.
        mp_policy: the dtypes to compute and communicate in.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, their gradients and so the optimizer's state in
            CPU memory.
        ignored_params: parameters to leave as they are: not moved, sharded or reduced.
        dp_mesh_dims: names the data axes of ``mesh``, if parameters are DTensors on the whole of it; forward
            then sees such DTensors.
        shard_optimizer_over_replicate: HFSDP: on an HSDP mesh, shard Parameters and optimizer states over
            replicate x shard, and keep a copy in compute dtype that is sharded over shard only. The copy is
            renewed after each change of the weights, which all ranks must make. Changes through ``.data``,
            the local tensors of ``state_dict()``, or ``torch._foreach_`` functions outside of an optimizer
            are not noticed: call ``torch.autograd.graph.increment_version(parameters)`` after them.
            Parameters without a dim that the number of data ranks divides are sharded as in HSDP.
        block: shards are whole blocks of so many consecutive elements of the flattened parameter, a power of
            two, as optimizers quantize them: 256 for ``optim.local(AdamW8bit, ...)``. See
            ``docs/optimizers.md`` for what that can't be done for. A ``shard_placement_fn`` comes first.

    Returns:
        ``module`` itself, with ``FSDPModule`` added to its class.

    Raises:
        Parallel3dError: ``module`` is no module, a container without a forward, or a unit already, or another
            argument is invalid. Nothing is changed then.
        MeshError: the mesh has no usable axes.
    """
    modules = check_modules(module)
    ignored = check_ignored(ignored_params)
    policy, offload_policy = own_policy(as_instance(mp_policy)), as_instance(offload_policy)
    check_offload(offload_policy)
    offload = CpuOffload(offload_policy) if isinstance(offload_policy, CPUOffloadPolicy) else None
    check_block(block)
    mesh = checked_mesh(mesh)
    axes = data_axes(mesh) if dp_mesh_dims is None else spmd_axes(mesh, dp_mesh_dims)
    if mesh.mesh_dim_names == ("dp_replicate",) and dp_mesh_dims is None and mesh.size() > 1:
        warn_of_replicas()
    managed = managed_params(modules, ignored)
    new = [entry for entry in managed if entry.owner is None]
    requested = requested_placements(
        shard_placement_fn, [(entry.name, entry.param) for entry in new], axes
    )
    if as_bool("shard_optimizer_over_replicate", shard_optimizer_over_replicate):
        if axes.spmd is not None:
            raise Parallel3dError(
                "shard_optimizer_over_replicate=True can't be combined with dp_mesh_dims; give "
                "fully_shard a mesh with the axes replicate and shard, and plain parameters"
            )
        requested = [
            cut_over_replicate(entry.name, entry.param, placement)
            for entry, placement in zip(new, requested, strict=True)
        ]
    all_axes = {axes} | {placement.axes for placement in requested}
    reshard = check_reshard(reshard_after_forward, all_axes)
    tied = [(entry, entry.owner) for entry in managed if entry.owner is not None]
    _check_ties(tied, policy)
    name = type(modules[0]).__name__
    # Not in inference mode: parameters made there could not be trained, and have no versions.
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        for root in modules:
            stack.enter_context(unchanged_on_error(root))
        params = [
            ShardedParam(entry.name, entry.param, entry.places, *placement, block=block)
            for entry, placement in zip(new, requested, strict=True)
        ]
        full = kept_in_full(modules, policy)
        for entry, param in zip(new, params, strict=True):
            # All modules that hold it must be of the policy's: others compute in the unit's dtype.
            param.keeps_dtype = all(id(holder) in full for holder, _ in entry.places) or (
                keeps_its_dtype(policy, entry.name, entry.param)
            )
        buckets = _make_buckets(name, params, policy, offload)
        _move_buffers(modules, mesh.device_type)
        unit = Unit(modules, ParamGroup(buckets), policy, reshard, mesh.device_type)
        set_up_precision(unit)
        for entry, param in zip(new, params, strict=True):
            mark_taken(entry.param, param)  # to find a tied use in another unit
            mark_replaced(entry.param, *entry.places[0], f"{entry.name} of unit {unit.label}")
            param.unit = weakref.ref(unit)
        note_ignored(units_modules(modules), ignored)
        for inner in managed_modules(modules, ignored):  # for dynamo
            vars(inner).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
            if hasattr(type(inner), "resize_token_embeddings"):
                vars(inner)["resize_token_embeddings"] = refuse_resizing
        cast_around(modules, policy)
        for root in modules:
            set_class(root, _extended_class(type(root)))  # type: ignore[arg-type]  # it is hashable
            set_fully_shard_state(root, TorchState(root))
        _join_tied_units(unit, tied)
    for root in modules:
        enter_module_state(root, fully_shard_state(root))  # last, as it is not rolled back
    return module  # type: ignore[return-value]


fully_shard.state = fully_shard_state  # type: ignore[attr-defined]  # torch's has it too


def _make_buckets(
    unit: str,
    params: Sequence[ShardedParam],
    policy: MixedPrecisionPolicy,
    offload: CpuOffload | None,
) -> list[Bucket]:
    """Returns the buckets of a unit, in the order of their first parameters.

    Parameters on meta get other buckets than those with values, as they may get their values one by one.
    Parameters that keep their dtype get buckets whose policy says so.
    """
    kinds = tuple[type[Bucket], MixedPrecisionPolicy, *tuple[object, ...]]
    grouped: dict[kinds, list[ShardedParam]] = {}
    # By ranks, as groups of equal meshes in one process may have different names.
    meshes = {id(param.tp_mesh): param.tp_mesh for param in params}
    ranks = {i: None if m is None else tuple(m.mesh.tolist()) for i, m in meshes.items()}
    for param in params:
        assert param.initial is not None
        kind = HybridBucket if param.axes.over_replicate else Bucket
        if is_extended(param.initial):
            kind = ExtensionBucket
        own = in_own_dtype(policy, param.dtype) if param.keeps_dtype else policy
        dtypes, lies_on = (param.dtype, param.grad_dtype), (ranks[id(param.tp_mesh)], param.axes)
        meta, trained = param.initial.is_meta, param.requires_grad
        key = (kind, own, dtypes, trained, param.num_shards, lies_on, meta)
        grouped.setdefault(key, []).append(param)
    return [
        kind(unit, members, members[0].axes, own, offload)
        for (kind, own, *_), members in grouped.items()
    ]


# Parameters tied across units: an older unit that already has a parameter becomes part of the new one, as if
# their modules had been given in one list. The parameter is then gathered when the first of them runs and
# freed when all have run, and its gradient is reduced once, when all uses have contributed.

_Tied = Sequence[tuple[Managed, ShardedParam]]  # (the parameter in the new unit, in the older one)


def _check_ties(tied: _Tied, policy: MixedPrecisionPolicy) -> None:
    for entry, owner in tied:
        unit = owner.unit()
        start = f"parameter {entry.name} is tied to {owner.name} of unit {unit.label}"
        if unit.policy != policy:
            raise Parallel3dError(
                f"{start}, so the two units become one; but their policies differ ({policy} and "
                f"{unit.policy}): give both the same"
            )
        if guard_of(unit) is not None:
            raise StateError(
                f"{start}, which is updated in backward already; apply fully_shard to both before "
                "optim.step_in_backward"
            )
        if unit.context is not None:
            raise StateError(
                f"{start}, which has run already; apply fully_shard to both before the first forward"
            )


def _join_tied_units(unit: Unit, tied: _Tied) -> None:
    for entry, owner in tied:
        for module, name in entry.places:
            if module._parameters[name] is not owner.sharded:  # else the module is in both units
                holder = holder_of(module)
                owner.put_at([(holder, name)])
                holder[name] = owner.sharded
    for older in dict.fromkeys(owner.unit() for _, owner in tied):
        for module in older.members.detach():
            unit.members.attach(module, unit)
        for param in params_of([older]):
            param.unit = unit.ref
        unit.group.extend(older.group)
        unit.reduce_unused = unit.reduce_unused or older.reduce_unused
        reshard = unit.reshard_after_forward, older.reshard_after_forward
        if reshard[0] != reshard[1]:
            unit.reshard_after_forward = None if None in reshard else False


def _move_buffers(modules: list[nn.Module], device_type: str) -> None:
    """Moves buffers to the mesh's device, except for those on meta, which ``materialize`` fills."""
    device = torch.device(device_type)
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type not in (device.type, "meta"):
                    module._buffers[name] = buffer.to(device)


@cache
def _extended_class(cls: type) -> type:
    namespace = {"__doc__": cls.__doc__, "__module__": cls.__module__}
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
