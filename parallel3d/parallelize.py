"""parallelize: one call from a plain model to a parallel one. The order of the steps is the contract."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d._torch.simulated import ranks_are_simulated
from parallel3d._util.forwards import unchanged_on_error, wrap_forward
from parallel3d._util.units import Units, find_units, of_one_unit
from parallel3d.activations.kinds import (
    Kind,
    check_kind,
    is_offload,
    move_activations,
    name_of,
    recompute_blocks,
)
from parallel3d.audit.training import attach, skeleton_of
from parallel3d.cp.batch import cp_axis
from parallel3d.cp.model import ContextParallel, CpPlan, check_options, plan_cp
from parallel3d.ep.experts import EpPlan, plan_ep, take_rules
from parallel3d.errors import AgreementError, MeshError, Parallel3dError, PlanError, WrongTypeError
from parallel3d.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from parallel3d.fsdp.inspect import (
    as_instance,
    check_block,
    check_param,
    check_policy,
    data_axes,
    strategy_options,
    unit_of,
)
from parallel3d.guards.stalls import say_where_ranks_wait
from parallel3d.guards.timeouts import check_duration
from parallel3d.mesh import check_agreement
from parallel3d.mesh.agreement import name_ranks
from parallel3d.mesh.build import name_axes
from parallel3d.mesh.failures import tells_others
from parallel3d.mesh.joined import expert_view, joined_mesh
from parallel3d.mesh.store import others
from parallel3d.tp import ResolvedPlan, resolve_plan
from parallel3d.tp.resolve import Plan, check_plan_type
from parallel3d.tp.same_batch import check_first_batch
from parallel3d.tp.vocab_parallel.head import chunk_whole_head, find_head, with_loss_parallel

ModelT = TypeVar("ModelT", bound=nn.Module)
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How parameters are sharded: ``parallelize(fsdp=Sharding(...))``.

    Attributes:
        reshard_after_forward: whether blocks are resharded after forward; by default they are. The final norm
            and head never are.
        shard_optimizer_over_replicate: HFSDP: shard parameters at rest and optimizer states over replicate
            too, see ``fully_shard``.
        block: shards are whole blocks of so many elements, as optimizers with quantized states need them: 256
            for torchao's 8-bit AdamW. See ``fully_shard``.
    """

    reshard_after_forward: bool | None = None
    shard_optimizer_over_replicate: bool = False
    block: int | None = None


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What ``parallelize(checks=Checks(...))`` checks, and how.

    Attributes:
        strict: whether a plan's rule that matches nothing is an error.
        same_batch: check, in the first training forward, that the ranks of each tp group have the same batch;
            ``tp.check_same_batch`` checks every forward.
        audit: compare the first training step with the plain computation, unit by unit, on its batch and
            device, and raise AuditError on all ranks if something differs (``docs/audit.md``). None compares
            if cp or ep is larger than 1, or if tp is and the plan is not ``"auto"`` or was not proven whole.
        example: ``(args, kwargs)`` of a small batch for the model's forward. It serves to derive or check a
            plan and to find modules that mix positions; needed if no input can be guessed.
        timeout: how long ranks wait for a rank that has not called yet, say because it still loads its model;
            by default the process group's timeout. After 30 s a rank prints which ranks are missing.
    """

    strict: bool = True
    same_batch: bool = True
    audit: bool | None = None
    example: Any = None
    timeout: timedelta | None = None


_CHECKS = Checks()
_RENAMED = {"check_same_batch": "same_batch"}


def _with_old(
    fsdp: Any, checks: Any, old: Mapping[str, Any]
) -> tuple[bool | ShardingStrategy, Sharding, Checks]:
    """Returns (``fsdp`` as a bool or ShardingStrategy, the ``Sharding``, the ``Checks``). ``old``: arguments
    of earlier versions, which are now fields of these two; each gets a DeprecationWarning."""
    sharding = fsdp if isinstance(fsdp, Sharding) else Sharding()
    if not isinstance(checks, Checks):
        raise Parallel3dError(f"checks is {checks!r}; it must be a parallel3d.Checks")
    known = {each.name: "fsdp=Sharding" for each in fields(Sharding)}
    known |= {each.name: "checks=Checks" for each in fields(Checks)}
    for given, value in old.items():
        name = _RENAMED.get(given, given)
        if name not in known or name == "same_batch" == given:
            near = get_close_matches(given, [*signature(parallelize).parameters, *known], n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise WrongTypeError(f"parallelize has no argument {given!r}{hint}")
        warnings.warn(
            f"parallelize({given}=...) is now parallelize({known[name]}({name}=...))",
            DeprecationWarning,
            stacklevel=4,
        )
        if known[name] == "fsdp=Sharding":
            sharding = replace(sharding, **{name: value})
        else:
            checks = replace(checks, **{name: value})
    return True if isinstance(fsdp, Sharding) else fsdp, sharding, checks


@tells_others
def parallelize(
    model: ModelT,
    mesh: DeviceMesh,
    tp_plan: Plan | None = None,
    fsdp: bool | ShardingStrategy | Sharding = True,
    *,
    units: Sequence[str] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    activation_checkpointing: Kind = False,
    compile: bool | str = False,
    loss_parallel: bool | str = False,
    context_parallel: str | ContextParallel | None = None,
    axes: Mapping[str, str] | None = None,
    checks: Checks = _CHECKS,
    engine: Literal["parallel3d", "torch"] = "parallel3d",
    memory: Literal["on demand", "static"] = "on demand",
    **old: Any,
) -> ModelT:
    """Makes ``model`` train with tensor, expert and context parallelism, FSDP and HSDP on ``mesh``.

    validate -> tensor parallel -> expert parallel -> context parallel -> activation checkpointing -> compile
    per unit -> shard the units bottom-up -> root. A model on the meta device stays there; initialize it with
    ``materialize``.

    Args:
        model: a plain module; changed in place.
        mesh: from ``build_mesh``: axes ``replicate``, ``shard``, ``cp``, ``tp``, or ``dp_replicate`` and
            ``dp_shard``. Parameters lie on ``mesh.joined.joined_mesh(mesh)``, where shard and cp are one.
        tp_plan: pattern -> style, see ``parallel3d.tp.resolve_plan``, or ``"auto"``: the model's own plan
            (Hugging Face's models have one) or one derived from it, see ``parallel3d.tp.auto_plan``.
            Required if tp > 1. On a mesh with ep the modules that hold experts are found, and divided over ep
            instead of tp; ``parallel3d.ep.Experts()`` as a rule names others.
        fsdp: False asserts that gradients need no reduction: replicate = shard = cp = 1. A ``Sharding`` has
            more to say. A ``ShardingStrategy`` of FSDP1 must fit the mesh, and says whether blocks are
            resharded after forward.
        units: names (with wildcards) of the blocks to shard one by one; by default the members of the
            model's outermost ``nn.ModuleList`` s, and of an ``nn.ModuleDict`` of one class, and blocks in
            numbered attributes. Of several levels, ``["layers.*", "layers.*.experts"]``, the outermost are
            the blocks; the others are units inside them, which are gathered and freed by themselves.
            ``"!embed"`` leaves a module in the root that would be, or be in, a unit: an embedding, the final
            norm, the head, a block. Alone, ``["!embed", "!head"]``, the blocks are those by default.
        mp_policy: dtypes of computing and reducing.
        activation_checkpointing: True: recompute each block in backward. ``"selective"``: but for matmuls,
            attention and the collectives of tp and cp, which are kept; a policy function, torch's
            ``(ctx, op, *args, **kwargs) -> CheckpointPolicy``: but for what it names, and collectives.
            ``"offload"``, or ``ActivationOffload`` with its settings: keep what blocks save in the CPU's
            memory until their backward. See ``docs/activations.md``.
        compile: True, or the name of a ``torch.compile`` backend: compile each block; its graph breaks
            at units inside it.
        loss_parallel: True: the output head leaves its logits sharded over tp, as ``tp.VocabLogits``, which
            ``F.cross_entropy`` takes as they are; everything else gets them gathered. The model's code stays
            as it is, and the loss is whole. ``"chunked"``: in training the loss computes the logits of some
            tokens at a time, and again in backward; also without tp.
        context_parallel: with cp > 1, the kind of attention: ``"ulysses"``, ``"gather"``, ``"ring"``, or by
            default ``"auto"``, which picks by heads, length and bytes (``p3d.cp.summary`` says why); or a
            ``p3d.cp.ContextParallel``. Batches must go through ``p3d.cp.shard_batch``.
        axes: names of another mesh -> ours: ``{"data_parallel": "shard", "tensor_parallel": "tp"}``.
        checks: what is checked, and by which example.
        engine: ``"torch"``: the same by torch's ``fully_shard`` and ``parallelize_module``, to compare with,
            or as a way out. What they can't do is an error.
        memory: ``"static"``: buffers of gathers and reductions are allocated once, at fixed addresses, in the
            first forward; blocks share them in turn (``docs/engine.md``). By default each is allocated while
            it is used.
        old: fields of ``Sharding`` and ``Checks``, and ``check_same_batch``, which were arguments: each a
            DeprecationWarning with what to write.

    Returns:
        ``model`` itself.

    Raises:
        Parallel3dError, PlanError, MeshError: an argument is invalid; the model is unchanged.
        AgreementError: the ranks were given different models (sizes, or values unless on meta), plans
            or options.
    """
    policy = as_instance(MixedPrecisionPolicy if mp_policy is None else mp_policy)
    fsdp, sharding, checks = _with_old(fsdp, checks, old)
    over_replicate, timeout = sharding.shard_optimizer_over_replicate, checks.timeout
    switches: dict[str, Any] = {
        "strict": checks.strict,
        "shard_optimizer_over_replicate": over_replicate,
        "check_same_batch": checks.same_batch,
    }
    shard: Callable[..., Any] = fully_shard
    plan, found, settings, reshard = None, Units([], [], [], []), {}, True
    problem: Exception | None = None
    whole = mesh
    cp_plan: CpPlan | None = None
    ep_plan: EpPlan | None = None
    audit = False
    try:
        # The mesh first: joining shard and cp may make process groups, for which all ranks are needed.
        if not isinstance(mesh, DeviceMesh):
            raise MeshError(f"mesh is {mesh!r}; it must be a DeviceMesh, as build_mesh makes")
        whole = name_axes(mesh, axes)
        mesh = joined_mesh(whole)
        check_duration("timeout", timeout, or_none=True)
        _check_model(model)
        _check_switches(**switches, audit=checks.audit is not None and checks.audit)
        _check_compile(compile)
        if memory not in ("on demand", "static"):
            raise Parallel3dError(f"memory is {memory!r}; it must be 'on demand' or 'static'")
        check_block(sharding.block)
        other = _other_engine(engine, sharding, loss_parallel, memory)
        check_kind(activation_checkpointing, engine)
        if not isinstance(loss_parallel, bool) and loss_parallel != "chunked":
            raise Parallel3dError(
                f'loss_parallel is {loss_parallel!r}; it must be True, False or "chunked"'
            )
        _check_options(whole, tp_plan, fsdp, policy)
        cp_options = check_options(context_parallel)
        reshard = _reshard(mesh, fsdp, sharding.reshard_after_forward)
        tp_plan, declared = take_rules(tp_plan)
        ep_plan = plan_ep(model, expert_view(whole), declared)
        if tp_plan is not None:  # with tp = 1 too: a wrong plan is wrong on every mesh
            tp = data_axes(mesh).size(data_axes(mesh).tp)
            plan = resolve_plan(model, tp_plan, tp, strict=checks.strict, example=checks.example)
            plan = plan if ep_plan is None else ep_plan.without_experts(plan)
        if cp_axis(whole) is not None:
            cp_plan = plan_cp(model, cp_options, checks.example)
            _check_compiled_selection(whole, compile, activation_checkpointing)
        found = find_units(model, units)
        if ep_plan is not None:
            found = found.with_inner(ep_plan.modules)
        plan = _plan_loss(model, plan, found, loss_parallel)
        _check_chunks(plan, found, compile)
        if other is not None:
            shard, plan = other.prepare(model, plan, found.modules, mesh, policy)
        else:
            shard = functools.partial(
                fully_shard,
                mesh=mesh,
                mp_policy=policy,
                shard_optimizer_over_replicate=over_replicate,
                block=sharding.block,
            )
        settings = _settings(model, plan, found, whole, policy)
        switches |= {"context_parallel": cp_options} if cp_plan is not None else {}
        switches |= {"ep": ep_plan.view.ep.size()} if ep_plan is not None else {}
        split = plan is not None and plan.tp_size > 1
        unproven = split and (isinstance(tp_plan, Mapping) or bool(plan and plan.unchecked))
        by_default = cp_plan is not None or ep_plan is not None or unproven
        audit = (by_default if checks.audit is None else checks.audit) and other is None
        switches |= {
            "fsdp": bool(fsdp),
            "reshard_after_forward": reshard,
            "activation_checkpointing": name_of(activation_checkpointing),
            "audit": audit,
            "compile": compile,
            "loss_parallel": loss_parallel,
            "engine": engine,
            "memory": memory,
            "block": sharding.block,
        }
        settings |= {k: str(v) for k, v in switches.items()}
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        if not dist.is_initialized():
            raise
        problem = error
    _compare_ranks(mesh, settings, problem, timeout if isinstance(timeout, timedelta) else None)
    say_where_ranks_wait()
    _log(whole, switches, found, plan, cp_plan)
    warning = of_one_unit(model, found) if data_axes(mesh).data_size > 1 else ""
    if warning and (ranks_are_simulated() or dist.get_rank() == int(mesh.mesh.flatten()[0])):
        warnings.warn(warning, stacklevel=2)
    blocks = [block for _, block in found.blocks]
    skeleton = skeleton_of(model) if audit else None
    with unchanged_on_error(model):
        # Tensor parallelism first: what it leaves on each rank is what the engine shards.
        if plan is not None:
            plan.apply(model, mesh)
        if ep_plan is not None:
            axes_by_role = data_axes(mesh)
            tp_alone = axes_by_role.size(axes_by_role.tp) == 1
            ep_plan.apply(None if tp_alone else mesh[(mesh.mesh_dim_names or ())[-1]])
        cp_mesh = cp_axis(whole)
        if cp_plan is not None and cp_mesh is not None:
            cp_plan.apply(model, cp_mesh)
        if loss_parallel == "chunked" and (plan is None or plan.tp_size == 1):
            chunk_whole_head(model, plan)
        # Recompute inside the compiled region, so that the compiler sees both.
        recompute_blocks(blocks, activation_checkpointing)
        # Compile inside the hooks: a unit's gathers and frees stay outside the graph.
        if compile:
            backend = compile if isinstance(compile, str) else "inductor"
            compiled = functools.partial(torch.compile, backend=backend)
            for block in blocks:
                wrap_forward(block, compiled, ("compile", backend))
        # What is moved is what the compiler has decided to save.
        attach_offload = move_activations(blocks, activation_checkpointing)
        # Units bottom-up, so that each takes what no unit inside it has; the root takes the rest.
        for name, module in [*found.inner, *found.blocks]:
            if ep_plan is not None and name in ep_plan.modules:
                # Casts nothing: what the block gives it is what it would have without ep.
                shard(
                    module,
                    mesh=ep_plan.view.data,
                    mp_policy=replace(policy, cast_forward_inputs=False),
                    shard_placement_fn=ep_plan.placement_of,
                    reshard_after_forward=reshard,
                )
            else:
                shard(module, reshard_after_forward=reshard)
        for _, embedding in found.embeddings:
            shard(embedding, reshard_after_forward=True)
            # Its backward doesn't read the table.
            embedding.set_unshard_in_backward(False)  # type: ignore[operator]
        if found.final_norm_and_head:
            # Its backward comes right after its forward: freeing it would only gather it again.
            shard([module for _, module in found.final_norm_and_head], reshard_after_forward=False)
        shard(model, reshard_after_forward=False)
        if memory == "static":
            model.set_static_memory(True)  # type: ignore[operator]
        attach_offload()
        if checks.same_batch and not (plan is not None and plan.takes_rows):
            check_first_batch(model, mesh)
        if skeleton is not None:
            attach(model, skeleton, whole, due=True)
    return model


def _log(
    mesh: DeviceMesh,
    switches: Mapping[str, Any],
    units: Units,
    plan: ResolvedPlan | None,
    cp_plan: CpPlan | None,
) -> None:
    """Logs the decisions of ``parallelize``: one line at level INFO, one for each module at ``DEBUG``."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
    chosen = ", ".join(f"{name}={value}" for name, value in switches.items())
    _LOGGER.info("mesh %s, %d units and the root; %s", sizes, sum(map(bool, units.modules)), chosen)
    if not _LOGGER.isEnabledFor(logging.DEBUG):
        return
    for kind, members in units._asdict().items():
        if members:
            _LOGGER.debug("units, %s: %s", kind, ", ".join(name for name, _ in members))
    if plan is not None:
        _LOGGER.debug("%s", plan)
    if cp_plan is not None:
        calls = (f"{path} ({found[0].kind})" for path, found in cp_plan.attention.items())
        _LOGGER.debug("context parallel %s: %s", cp_plan.options.kind, ", ".join(calls))


def _compare_ranks(
    mesh: Any, settings: dict[str, str], problem: Exception | None, timeout: timedelta | None
) -> None:
    """Compares ``settings``, and whether there is a ``problem``, between the ranks of ``mesh``. Raises
    AgreementError if they differ, else ``problem`` if there is one."""
    ranks = None  # those outside the mesh may do something else
    if isinstance(mesh, DeviceMesh) and not ranks_are_simulated():
        ranks = mesh.mesh.flatten().tolist()
    settings = {"problem": str(problem or "none")} | settings  # first, as the rest may be cut
    try:
        explain = {"values": _other_weights}
        check_agreement("parallelize", settings, timeout=timeout, ranks=ranks, explain=explain)
    except AgreementError as error:
        raise error from problem
    if problem is not None:
        raise problem


def _other_weights(ranks_of: Mapping[str, list[int]]) -> str:
    """Returns the message for ranks whose models have different values: which parameters differ, on which
    ranks. ``ranks_of``: checksums of all parameters, a line each -> the ranks that have them."""
    if len({len(lines.splitlines()) for lines in ranks_of}) > 1:
        return ""  # other models, which the parameters' names show
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


_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule"}


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
        if unit_of(module) is not None or _WRAPPERS & {c.__name__ for c in type(module).__mro__}:
            raise _parallel_already(f"{name or 'it'} is of class {kind}")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise _parallel_already(f"parameter {name} is a DTensor")
        check_param(name, param)
    if next(model.parameters(), None) is None:
        raise Parallel3dError(
            f"{type(model).__name__} has no parameters; there is nothing to shard"
        )


def _parallel_already(why: str) -> Parallel3dError:
    return Parallel3dError(
        f"the model is parallel already: {why}; give parallelize the plain model, once"
    )


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


def _check_compiled_selection(mesh: DeviceMesh, compile: bool | str, kind: Kind) -> None:
    """Raises PlanError for selective recomputation in compiled blocks with both cp and tp: torch's
    partitioner then gives backward other values than forward had, so that gradients are wrong (seen with
    torch 2.13)."""
    names = mesh.mesh_dim_names or ()
    both = all(mesh.size(names.index(axis)) > 1 for axis in ("cp", "tp") if axis in names)
    if compile and both and "tp" in names and not isinstance(kind, bool) and not is_offload(kind):
        raise PlanError(
            f"activation_checkpointing={name_of(kind)!r} of compiled blocks gives wrong gradients where cp "
            "and tp are both more than 1; use activation_checkpointing=True, or leave compile= out"
        )


def _other_engine(engine: str, sharding: Sharding, loss_parallel: bool | str, memory: str) -> Any:
    """Returns the module that implements ``engine="torch"``, None for this library's engine. Raises
    Parallel3dError for options that torch's engine doesn't have."""
    if engine == "parallel3d":
        return None
    if engine != "torch":
        raise Parallel3dError(f'engine is {engine!r}; it must be "parallel3d" or "torch"')
    ours: dict[str, Any] = {
        "shard_optimizer_over_replicate": sharding.shard_optimizer_over_replicate,
        "block": sharding.block,
        "loss_parallel": loss_parallel,
        "memory": memory if memory == "static" else None,
    }
    for name, value in ours.items():
        if value:
            raise Parallel3dError(
                f'{name}={value!r} is not possible with engine="{engine}"; leave it out, or use '
                'engine="parallel3d"'
            )
    return importlib.import_module("parallel3d.integrations.torch_engine")


def _check_chunks(plan: ResolvedPlan | None, found: Units, compile: bool | str) -> None:
    """Raises PlanError for ``chunks`` in a compiled block, whose collectives the compiler orders."""
    if plan is None or not compile:
        return
    for planned in plan.modules:
        if getattr(planned.style, "chunks", 1) > 1 and _block_of(planned.name, found):
            raise PlanError(
                f"{planned.name!r} as {planned.style}: chunks have no effect in a block that is compiled "
                f"(compile={compile!r}); leave chunks= or compile= out"
            )


def _block_of(name: str, units: Units) -> str | None:
    return next((n for n, _ in units.blocks if name == n or name.startswith(f"{n}.")), None)


def _check_options(
    mesh: DeviceMesh,
    tp_plan: Plan | None,
    fsdp: bool | ShardingStrategy,
    policy: MixedPrecisionPolicy,
) -> None:
    if not isinstance(fsdp, (bool, ShardingStrategy)):
        raise Parallel3dError(
            f"fsdp is {fsdp!r}; it must be True, False, a Sharding or a ShardingStrategy"
        )
    check_policy(policy)
    if tp_plan is not None:
        check_plan_type(tp_plan)
    axes = data_axes(mesh)
    names = mesh.mesh_dim_names or ()
    tp, cp = axes.size(axes.tp), mesh.size(names.index("cp")) if "cp" in names else 1
    shard = axes.size(axes.shard) // cp
    if not fsdp and axes.data_size > 1:
        ranks = f"{axes.data_size} {'data ranks' if cp == 1 else 'ranks with other tokens'}"
        by_cp = "" if cp == 1 else f" x cp {cp}"
        raise MeshError(
            f"fsdp is False, but the mesh has {ranks} (replicate {axes.size(axes.replicate)} x shard "
            f"{shard}{by_cp}): gradients would not be reduced. Use fsdp=True, or a mesh with replicate=1, "
            f"shard=1, {'cp=1, ' * (cp > 1)}tp={mesh.size()}"
        )
    if tp > 1 and not tp_plan:
        raise PlanError(
            f"the mesh has tp={tp} but there is no tp_plan: {tp} ranks would do the same work. Give a "
            f"plan, or use shard={shard * tp}, tp=1"
        )


def _reshard(mesh: DeviceMesh, fsdp: bool | ShardingStrategy, given: bool | None) -> bool:
    """Returns ``reshard_after_forward``; Parallel3dError if a ShardingStrategy and ``given`` differ."""
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


def _plan_loss(
    model: nn.Module, plan: ResolvedPlan | None, units: Units, loss_parallel: bool | str
) -> ResolvedPlan | None:
    """Returns ``plan`` with a loss-parallel output head; PlanError if its weight is freed too early."""
    if not loss_parallel or (plan is None and loss_parallel is True):
        return plan  # without tp the logits are whole
    chunked = loss_parallel == "chunked"
    head = find_head(model, plan)
    block = _block_of(head, units)
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
    """Returns what must be equal on all ranks for their collectives to match, as name -> text."""
    first: dict[nn.Parameter, str] = {}
    params = (
        # With its first name, to compare ties too.
        f"{first.setdefault(p, n)} {n} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
        for n, p in model.named_parameters(remove_duplicate=False)
    )
    return {
        "mesh": f"{mesh.mesh_dim_names} {tuple(mesh.shape)}",
        "tp_plan": plan.fingerprint() if plan is not None else "none",
        "parameters": "\n".join(params),
        "values": "\n".join(f"{n} {_checksum(p)}" for n, p in model.named_parameters()),
        "units": repr([[name for name, _ in modules] for modules in units]),
        "mp_policy": repr(policy),
    }


def _checksum(param: nn.Parameter) -> str:
    """Returns the sum of the parameter's bits, to compare ranks by; "meta" if there is nothing to compare."""
    if param.is_meta or others() is None:  # nobody to compare with, and in a dry run no values
        return "meta"
    return str(_sum_of_bits(param.detach()))


def _sum_of_bits(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass around others, such as quantized weights
        return sum(_sum_of_bits(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    data = tensor.contiguous().flatten().view(torch.uint8)
    if data.numel() % 4 == 0:
        data = data.view(torch.int32)
    return int(data.sum())
