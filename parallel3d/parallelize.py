"""parallelize: one call from a plain model to a parallel one. The order of the steps is the contract."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from parallel3d._rollback import unchanged_on_error
from parallel3d._units import Units, find_units
from parallel3d.errors import AgreementError, MeshError, Parallel3dError, PlanError
from parallel3d.fsdp import MixedPrecisionPolicy, fully_shard
from parallel3d.fsdp.axes import data_axes
from parallel3d.fsdp.state import unit_of
from parallel3d.mesh import check_agreement
from parallel3d.tp import ResolvedPlan, Style, resolve_plan

__all__ = ["parallelize"]

ModelT = TypeVar("ModelT", bound=nn.Module)
Plan = Mapping[str, str | Style]


def parallelize(
    model: ModelT,
    mesh: DeviceMesh,
    tp_plan: Plan | None = None,
    fsdp: bool = True,
    *,
    units: Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    activation_checkpointing: bool = False,
    compile: bool | str = False,
    strict: bool = True,
) -> ModelT:
    """Makes ``model`` train with tensor parallelism, FSDP and HSDP on ``mesh``.

    validate -> tensor parallel -> activation checkpointing -> compile per unit -> shard the units
    bottom-up -> root. A model on the meta device stays there; give it values with ``materialize``.

    Args:
        model: a plain module; changed in place.
        mesh: from ``build_mesh``: axes ``replicate``, ``shard``, ``tp``.
        tp_plan: pattern -> style, see ``parallel3d.tp.resolve_plan``. Needed where tp > 1.
        fsdp: False says that the mesh has no data axes: replicate = shard = 1.
        units: names (with wildcards) of the blocks to shard one by one; by default the members of the
            model's outermost ``nn.ModuleList`` s.
        mp_policy: dtypes of computing and reducing.
        reshard_after_forward: whether blocks are freed after forward. The final norm and head never are.
        activation_checkpointing: recompute each block's activations in backward.
        compile: True, or the name of a ``torch.compile`` backend: compile each block.
        strict: whether a plan's rule that matches nothing is an error.

    Returns:
        ``model`` itself.

    Raises:
        Parallel3dError, PlanError, MeshError: what was given can't be; the model is unchanged.
        AgreementError: the ranks were given different models, plans or options.
    """
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    problem: Exception | None = None
    plan, found, settings = None, Units([], [], []), {}
    try:
        _check_model(model)
        _check_switches(
            fsdp=fsdp,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            strict=strict,
        )
        _check_compile(compile)
        _check_options(mesh, tp_plan, fsdp, policy)
        plan = _resolve(model, mesh, tp_plan, strict)
        found = find_units(model, units)
        settings = _settings(model, plan, found, mesh, policy)
        settings |= {
            "fsdp": str(fsdp),
            "reshard_after_forward": str(reshard_after_forward),
            "activation_checkpointing": str(activation_checkpointing),
            "compile": str(compile),
        }
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
        if not dist.is_initialized():
            raise
    # Also a rank with an error reports: the others must not wait for it in a collective.
    try:
        check_agreement("parallelize", {**settings, "problem": str(problem or "none")})
    except AgreementError as error:
        raise error from problem
    if problem is not None:
        raise problem

    blocks = [block for _, block in found.blocks]
    with unchanged_on_error(model):
        # Tensor parallelism first: what it leaves on each rank is what the engine shards.
        if plan is not None:
            plan.apply(model, mesh)
        # Recompute inside the compiled region, so that the compiler sees both.
        if activation_checkpointing:
            for block in blocks:
                _set_forward(block, functools.partial(_checkpointed, block.forward))
        # Compile inside the hooks: a unit's gathers and frees stay outside the graph.
        if compile:
            backend = compile if isinstance(compile, str) else "inductor"
            for block in blocks:
                _set_forward(block, torch.compile(block.forward, backend=backend))
        # Units bottom-up, so that each takes what no unit inside it has; the root takes the rest.
        shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
        for block in blocks:
            shard(block, reshard_after_forward=reshard_after_forward)
        for _, embedding in found.embeddings:
            shard(embedding, reshard_after_forward=True)
            # Its backward doesn't read the table.
            embedding.set_unshard_in_backward(False)  # type: ignore[operator]
        if found.tail:
            # Its backward comes right after its forward: freeing it would only gather it again.
            shard([module for _, module in found.tail], reshard_after_forward=False)
        shard(model, reshard_after_forward=False)
    return model


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
        if is_lazy(param):
            raise Parallel3dError(
                f"parameter {name} has no size yet; run a batch through the model before "
                "parallelize, or use the module that is not lazy"
            )
        if param.layout is not torch.strided:
            raise Parallel3dError(
                f"parameter {name} is {param.layout}; the engine takes dense ones: hold it as a "
                "dense parameter (to_dense()), or as a buffer"
            )
        if param.dtype.is_complex:
            raise Parallel3dError(
                f"parameter {name} is {param.dtype}; the engine reduces real dtypes: hold it as two real "
                "parameters (torch.view_as_real)"
            )
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


def _check_options(
    mesh: DeviceMesh, tp_plan: Plan | None, fsdp: bool, policy: MixedPrecisionPolicy
) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh is {mesh!r}; it must be a DeviceMesh, as build_mesh makes")
    if not isinstance(policy, MixedPrecisionPolicy):
        raise Parallel3dError(f"mp_policy is {policy!r}; it must be a MixedPrecisionPolicy")
    if tp_plan is not None and not isinstance(tp_plan, Mapping):
        raise PlanError(
            f"tp_plan is {tp_plan!r}; it must be a dict from module-name patterns to styles, such as "
            '{"layers.*.attention.wq": "colwise"}, or None'
        )
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


def _resolve(
    model: nn.Module, mesh: DeviceMesh, tp_plan: Plan | None, strict: bool
) -> ResolvedPlan | None:
    """The plan against this model. With tp = 1 too: a wrong plan is wrong on every mesh."""
    if tp_plan is None:
        return None
    axes = data_axes(mesh)
    return resolve_plan(model, tp_plan, axes.size(axes.tp), strict=strict)


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
        for n, p in _all_params(model)
    )
    named = [[name for name, _ in kind] for kind in (units.blocks, units.embeddings, units.tail)]
    return {
        "mesh": f"{mesh.mesh_dim_names} {tuple(mesh.shape)}",
        "tp_plan": plan.fingerprint() if plan is not None else "none",
        "parameters": "\n".join(params),
        "units": repr(named),
        "mp_policy": repr(policy),
    }


def _all_params(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def _set_forward(module: nn.Module, forward: Any) -> None:
    module.forward = forward


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
