"""A plan, resolved against a model: which module gets which style, checked before anything changes.

A plan is data: ``{"layers.*.attn.wq": "colwise", ...}``. :func:`resolve_plan` is pure and works on
meta models; the :class:`ResolvedPlan` it returns can be printed, compared between ranks,
and applied.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel3d.errors import PlanError
from parallel3d.tp._resolve import Resolution
from parallel3d.tp.apply import apply_plan
from parallel3d.tp.auto import choose
from parallel3d.tp.checks import ParamRule
from parallel3d.tp.chosen import ChosenPlan, Plan, check_plan_type
from parallel3d.tp.heads.align import align_heads
from parallel3d.tp.heads.local_attributes import PlannedAttribute
from parallel3d.tp.report import report
from parallel3d.tp.styles import Style
from parallel3d.tp.styles.traffic import Traffic

__all__ = ["PlannedModule", "PlannedParam", "ResolvedPlan", "resolve_plan"]


@dataclass(frozen=True)
class PlannedParam:
    """One parameter of a planned module.

    Attributes:
        name: in its module, such as ``"weight"``.
        shape: of the plain model's parameter.
        rule: its placement on ``tp`` and what its gradient is.
    """

    name: str
    shape: tuple[int, ...]
    rule: ParamRule

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of the largest part a rank holds."""
        if not isinstance(self.rule.placement, Shard):
            return self.shape
        dim, packing = self.rule.placement.dim, self.rule.packing
        rows = -(-self.shape[dim] // tp) if packing is None else max(packing.lengths)
        return (*self.shape[:dim], rows, *self.shape[dim + 1 :])


@dataclass(frozen=True)
class PlannedModule:
    """One module with a style.

    Attributes:
        name: its path in the model; ``""`` is the root.
        pattern: the plan's key that matched it.
        style: what it gets.
        params: its own parameters, in its order.
        why: where the rule comes from, when it isn't the user's.
        traffic: what it communicates for each token.
        itemsize: bytes of an element of its parameters, or of the model's.
    """

    name: str
    pattern: str
    style: Style
    params: tuple[PlannedParam, ...]
    why: str = ""
    traffic: tuple[Traffic, ...] = ()
    itemsize: int = 4


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan that fits a model. Holds no module, so it can be applied to a copy of the model too.

    Attributes:
        tp_size: ranks of the ``tp`` axis it was resolved for.
        modules: the modules with a style, in the model's order.
        unplanned: names of the parameters no style has; they stay plain tensors, whole on every
            rank.
        notes: what the resolution did that the plan doesn't say.
        attributes: what numbers that modules keep, such as of heads, become on each rank.
        unchecked: what of a plan that the user wrote could not be checked, a line each.
    """

    tp_size: int
    modules: tuple[PlannedModule, ...]
    unplanned: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    attributes: tuple[PlannedAttribute, ...] = ()
    unchecked: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Text that is equal on two ranks exactly when they would do the same."""
        lines = [f"tp {self.tp_size}"]
        for m in self.modules:
            params = ", ".join(f"{p.name} {p.shape} {p.rule}" for p in m.params)
            lines.append(f"{m.name}: {m.style!r} [{params}]")
        lines += [f"{a.module}.{a.name} = {a.values}" for a in self.attributes]
        return "\n".join(lines)

    def __str__(self) -> str:
        return report(self)

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Makes ``model`` tensor-parallel in place, and returns it.

        Each distinct parameter of the plan becomes one DTensor on the ``tp`` axis, marked with its
        ``ParamLayout``; modules that share a parameter go on sharing it. The forwards expect local
        tensors as parameters, which the engine gives them. Nothing is done on an axis of one rank.

        Args:
            mesh: a DeviceMesh with an axis named ``tp``.

        Raises:
            MeshError: no ``tp`` axis, or not of ``tp_size`` ranks.
            PlanError: ``model`` is not the one (or a copy of it) the plan was resolved for.
        """
        return apply_plan(self, model, mesh)


def resolve_plan(
    model: nn.Module, plan: Plan, tp_size: int, *, strict: bool = True, example: Any = None
) -> ResolvedPlan:
    """Resolves ``plan`` against ``model`` for ``tp_size`` ranks; changes nothing.

    Args:
        model: a plain model, possibly on the meta device.
        plan: pattern -> style or style name. A pattern is the path of a module, or of a parameter
            (its own name without wildcards) whose module has a style that takes rules for parameters.
            In it ``*`` stands for any characters within one segment (also ``?`` and ``[...]``) and
            ``{q,k,v}_proj`` for three names; ``""`` is the root. ``"auto"``: the plan
            :func:`auto_plan` finds.
        tp_size: ranks of the ``tp`` axis.
        strict: a rule that matches nothing is an error; otherwise a note of the result.
        example: ``(args, kwargs)`` of a small batch for the model's forward, where no input can be guessed.
            A plan that you write is checked by running the model once without weights, and comparing
            attention layers with themselves split, see ``docs/tensor_parallel.md``.

    Raises:
        PlanError: lists everything that is wrong: unmatched rules, two rules on one module, styles
            that don't fit their module, sizes that can't be shared by ``tp_size`` ranks, shared
            parameters split in two ways, layers that don't compute on parts what they do on the whole, a
            split weight that is read outside its module, a model that is parallel already, an empty plan.
    """
    check_plan_type(plan)
    if type(tp_size) is not int or tp_size < 1:
        raise PlanError(f"tp_size {tp_size!r}: an axis has at least one rank, as an int")
    parallel = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    if parallel:
        raise PlanError(
            f"the model is parallel already: {parallel[0]} is a DTensor "
            f"({len(parallel)} parameters are); plans are for plain models"
        )
    chosen = choose(model, tp_size, example) if isinstance(plan, str) else ChosenPlan(plan)
    resolution = Resolution(model, tp_size)
    resolution.notes += chosen.notes
    resolution.add_plan(chosen, strict=strict and not chosen.source)
    resolution.add_tied_embeddings()
    resolution.leave_fast_paths()
    align_heads(resolution)
    rules = resolution.rules()
    resolution.add_attributes(rules)
    resolution.check_as_a_whole(rules)
    unchecked: list[str] = []
    if not resolution.problems and not chosen.source:
        # Here, as in auto.py. A plan found for the user has been proven, or is right for its family.
        from parallel3d.tp.derive.check import check_groups

        unchecked = check_groups(model, resolution, rules, example)
    if resolution.problems:
        listed = "".join(f"\n  - {problem}" for problem in resolution.problems)
        count = len(resolution.problems)
        raise PlanError(f"{count} problem{'s'[: count > 1]} in the tensor-parallel plan:{listed}")

    modules = tuple(
        PlannedModule(
            ruled.name,
            ruled.pattern,
            ruled.style,
            tuple(
                PlannedParam(name, tuple(ruled.module._parameters[name].shape), rule)  # type: ignore[union-attr]
                for name, rule in rules[key].items()
            ),
            ruled.why,
            ruled.style.traffic(ruled.module, tp_size) if tp_size > 1 else (),
            _itemsize(ruled.module, model),
        )
        for key, ruled in resolution.ruled_in_order()
    )
    return ResolvedPlan(
        tp_size,
        modules,
        tuple(resolution.unplanned(rules)),
        tuple(resolution.notes),
        tuple(resolution.attributes),
        tuple(unchecked),
    )


def _itemsize(module: nn.Module, model: nn.Module) -> int:
    """Bytes of an element of what ``module`` computes, as its parameters say or else the model's."""
    for param in chain(module.parameters(), model.parameters()):
        if param.is_floating_point():
            return param.dtype.itemsize
    return 4
