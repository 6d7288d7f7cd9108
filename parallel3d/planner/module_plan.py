"""What a tensor-parallel plan does to the parameters of an nn.Module, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from parallel3d.errors import Parallel3dError
from parallel3d.tp import ResolvedPlan, auto_plan, resolve_plan
from parallel3d.tp._resolve import RuledModule
from parallel3d.tp.heads.attention import Attention, find_attention
from parallel3d.tp.patterns import numberless
from parallel3d.tp.styles import Colwise, LocalSizes, Rowwise, SequenceParallel, VocabParallel

__all__ = ["ModulePlan", "plan_of"]

_TP_SIZES = (2, 3, 5, 7)
_OF_SEQUENCE = (SequenceParallel, Colwise, Rowwise, VocabParallel)


@dataclass
class ModulePlan:
    """By the parameters' names in the model.

    Attributes:
        dims: the dim that is sharded. heads, kv, partial: as ``Parameter``'s ``heads``, ``kv``,
            ``tp_partial``.
        unplanned: ``tp_partial`` of those that aren't in ``partial``.
        divisible: sizes that only a number of ranks that divides them can share.
        problem: why there is no plan.
    """

    dims: dict[str, int] = field(default_factory=dict)
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)
    kv: set[str] = field(default_factory=set)
    partial: dict[str, str] = field(default_factory=dict)
    unplanned: str = "sequence"
    divisible: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def ready(self) -> bool:
        """Whether there is a plan."""
        return not self.problem


def plan_of(model: nn.Module, tp_plan: Any) -> ModulePlan:
    """Of ``tp_plan``, as ``parallelize`` takes it, for the smallest tensor parallelism that it allows.

    Where none does, the first problem is told.
    """
    if tp_plan is None:
        return ModulePlan(problem="tp_plan is None")
    problem = ""
    for size in _TP_SIZES:
        try:
            rules, strict = tp_plan, tp_plan != "auto"
            if not strict:
                rules = auto_plan(model, size)
            resolved = resolve_plan(model, rules, size, strict=strict)
            # As the plan says it, before attention is fitted to so many ranks.
            return _read(model, resolve_plan(model, rules, 1, strict=False), resolved)
        except Parallel3dError as error:
            problem = problem or str(error)
    return ModulePlan(problem=problem)


def _read(model: nn.Module, plain: ResolvedPlan, fitted: ResolvedPlan) -> ModulePlan:
    first = {id(p): name for name, p in model.named_parameters()}
    found, by_sequence = ModulePlan(), False
    for planned in plain.modules:
        module = model.get_submodule(planned.name)
        for param in planned.params:
            name = first[id(module._parameters[param.name])]
            if isinstance(param.rule.placement, Shard):
                found.dims[name] = param.rule.placement.dim
            elif param.rule.tp_grad == "partial":
                sequence = isinstance(planned.style, _OF_SEQUENCE)
                by_sequence |= sequence
                found.partial[name] = "sequence" if sequence else "always"
    if by_sequence:  # the plan says of which parameters each rank sees a part of the tokens only
        found.unplanned = "never"
    ruled = {}
    for planned in plain.modules:
        module = model.get_submodule(planned.name)
        ruled[id(module)] = RuledModule(planned.name, planned.pattern, planned.style, module)
    for layer in find_attention(ruled, dict(model.named_modules(remove_duplicate=False))):
        _note_heads(found, layer, first)
    for planned in fitted.modules:
        if isinstance(planned.style, LocalSizes):
            module = model.get_submodule(planned.name)
            for name in planned.style.names:
                size = getattr(module, name)
                found.divisible[f"{numberless(planned.name)}.{name}"] = size
    return found


def _note_heads(found: ModulePlan, layer: Attention, first: dict[int, str]) -> None:
    """Of the parameters of an attention layer's projections that are cut between heads."""
    if layer.heads is None or layer.kv_heads is None:
        return
    fused = any(p.role == "fused" for p in layer.projections)
    heads = (layer.kv_heads if fused else layer.heads, layer.kv_heads)
    for projection in layer.projections:
        for param in projection.ruled.module._parameters.values():
            name = first[id(param)] if param is not None else ""
            if name in found.dims:
                found.heads[name] = heads
                if projection.role in ("key", "value"):
                    found.kv.add(name)
