"""fully_shard: makes a module (or several as one) a unit of the sharding engine."""

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import overload

import torch
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d._arguments import as_bool
from parallel3d._compat import DataParallelMeshDims, TorchMixedPrecisionPolicy, enter_module_state
from parallel3d._replaced import mark_replaced
from parallel3d._rollback import unchanged_on_error
from parallel3d.fsdp.api import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_offload,
    keeps_its_dtype,
    own_policy,
)
from parallel3d.fsdp.buckets.hybrid_bucket import cut_over_replicate
from parallel3d.fsdp.buckets.make_buckets import make_buckets
from parallel3d.fsdp.checks import (
    check_ignored,
    check_modules,
    check_no_spmd,
    check_reshard,
)
from parallel3d.fsdp.group import ParamGroup
from parallel3d.fsdp.managed import managed_modules, managed_params, units_modules
from parallel3d.fsdp.module import FSDPModule
from parallel3d.fsdp.param import ShardedParam, mark_taken
from parallel3d.fsdp.placing.axes import checked_mesh, data_axes
from parallel3d.fsdp.placing.placement_fn import ShardPlacementFn, wishes
from parallel3d.fsdp.placing.spmd import spmd_axes
from parallel3d.fsdp.precision.full_precision import cast_around, kept_in_full
from parallel3d.fsdp.registration import note_ignored, watch_assignments
from parallel3d.fsdp.state import Unit
from parallel3d.fsdp.ties import Tie, check_ties, join
from parallel3d.fsdp.torch_state import register_state, state_of

__all__ = ["fully_shard"]

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
        mesh: axes ``replicate`` and / or ``shard``, and maybe ``tp``, by name: see ``fsdp.placing.axes``.
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
            forward sees them so. See ``fsdp.placing.spmd``.
        shard_optimizer_over_replicate: HFSDP: on an HSDP mesh, shard what the optimizer sees over replicate x
            shard, and keep a copy in compute dtype that is sharded over shard, renewed once after each
            change of the weights, which all ranks must make. What goes through ``.data``, through the
            local tensors of ``state_dict()``, or through ``torch._foreach_`` functions outside of an
            optimizer, is not seen: call ``torch.autograd.graph.increment_version(parameters)`` after it.
            Parameters of which no dim divides by all data ranks stay as they are. See
            ``fsdp.buckets.hybrid_bucket``.

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
    mesh = checked_mesh(mesh)
    axes = data_axes(mesh) if dp_mesh_dims is None else spmd_axes(mesh, dp_mesh_dims)
    managed = list(managed_params(modules, ignored))
    found = [each for each in managed if each.owner is None]
    wanted = wishes(shard_placement_fn, [(each.name, each.param) for each in found], axes)
    if as_bool("shard_optimizer_over_replicate", shard_optimizer_over_replicate):
        check_no_spmd(axes)
        wanted = [
            cut_over_replicate(each.name, each.param, wish)
            for each, wish in zip(found, wanted, strict=True)
        ]
    reshard = check_reshard(reshard_after_forward, {axes} | {wish.axes for wish in wanted})
    ties = [Tie(each.name, each.owner, each.places) for each in managed if each.owner is not None]
    check_ties(ties, policy)
    name = type(modules[0]).__name__
    watch_assignments()
    with ExitStack() as stack, torch.no_grad():
        for root in modules:
            stack.enter_context(unchanged_on_error(root))
        params = [
            ShardedParam(each.name, each.param, each.places, *wish)
            for each, wish in zip(found, wanted, strict=True)
        ]
        full = kept_in_full(modules, policy)
        for each, sharded in zip(found, params, strict=True):
            # One that others hold too can't: they could not compute with it.
            sharded.keeps_dtype = all(id(holder) in full for holder, _ in each.places) or (
                keeps_its_dtype(policy, each.name, each.param)
            )
        buckets = make_buckets(name, params, policy, offload_policy)
        _move_buffers(modules, mesh.device_type)
        unit = Unit(modules, ParamGroup(buckets), policy, reshard, mesh.device_type)
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
