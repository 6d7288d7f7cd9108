"""Applying a resolved plan: parameters become DTensors on ``tp``, modules get their forwards."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Shard

from parallel3d._compat import make_dtensor, make_spec
from parallel3d._compat_simulated import ranks_are_simulated
from parallel3d._layout import local_chunk, set_param_layout
from parallel3d._packed import PackedShard
from parallel3d._replaced import marking_replaced
from parallel3d._rollback import unchanged_on_error
from parallel3d.errors import MeshError, PlanError
from parallel3d.tp.checks import ParamRule
from parallel3d.tp.collectives import TpAxis
from parallel3d.tp.forgotten_parts import watch_forgotten
from parallel3d.tp.forwards import SequenceLength
from parallel3d.tp.random import can_drop, install_random, refuse_later_dropout

if TYPE_CHECKING:
    from parallel3d.tp.plan import ResolvedPlan

__all__ = ["apply_plan"]


def apply_plan(plan: "ResolvedPlan", model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """See :meth:`ResolvedPlan.apply`."""
    axis = _tp_axis(mesh, plan.tp_size)
    modules = _find_modules(plan, model)
    if plan.tp_size == 1:
        return model
    # All new parameters first: if one fails (memory), the model is as it was.
    new: dict[int, nn.Parameter] = {}
    for planned, module in zip(plan.modules, modules, strict=True):
        for p in planned.params:
            old = module._parameters[p.name]
            assert old is not None
            if id(old) not in new:
                new[id(old)] = _distribute(old, p.rule, axis)
    with unchanged_on_error(model), marking_replaced(model):
        # Every owner of a replaced parameter, also those the plan has no style for: ties stay ties.
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and id(param) in new:
                    module._parameters[name] = new[id(param)]
        sequence = SequenceLength()
        for planned, module in zip(plan.modules, modules, strict=True):
            planned.style.install(module, axis, sequence)
        by_name = dict(model.named_modules(remove_duplicate=False))
        for attribute in plan.attributes:
            attribute.set(by_name[attribute.module], axis.rank)
        if can_drop(model):
            install_random(model, {planned.name: planned.style for planned in plan.modules}, axis)
        elif axis.size > 1:
            refuse_later_dropout(model)
        watch_forgotten(model, plan, axis, sequence)
    return model


def _tp_axis(mesh: DeviceMesh, size: int) -> TpAxis:
    names = mesh.mesh_dim_names or ()
    if "tp" not in names:
        raise MeshError(f"the mesh has the axes {names or '(unnamed)'}; tensor parallel needs 'tp'")
    axis = TpAxis(mesh if mesh.ndim == 1 else mesh["tp"])
    if axis.size != size:
        raise MeshError(
            f"the plan was resolved for {size} tp ranks, the mesh has {axis.size}; resolve it again"
        )
    return axis


def _find_modules(plan: "ResolvedPlan", model: nn.Module) -> list[nn.Module]:
    by_name = dict(model.named_modules(remove_duplicate=False))
    found = []
    for planned in plan.modules:
        module = by_name.get(planned.name)
        own = {} if module is None else module._parameters
        fits = module is not None and all(
            (q := own.get(p.name)) is not None and tuple(q.shape) == p.shape for p in planned.params
        )
        if module is None or not fits:
            raise PlanError(
                f"the plan was resolved for another model: module {planned.name!r} is missing here "
                "or has other parameters"
            )
        found.append(module)
    return found


def _distribute(param: nn.Parameter, rule: ParamRule, axis: TpAxis) -> nn.Parameter:
    """The parameter as a DTensor on ``tp``, of which this rank holds its chunk."""
    whole = param.detach()
    if rule.packing is not None:
        local = rule.packing.take(whole, axis.rank)
    elif isinstance(rule.placement, Shard):
        local = local_chunk(whole, rule.placement.dim, axis.size, axis.rank)
    else:
        local = _own_copy(whole)
    placement = rule.placement if rule.packing is None else PackedShard(rule.packing)
    spec = make_spec(axis.mesh, (placement,), param.shape, param.dtype)
    new = nn.Parameter(make_dtensor(local, spec), requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)  # marks people put on parameters, such as "no weight decay"
    set_param_layout(new, rule.layout)
    return new


def _own_copy(whole: Tensor) -> Tensor:
    if not ranks_are_simulated():
        return whole
    # Made by a factory call, the tensor is one per simulated rank.
    return torch.empty(whole.shape, dtype=whole.dtype, device=whole.device).copy_(whole)
