"""Preflight: what ``parallelize`` checks before it changes the model, on this rank and between ranks."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d import _dry_run
from parallel3d._compat_simulated import ranks_are_simulated
from parallel3d._units import Units, find_units, of_one_unit
from parallel3d.errors import AgreementError, MeshError, Parallel3dError, PlanError
from parallel3d.fsdp import MixedPrecisionPolicy
from parallel3d.fsdp.api import check_policy
from parallel3d.fsdp.checks import check_param
from parallel3d.fsdp.placing.axes import data_axes
from parallel3d.fsdp.running.members import unit_of
from parallel3d.fsdp.strategy import ShardingStrategy, strategy_options
from parallel3d.mesh import check_agreement
from parallel3d.mesh.axis_names import name_axes
from parallel3d.mesh.naming import name_ranks
from parallel3d.tp import ResolvedPlan, resolve_plan
from parallel3d.tp.chosen import Plan, check_plan_type
from parallel3d.tp.logits.head import find_head, with_loss_parallel

__all__ = ["Plan", "preflight"]


def preflight(
    model: nn.Module,
    mesh: DeviceMesh,
    tp_plan: Plan | None,
    units: Sequence[str] | None,
    policy: MixedPrecisionPolicy,
    *,
    fsdp: bool | ShardingStrategy,
    reshard_after_forward: bool | None,
    strict: bool,
    compile: bool | str,
    loss_parallel: bool | str,
    axes: Mapping[str, str] | None,
    example: Any,
    **switches: bool,
) -> tuple[DeviceMesh, ResolvedPlan | None, Units, bool]:
    """Checks the arguments of ``parallelize`` and that all ranks of ``mesh`` gave the same.

    Returns:
        The mesh under our names, the plan and the units, resolved against ``model``, and whether to reshard
        after forward.

    Raises:
        Parallel3dError, PlanError, MeshError, AgreementError: as ``parallelize`` says.
    """
    plan, found, settings, reshard = None, Units([], [], []), {}, True
    problem: Exception | None = None
    try:
        _check_model(model)
        _check_switches(strict=strict, **switches)
        _check_compile(compile)
        _check_loss_parallel(loss_parallel)
        _check_mesh(mesh)
        mesh = name_axes(mesh, axes)
        _check_options(mesh, tp_plan, fsdp, policy)
        reshard = _reshard(mesh, fsdp, reshard_after_forward)
        plan = _resolve(model, mesh, tp_plan, strict, example)
        found = find_units(model, units)
        plan = _plan_loss(model, plan, found, loss_parallel)
        _check_chunks(plan, found, compile)
        settings = _settings(model, plan, found, mesh, policy)
        switches |= {"fsdp": bool(fsdp), "reshard_after_forward": reshard}
        settings |= {"compile": str(compile), "loss_parallel": str(loss_parallel)}
        settings |= {k: str(v) for k, v in switches.items()}
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        if not dist.is_initialized():
            raise
        problem = error
    try:
        _agree(mesh, {**settings, "problem": str(problem or "none")})
    except AgreementError as error:
        raise error from problem
    if problem is not None:
        raise problem
    said = of_one_unit(model, found) if data_axes(mesh).data_size > 1 else ""
    if said and (ranks_are_simulated() or dist.get_rank() == int(mesh.mesh.flatten()[0])):
        warnings.warn(said, stacklevel=3)
    return mesh, plan, found, reshard


def _agree(mesh: DeviceMesh, settings: dict[str, str]) -> None:
    """Compares with the other ranks of ``mesh``; those outside it may do something else."""
    ranks = None
    if isinstance(mesh, DeviceMesh) and not ranks_are_simulated():
        ranks = mesh.mesh.flatten().tolist()
    check_agreement("parallelize", settings, ranks=ranks, explain={"values": _other_weights})


def _other_weights(ranks_of: Mapping[str, list[int]]) -> str:
    """What to say where ranks have models of other values: which parameters, on which ranks."""
    if len({len(lines.splitlines()) for lines in ranks_of}) > 1:
        return ""  # other models; the parameters' names say so
    tables = [lines.splitlines() for lines in ranks_of]
    differ = [lines[0].split(" ")[0] for lines in zip(*tables, strict=True) if len(set(lines)) > 1]
    world = sum(map(len, ranks_of.values()))
    common = max(ranks_of.values(), key=len)
    odd = [rank for ranks in ranks_of.values() if ranks is not common for rank in ranks]
    who = f"{len(ranks_of)} models on {world} ranks"
    if 2 * len(common) > world:
        who = f"{name_ranks(odd)} differ{'s' * (len(odd) == 1)} from the majority"
    return (
        f"the initial weights differ between ranks, first {differ[0]!r}, in {len(differ)} of "
        f"{len(tables[0])} parameters: {who}. Give all ranks the same: torch.manual_seed(seed), one "
        "seed for all, before the model is built; or build it on the meta device, and call "
        "p3d.materialize(model, seed=...) after parallelize"
    )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise Parallel3dError(f"model is {model!r}; it must be an nn.Module")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise Parallel3dError(
                f"{name or 'the model'} is a {kind}, whose parameters can't be replaced; give "
                "parallelize the nn.Module it was scripted from"
            )
        if unit_of(module) is not None or kind in _WRAPPERS or _is_torch_fsdp(module):
            raise Parallel3dError(
                f"the model is parallel already: {name or 'it'} is a {kind}; give parallelize the plain "
                "model, once"
            )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise Parallel3dError(
                f"the model is parallel already: parameter {name} is a DTensor; give parallelize the "
                "plain model, once"
            )
        check_param(name, param)
    if not any(True for _ in model.parameters()):
        raise Parallel3dError(
            f"{type(model).__name__} has no parameters; there is nothing to shard"
        )


_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def _is_torch_fsdp(module: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _check_switches(**switches: bool) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise Parallel3dError(f"{name} is {value!r}; it must be True or False")


def _check_compile(value: bool | str) -> None:
    if isinstance(value, bool):
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    if value not in backends:
        raise Parallel3dError(
            f"compile is {value!r}; it must be True, False or a backend of torch.compile: "
            f"{', '.join(backends)}"
        )


def _check_chunks(plan: ResolvedPlan | None, found: Units, compile: bool | str) -> None:
    """Refuses overlap that wouldn't take place: a compiler orders the collectives of a block itself."""
    if plan is None or not compile:
        return
    blocks = [name for name, _ in found.blocks]
    for planned in plan.modules:
        if getattr(planned.style, "chunks", 1) == 1:
            continue
        if any(planned.name == name or planned.name.startswith(f"{name}.") for name in blocks):
            raise PlanError(
                f"{planned.name!r} as {planned.style}: chunks have no effect in a block that is compiled "
                f"(compile={compile!r}); leave chunks= or compile= out"
            )


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh is {mesh!r}; it must be a DeviceMesh, as build_mesh makes")


def _check_options(
    mesh: DeviceMesh,
    tp_plan: Plan | None,
    fsdp: bool | ShardingStrategy,
    policy: MixedPrecisionPolicy,
) -> None:
    if not isinstance(fsdp, (bool, ShardingStrategy)):
        raise Parallel3dError(f"fsdp is {fsdp!r}; it must be True, False or a ShardingStrategy")
    check_policy(policy)
    if tp_plan is not None:
        check_plan_type(tp_plan)
    axes = data_axes(mesh)
    tp = axes.size(axes.tp)
    if not fsdp and axes.data_size > 1:
        raise MeshError(
            f"fsdp=False with {axes.data_size} data ranks (replicate {axes.size(axes.replicate)} x shard "
            f"{axes.size(axes.shard)}): gradients would not be reduced. Use fsdp=True, or a mesh with "
            f"replicate=1, shard=1, tp={mesh.size()}"
        )
    if tp > 1 and not tp_plan:
        raise PlanError(
            f"the mesh has tp={tp} but there is no tp_plan: {tp} ranks would do the same work. Give a "
            f"plan, or use shard={axes.size(axes.shard) * tp}, tp=1"
        )


def _reshard(mesh: DeviceMesh, fsdp: bool | ShardingStrategy, given: bool | None) -> bool:
    """``reshard_after_forward``, which a ShardingStrategy says too."""
    if given is not None:
        _check_switches(reshard_after_forward=given)
    if isinstance(fsdp, bool):
        return True if given is None else given
    wanted: bool = strategy_options(fsdp, mesh)["reshard_after_forward"]
    if given is not None and given != wanted:
        raise Parallel3dError(
            f"reshard_after_forward is {given} and fsdp is {fsdp.name}, which means {wanted}; leave one out"
        )
    return wanted


def _resolve(
    model: nn.Module, mesh: DeviceMesh, tp_plan: Plan | None, strict: bool, example: Any
) -> ResolvedPlan | None:
    """The plan against this model. With tp = 1 too: a wrong plan is wrong on every mesh."""
    if tp_plan is None:
        return None
    axes = data_axes(mesh)
    return resolve_plan(model, tp_plan, axes.size(axes.tp), strict=strict, example=example)


def _check_loss_parallel(value: bool | str) -> None:
    if not isinstance(value, bool) and value != "chunked":
        raise Parallel3dError(f'loss_parallel is {value!r}; it must be True, False or "chunked"')


def _plan_loss(
    model: nn.Module, plan: ResolvedPlan | None, units: Units, loss_parallel: bool | str
) -> ResolvedPlan | None:
    """The plan with its output head under loss parallel."""
    if not loss_parallel or (plan is None and loss_parallel is True):
        return plan  # without tp logits are whole
    chunked = loss_parallel == "chunked"
    head = find_head(model, plan)
    block = next((n for n, _ in units.blocks if head == n or head.startswith(f"{n}.")), None)
    if chunked and block is not None:
        raise PlanError(
            f'loss_parallel="chunked": the output head {head!r} lies in the block {block!r}, which frees '
            "its weight before the loss reads it; leave it out of the units, or use loss_parallel=True"
        )
    return None if plan is None else with_loss_parallel(plan, model, chunked=chunked)


def _settings(
    model: nn.Module,
    plan: ResolvedPlan | None,
    units: Units,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> dict[str, str]:
    """What must be alike on all ranks for their collectives to match."""
    first: dict[nn.Parameter, str] = {}
    params = (
        # With the name it goes by first, so that ties show.
        f"{first.setdefault(p, n)} {n} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
        for n, p in model.named_parameters(remove_duplicate=False)
    )
    named = [[name for name, _ in kind] for kind in (units.blocks, units.embeddings, units.tail)]
    return {
        "mesh": f"{mesh.mesh_dim_names} {tuple(mesh.shape)}",
        "tp_plan": plan.fingerprint() if plan is not None else "none",
        "parameters": "\n".join(params),
        "values": "\n".join(f"{n} {_checksum(p)}" for n, p in model.named_parameters()),
        "units": repr(named),
        "mp_policy": repr(policy),
    }


def _checksum(param: nn.Parameter) -> str:
    """Tells ranks that built their models from different seeds. A sum of bits, so order is no matter."""
    if param.is_meta or ranks_are_simulated() or _dry_run.active():
        return "meta"  # or without values
    data = param.detach().contiguous().flatten().view(torch.uint8)
    if data.numel() % 4 == 0:
        data = data.view(torch.int32)
    return str(int(data.sum()))
