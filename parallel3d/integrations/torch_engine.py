"""``parallelize(engine="torch")``: torch's ``fully_shard`` and its own styles in place of ours."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel

from parallel3d._torch.fully_shard import TorchMixedPrecisionPolicy, torch_fully_shard
from parallel3d._torch.simulated import ranks_are_simulated
from parallel3d.errors import MeshError, Parallel3dError, PlanError
from parallel3d.fsdp import MixedPrecisionPolicy
from parallel3d.fsdp.inspect import data_axes
from parallel3d.mesh.joined import expert_view
from parallel3d.tp.plan import PlannedModule, PlannedParam, ResolvedPlan
from parallel3d.tp.resolve import numberless
from parallel3d.tp.styles import (
    Colwise,
    LocalSizes,
    Replicated,
    Rowwise,
    SequenceParallel,
    Style,
    VocabParallel,
)
from parallel3d.tp.styles.attention import NoFastPath
from parallel3d.tp.styles.base import need_per_token
from parallel3d.tp.torch_styles import TorchStyle


def prepare(
    model: nn.Module,
    plan: ResolvedPlan | None,
    units: Sequence[Sequence[nn.Module]],
    mesh: DeviceMesh,
    policy: TorchMixedPrecisionPolicy,
) -> tuple[Callable[..., Any], ResolvedPlan | None]:
    """Returns (torch's ``fully_shard`` for the data axes of ``mesh`` and ``policy``, ``plan`` with torch's
    styles).

    Args:
        model: the root; not changed.
        plan: resolved for ``model``.
        units: the modules of each unit but the root, inner ones before those around them.
        mesh: with axes ``shard`` and perhaps ``replicate`` and ``tp``.

    Raises:
        Parallel3dError, PlanError, MeshError: torch has nothing that does the same, or would fail later.
    """
    shard = _sharding(model, units, mesh, policy)
    if plan is not None:
        plan = _with_torch_styles(plan, model, data_axes(mesh).size(data_axes(mesh).shard))
    return shard, plan


def _sharding(
    model: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    mesh: DeviceMesh,
    policy: TorchMixedPrecisionPolicy,
) -> Callable[..., Any]:
    """Returns torch's ``fully_shard`` for the data axes of ``mesh``, with ``policy`` as torch's class."""
    if ranks_are_simulated():
        raise Parallel3dError(
            "engine=\"torch\": torch's fully_shard can't run on simulated ranks; use real processes"
        )
    axes, view = data_axes(mesh), expert_view(mesh)
    if view is not None:
        raise MeshError(
            f"engine=\"torch\": the mesh has ep={view.ep.size()}, and torch's fully_shard can't average the "
            "gradients of experts, which ep has summed, over other ranks than it reduces them over; use "
            'ep=1, or engine="parallel3d"'
        )
    if axes.shard is None:
        raise MeshError(
            f'engine="torch" needs a mesh with a shard axis, if of one rank; this one has '
            f"{mesh.mesh_dim_names}. build_mesh makes one"
        )
    names: Any = mesh.mesh_dim_names  # data_axes refuses axes without names, unless there is one
    data = mesh
    if names is not None and mesh.ndim > 1:
        replicated = axes.replicate is not None and axes.size(axes.replicate) > 1
        data = (
            mesh[names[axes.replicate], names[axes.shard]]
            if replicated
            else mesh[names[axes.shard]]
        )
    _check_params(model, units)
    return functools.partial(torch_fully_shard, mesh=data, mp_policy=_policy(policy, model))


def _policy(policy: TorchMixedPrecisionPolicy, model: nn.Module) -> TorchMixedPrecisionPolicy:
    """Returns ``policy`` as torch's MixedPrecisionPolicy; raises Parallel3dError for what that can't do."""
    if not isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    torchs = {name: getattr(policy, name) for name in names}
    plain = MixedPrecisionPolicy(**torchs, full_precision_modules=policy.full_precision_modules)
    ours = [name for name in vars(plain) if getattr(policy, name) != getattr(plain, name)]
    if ours:
        raise Parallel3dError(
            f'engine="torch": torch\'s MixedPrecisionPolicy has no {", ".join(ours)}; leave it out, or use '
            'engine="parallel3d"'
        )
    for name, module in model.named_modules():
        if policy.param_dtype is not None and isinstance(module, policy.full_precision_modules):
            raise Parallel3dError(
                f'engine="torch": {name!r} ({type(module).__name__}) would compute in '
                f"{policy.param_dtype}, since torch's MixedPrecisionPolicy has no full_precision_modules; "
                'give full_precision_modules=() if that is meant, or use engine="parallel3d"'
            )
    return TorchMixedPrecisionPolicy(**torchs)


def _check_params(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> None:
    """Raises Parallel3dError for parameters that torch's ``fully_shard`` refuses, at once or in forward."""
    names = {param: name for name, param in model.named_parameters()}
    taken: set[nn.Parameter] = set()
    for unit in (*units, [model]):
        dtypes: dict[Any, str] = {}  # of those that are trained -> the first's name
        for param in (p for module in unit for p in module.parameters()):
            if param in taken:
                continue
            taken.add(param)
            name, why = names[param], ""
            if param.dim() == 0:
                why = "is a scalar; make it a tensor of one element"
            elif not param.is_contiguous():
                why = f"is not contiguous (stride {param.stride()}); make it so"
            if param.requires_grad:
                first = dtypes.setdefault(param.dtype, name)
                if len(dtypes) > 1:
                    others = next(n for n in dtypes.values() if n != first)
                    why = f"is {param.dtype} in one unit with {others} of another dtype; give them one"
            if why:
                raise Parallel3dError(
                    f'engine="torch": parameter {name} {why}, or use engine="parallel3d"'
                )


def _with_torch_styles(plan: ResolvedPlan, model: nn.Module, num_shards: int) -> ResolvedPlan:
    """Returns ``plan`` with torch's styles in place of ours; ``model`` is not changed.

    Modules compute on DTensors and return local tensors, so attributes such as numbers of heads are changed
    as by our styles. A module that our styles keep whole on every rank gets no style.

    Args:
        plan: resolved for ``model``.
        num_shards: ranks of the ``shard`` axis, over which torch splits what tp has left to a rank.

    Raises:
        PlanError: torch has no style for some modules, or can't split their sizes; it names the first of
            them.
    """
    if plan.tp_size == 1:
        return plan
    by_name = dict(model.named_modules(remove_duplicate=False))
    modules: list[PlannedModule] = []
    whole: list[str] = []
    problems: dict[str, str] = {}
    for planned in plan.modules:
        module = by_name[planned.name]
        try:
            style = _torch_style(planned, module)
            if style is None:
                whole += [f"{planned.name}.{p.name}".lstrip(".") for p in planned.params]
                continue
            rules = style.plan(module, plan.tp_size)
            params = tuple(
                replace(p, rule=rules[p.name]) for p in planned.params if p.name in rules
            )
            for param in params:
                _check_sizes(param, plan.tp_size, num_shards)
        except PlanError as error:
            problems.setdefault(
                numberless(planned.name), f"{planned.name!r} as {planned.style}: {error}"
            )
            continue
        traffic = style.traffic(module, plan.tp_size)
        modules.append(replace(planned, style=style, params=params, traffic=traffic))
    if problems:
        first, more = list(problems.values())[:3], len(problems) - 3
        raise PlanError(
            f'engine="torch" can\'t carry out the plan: {"; ".join(first)}'
            f'{f"; and {more} more" if more > 0 else ""}. Change the plan, or use engine="parallel3d"'
        )
    return replace(plan, modules=tuple(modules), unplanned=(*plan.unplanned, *whole))


def _torch_style(planned: PlannedModule, module: nn.Module) -> Style | None:
    """Returns torch's style, in a ``TorchStyle``, that computes the same as the planned one; the planned one
    if it changes no parameter; None if the module needs no style."""
    style = planned.style
    if isinstance(style, (TorchStyle, LocalSizes, NoFastPath)):
        return style
    if style == Replicated():
        return None
    if any(p.rule.packing is not None for p in planned.params):
        raise PlanError(
            "torch splits into equal chunks, not by sections or uneven numbers of heads"
        )
    # Exactly these classes: GroupedKv is a Colwise that keeps whole weights.
    made: ParallelStyle | None = None
    if type(style) is Colwise and style.input != "gathered" and style.chunks == 1:
        made = ColwiseParallel(
            input_layouts=_layout(style.input, style.sequence_dim),
            output_layouts=Replicate() if style.output == "replicate" else Shard(-1),
        )
    elif type(style) is Rowwise:
        made = RowwiseParallel(
            input_layouts=Replicate() if style.input == "replicate" else Shard(-1),
            output_layouts=_layout(style.output, style.sequence_dim),
        )
    elif type(style) is VocabParallel:
        made = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=_layout(style.output, style.sequence_dim)
        )
    elif style in (SequenceParallel(), SequenceParallel(sequence_dim=_dim_of(style))):
        made = TorchSequenceParallel(sequence_dim=_dim_of(style), use_local_output=True)
    elif style == Replicated(tp_grad="partial"):
        # A norm on this rank's heads, which are parts along some dim that it treats by element.
        need_per_token(module)
        made = TorchSequenceParallel(sequence_dim=0, use_local_output=True)
    if made is None:
        raise PlanError(f"torch has no style for it{_instead(style)}")
    return TorchStyle(made)


def _dim_of(style: Style) -> int:
    return style.sequence_dim if isinstance(style, SequenceParallel) else 1


def _layout(name: str, sequence_dim: int) -> Replicate | Shard:
    return Shard(sequence_dim) if name == "sequence" else Replicate()


def _instead(style: Style) -> str:
    """Returns a hint for an error: how to write the plan so that torch has a style for it, or ""."""
    if getattr(style, "input", None) == "gathered":
        return '; give input="sequence" or "replicate", and its module no PrepareInput'
    if getattr(style, "chunks", 1) > 1:
        return "; leave chunks out"
    if isinstance(style, SequenceParallel):
        return "; use SequenceParallel() between modules that split and gather the sequence"
    return ""


def _check_sizes(param: PlannedParam, tp: int, num_shards: int) -> None:
    """Raises PlanError if ranks of ``tp``, and of ``shard`` within these, would get parts of unequal size."""
    placement = param.rule.placement
    if not isinstance(placement, Shard):
        return
    size = param.shape[placement.dim]
    if size % tp:
        raise PlanError(
            f"dim {placement.dim} of {param.name} is {size}, which {tp} tp ranks can't share equally"
        )
    if placement.dim == 0 and (size // tp) % num_shards:
        raise PlanError(
            f"dim 0 of {param.name} is {size}, which {tp} tp x {num_shards} shard ranks can't share equally: "
            "torch's placements would say wrong rows"
        )
