"""A plan, resolved against a model: which module gets which style, checked before anything changes.

A plan is data: ``{"layers.*.attn.wq": "colwise", ...}``. :func:`resolve_plan` is pure and works on
meta models; the :class:`ResolvedPlan` it returns can be printed, compared between ranks,
and applied.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel3d._layout.packed import PackedShard
from parallel3d._layout.param_layout import local_chunk, set_param_layout
from parallel3d._torch.dtensor import make_dtensor, make_spec
from parallel3d._torch.simulated import ranks_are_simulated
from parallel3d._util.replaced_params import marking_replaced
from parallel3d._util.rollback import unchanged_on_error
from parallel3d.errors import MeshError, PlanError, StateError
from parallel3d.tp.auto.derive import choose
from parallel3d.tp.auto.heads import align_heads
from parallel3d.tp.checks import ParamRule
from parallel3d.tp.collectives import SequenceLength, TpAxis
from parallel3d.tp.local_attributes import PlannedAttribute, describe_attributes
from parallel3d.tp.random import can_drop, install_random, refuse_later_dropout
from parallel3d.tp.resolve import ChosenPlan, Plan, Resolution, check_plan_type, numberless
from parallel3d.tp.styles import Style
from parallel3d.tp.styles.base import Traffic

# Modules that the plan forgot, among modules that hold parts of the sequence.
#
# Such a module computes what it would, but its parameters get the gradient of this rank's part
# alone: nothing fails, and the ranks' copies of them drift apart.


def watch_forgotten(
    model: nn.Module, plan: "ResolvedPlan", axis: TpAxis, sequence: SequenceLength
) -> None:
    """Makes modules without a style refuse a part of the sequence in their first forward."""
    splits = [p.style for p in plan.modules if p.style.splits_sequence]
    dims = {getattr(style, "sequence_dim", 1) for style in splits}
    if axis.size == 1 or not dims or not isinstance(axis.rank, int):  # simulated ranks
        return
    modules = dict(model.named_modules())
    for name in {n.rpartition(".")[0] for n in plan.unplanned}:
        if name in modules:
            watch = _Watch(name, axis, sequence, tuple(dims))
            modules[name].register_forward_pre_hook(watch)


class _Watch:
    """The hook. One forward is enough to see a module that always gets parts; in later ones a whole tensor
    may have a part's length by chance."""

    def __init__(
        self, name: str, axis: TpAxis, sequence: SequenceLength, dims: tuple[int, ...]
    ) -> None:
        self.name, self.axis, self.sequence, self.dims = name, axis, sequence, dims
        self.done = False

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:
        if self.done or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.done = True
        own = module.parameters(recurse=False)
        if self.sequence.length is None or not any(p.requires_grad for p in own):
            return
        for x in args[:1]:
            if isinstance(x, Tensor) and x.is_floating_point():
                self._check(x)

    def _check(self, x: Tensor) -> None:
        length, axis = self.sequence.length, self.axis
        assert length is not None
        rows = axis.rows(length)
        for dim in self.dims:
            # The last dim is of features.
            if length > 1 and 0 <= dim < x.dim() - 1 and x.shape[dim] == rows:
                self.done = False
                raise StateError(
                    f"{self.name!r} has no style in the plan, but its input {tuple(x.shape)} looks like "
                    f"this rank's part of a sequence of {length}: its parameters would get the gradient "
                    'of that part alone. Give it SequenceParallel() or Replicated(tp_grad="partial"); or '
                    "Replicated(), if its input is whole"
                )


# Applying a resolved plan: parameters become DTensors on ``tp``, modules get their forwards.


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


# Report: a resolved plan as a table to read before training.

_HEADER = ("module", "style", "parameters, whole -> on a rank", "forward", "backward", "why")


def report(plan: "ResolvedPlan") -> str:
    """What each group of modules gets, what it communicates for each token, and why.

    Bytes are of the whole tensor that is reduced or gathered, in the parameters' dtype, for each token.
    Modules that read the same tensor share its collective; here each counts its own.
    """
    groups = _groups(plan)
    rows: list[tuple[str, ...]] = [
        _HEADER,
        *(_row(plan, label, members) for label, members in groups),
    ]
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(0, f"Tensor parallel over {plan.tp_size} ranks")
    lines.insert(2, "  ".join("-" * width for width in widths))
    lines += _totals(plan)
    lines += _unplanned(plan)
    lines += [f"Attribute: {line}" for line in describe_attributes(plan.attributes)]
    lines += [f"Note: {note}" for note in plan.notes]
    lines += [f"Not checked: {said}" for said in plan.unchecked]
    return "\n".join(lines)


def _groups(plan: "ResolvedPlan") -> Iterator[tuple[str, list["PlannedModule"]]]:
    """Modules that differ in nothing but their layer, under one name."""
    groups: dict[tuple[str, ...], list[PlannedModule]] = {}
    for m in plan.modules:
        key = (numberless(m.name), str(m.style), _params(m, plan.tp_size), str(m.traffic), m.why)
        groups.setdefault(key, []).append(m)
    for (name, *_), members in groups.items():
        one = members[0].name or "(root)"
        yield (f"{name} (x{len(members)})" if len(members) > 1 else one), members


def _row(plan: "ResolvedPlan", label: str, members: list["PlannedModule"]) -> tuple[str, ...]:
    m = members[0]
    cells = [_cell(m, phase) for phase in ("forward", "backward")]
    return (label, str(m.style), _params(m, plan.tp_size) or "-", *cells, m.why)


def _params(m: "PlannedModule", tp: int) -> str:
    return ", ".join(_param(p, tp) for p in m.params)


def _param(p: "PlannedParam", tp: int) -> str:
    summed = " [gradient summed]" if p.rule.tp_grad == "partial" else ""
    return f"{p.name} {p.shape} -> {p.local_shape(tp)}{summed}"


def _cell(m: "PlannedModule", phase: str) -> str:
    found = [t for t in m.traffic if t.phase == phase]
    said = [
        t.op if t.elements is None else f"{t.op} {_bytes(t.elements * m.itemsize)}" for t in found
    ]
    return ", ".join(said) or "-"


def _totals(plan: "ResolvedPlan") -> Iterator[str]:
    every = [(t, m.itemsize) for m in plan.modules for t in m.traffic]
    if not every:
        return
    unknown = sum(t.elements is None for t, _ in every)
    parts = []
    for phase in ("forward", "backward"):
        mine = [(t, size) for t, size in every if t.phase == phase]
        total = sum((t.elements or 0) * size for t, size in mine)
        parts.append(f"{phase} {_bytes(total)} in {len(mine)}")
    more = f", and {unknown} of a size that the input has" if unknown else ""
    yield (
        f"Communicated for each token, as whole tensors: {', '.join(parts)} collectives{more}; modules that "
        "read one tensor share its collective, here each counts its own"
    )


def _unplanned(plan: "ResolvedPlan") -> Iterator[str]:
    names = list(dict.fromkeys(map(numberless, plan.unplanned)))
    if names:
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        yield f"Not in the plan, whole on every rank: {len(plan.unplanned)} parameters ({shown})"


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


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
        from parallel3d.tp.auto.check import check_groups

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
