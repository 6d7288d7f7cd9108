"""A plan, resolved against a model: which module gets which style, checked before anything changes.

A plan is data: ``{"layers.*.attn.wq": "colwise", ...}``. :func:`resolve_plan` is pure and works on
meta models; the :class:`ResolvedPlan` it returns can be printed, compared between ranks, and applied.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from parallel3d._layout.packed import PackedShard
from parallel3d._layout.param_layout import ParamLayout, set_param_layout
from parallel3d._torch.dtensor import make_dtensor, make_spec
from parallel3d._util.arguments import counted
from parallel3d._util.forwards import unchanged_on_error
from parallel3d._util.quantised import packed_kind
from parallel3d._util.replaced_params import marking_replaced
from parallel3d.errors import MeshError, PlanError, StateError
from parallel3d.tp.auto.heads import resolve
from parallel3d.tp.collectives import SequenceLength, TpAxis, copy_by_rank
from parallel3d.tp.local_attributes import PlannedAttribute, describe_attributes
from parallel3d.tp.parts import watch_parts
from parallel3d.tp.random import can_drop, install_random, refuse_later_dropout
from parallel3d.tp.resolve import Plan, PlanSource, check_plan_type, numberless
from parallel3d.tp.styles import Style
from parallel3d.tp.styles.base import ParamRule, StyleTraffic, own_params


@dataclass(frozen=True)
class PlannedParam:
    """One parameter of a planned module.

    Attributes:
        name: its name in the module, such as ``"weight"``.
        shape: its shape in the plain model.
        rule: how it is split over ``tp``, and whether its gradient is summed over it.
    """

    name: str
    shape: tuple[int, ...]
    rule: ParamRule

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Returns the shape of the largest of the ranks' parts of the parameter."""
        if not isinstance(self.rule.placement, Shard):
            return self.shape
        dim, packing = self.rule.placement.dim, self.rule.packing
        rows = -(-self.shape[dim] // tp) if packing is None else max(packing.lengths)
        return (*self.shape[:dim], rows, *self.shape[dim + 1 :])


@dataclass(frozen=True)
class PlannedModule:
    """A module of the model, with its style.

    Attributes:
        name: its path in the model; ``""`` is the root.
        pattern: the plan's pattern that matched it.
        style: its style.
        params: its own parameters, in its order.
        why: the reason for the rule, when it isn't the user's.
        traffic: its collectives, with their sizes per token.
        itemsize: bytes of an element of its parameters, or of the model's if it has none.
    """

    name: str
    pattern: str
    style: Style
    params: tuple[PlannedParam, ...]
    why: str = ""
    traffic: tuple[StyleTraffic, ...] = ()
    itemsize: int = 4


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan that fits a model. It refers to no module, so it can be applied to a copy of the model too.

    Attributes:
        tp_size: the number of ranks of the ``tp`` axis for which it was resolved.
        modules: the modules with a style, in the model's order.
        unplanned: names of the parameters without a style; they stay plain tensors, whole on every rank.
        notes: messages about what was changed or added beyond the plan's rules.
        attributes: attributes of modules, such as numbers of heads, whose value on a rank differs.
        unchecked: messages about layers of the plan that could not be checked.
    """

    tp_size: int
    modules: tuple[PlannedModule, ...]
    unplanned: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    attributes: tuple[PlannedAttribute, ...] = ()
    unchecked: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Returns a text that is equal on two ranks if they would apply the same plan."""
        lines = [f"tp {self.tp_size}"]
        for m in self.modules:
            params = ", ".join(f"{p.name} {p.shape} {p.rule}" for p in m.params)
            lines.append(f"{m.name}: {m.style!r} [{params}]")
        lines += [f"{a.module}.{a.name} = {a.values}" for a in self.attributes]
        return "\n".join(lines)

    @property
    def takes_rows(self) -> bool:
        """Whether torch's style of the first module declares that the model's input is split over tp, by
        batch or sequence."""
        return bool(self.modules) and getattr(self.modules[0].style, "takes_rows", False)

    def __str__(self) -> str:
        """Returns a table of the modules' styles, parameters and collectives. Sizes of collectives are bytes
        per token of the whole tensor that is reduced or gathered, in the parameters' dtype."""
        rows = [tuple(_HEADER), *self._rows()]
        if not any(row[-1] for row in rows[1:]):
            rows = [row[:-1] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.insert(0, f"Tensor parallel over {counted(self.tp_size, 'rank')}")
        lines.insert(2, "  ".join("-" * width for width in widths))
        lines += [
            f"Communicated {line}; where modules read one tensor, they share its collective"
            for line in _traffic(self)
        ]
        if names := list(dict.fromkeys(map(numberless, self.unplanned))):
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            lines.append(
                f"Not in the plan, whole on every rank: {counted(len(self.unplanned), 'parameter')} ({shown})"
            )
        lines += [f"Attribute: {line}" for line in describe_attributes(self.attributes)]
        lines += [f"Note: {note}" for note in self.notes]
        lines += [f"Not checked: {message}" for message in self.unchecked]
        return "\n".join(lines)

    def summary(self) -> str:
        """Returns a summary for the start of a training: three lines of at most 80 characters.

        They give the numbers of modules and parameters, each style with the last names of its modules, and
        the bytes and collectives per token. ``str(plan)`` lists every module.
        """
        styles: dict[str, dict[str, None]] = {}
        for m in self.modules:
            if ".lora_" in m.name:
                continue  # an adapter, which follows from its layer
            *parents, last = m.name.removesuffix(".base_layer").split(".")
            name = ".".join(parents[-1:] + [last]) if last.isdecimal() else last
            styles.setdefault(type(m.style).__name__, {})[name or "(root)"] = None
        named = "; ".join(f"{style}: {', '.join(names)}" for style, names in styles.items())
        lines = [
            f"{counted(len(self.modules), 'module')} split over {counted(self.tp_size, 'tp rank')}, "
            f"{counted(len(self.unplanned), 'parameter')} whole on each",
            named if len(named) <= 80 else f"{named[:77]}...",
        ]
        return "\n".join(lines + list(_traffic(self)))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the cells of each row of the table; modules of all layers share a row."""
        names: dict[tuple[str, ...], list[str]] = {}
        for m in self.modules:
            params = ", ".join(
                f"{p.name} {p.shape} -> {p.local_shape(self.tp_size)}"
                + " [gradient summed]" * (p.rule.tp_grad == "partial")
                for p in m.params
            )
            traffic = [_describe_traffic(m, phase) for phase in ("forward", "backward")]
            key = (numberless(m.name), str(m.style), params or "-", *traffic, m.why)
            names.setdefault(key, []).append(m.name)
        for (name, *cells), members in names.items():
            label = f"{name} (x{len(members)})" if len(members) > 1 else members[0] or "(root)"
            yield label, *cells

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Makes ``model`` tensor-parallel in place, and returns it.

        Each distinct parameter of the plan becomes one DTensor on the ``tp`` axis with its ``ParamLayout``;
        modules that share a parameter still share it. The forwards expect local tensors as parameters,
        which the engine gives them. On an axis of one rank nothing changes.

        Args:
            mesh: a DeviceMesh with an axis named ``tp``.

        Raises:
            MeshError: no ``tp`` axis, or not of ``tp_size`` ranks.
            PlanError: ``model`` is not the one (or a copy of it) the plan was resolved for.
        """
        axis = _tp_axis(mesh, self.tp_size)
        by_name = _find_modules(self, model)
        modules = [by_name[planned.name] for planned in self.modules]
        if self.tp_size == 1:
            return model
        # All new parameters first: if one fails (memory), the model is unchanged.
        new: dict[int, nn.Parameter] = {}
        for planned, module in zip(self.modules, modules, strict=True):
            for p in planned.params:
                old = module._parameters[p.name]
                assert old is not None
                if id(old) not in new:
                    new[id(old)] = _distribute(old, p.rule, axis)
        with unchanged_on_error(model), marking_replaced(model):
            # In every owner of a replaced parameter, also those without a style: ties stay ties.
            for module in model.modules():
                for name, param in module._parameters.items():
                    if param is not None and id(param) in new:
                        module._parameters[name] = new[id(param)]
            sequence = SequenceLength()
            for planned, module in zip(self.modules, modules, strict=True):
                planned.style.install(module, axis, sequence)
            for attribute in self.attributes:
                attribute.set(by_name[attribute.module], axis.rank)
            if can_drop(model):
                install_random(model, {p.name: p.style for p in self.modules}, axis)
            elif axis.size > 1:
                refuse_later_dropout(model)
            _watch_unplanned(model, self, axis, sequence)
            watch_parts(model, {p.name: p.style for p in self.modules})
        return model


_HEADER = ("module", "style", "parameters, whole -> on a rank", "forward", "backward", "why")


def _describe_traffic(m: PlannedModule, phase: str) -> str:
    cells = [
        t.op if t.elements is None else f"{t.op} {_bytes(t.elements * m.itemsize)}"
        for t in m.traffic
        if t.phase == phase
    ]
    return ", ".join(cells) or "-"


def _traffic(plan: ResolvedPlan) -> Iterator[str]:
    collectives = [(t, m.itemsize) for m in plan.modules for t in m.traffic]
    if not collectives:
        return
    unknown = sum(t.elements is None for t, _ in collectives)
    parts = []
    for phase in ("forward", "backward"):
        sizes = [(t.elements or 0) * size for t, size in collectives if t.phase == phase]
        parts.append(f"{phase} {_bytes(sum(sizes))} in {len(sizes)}")
    more = f", and {unknown} of the input's size" if unknown else ""
    yield f"per token, of whole tensors: {', '.join(parts)} collectives{more}"


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


def _tp_axis(mesh: DeviceMesh, size: int) -> TpAxis:
    names = mesh.mesh_dim_names or ()
    if "tp" not in names:
        raise MeshError(f"the mesh has the axes {names or '(unnamed)'}; tensor parallel needs 'tp'")
    axis = TpAxis(mesh if mesh.ndim == 1 else mesh["tp"])
    if axis.size != size:
        raise MeshError(
            f"the plan was resolved for {counted(size, 'tp rank')}, but the mesh has {axis.size}; "
            "resolve it again"
        )
    return axis


def _find_modules(plan: ResolvedPlan, model: nn.Module) -> dict[str, nn.Module]:
    by_name = dict(model.named_modules(remove_duplicate=False))
    for planned in plan.modules:
        module = by_name.get(planned.name)
        shapes = {} if module is None else {n: p.shape for n, p in own_params(module).items()}
        if module is None or any(shapes.get(p.name) != p.shape for p in planned.params):
            raise PlanError(
                f"the plan was resolved for another model: module {planned.name!r} is missing here "
                "or has other parameters"
            )
    return by_name


def _distribute(param: nn.Parameter, rule: ParamRule, axis: TpAxis) -> nn.Parameter:
    """Returns the parameter as a DTensor on ``tp`` that holds this rank's part."""
    whole = param.detach()
    local = rule.part(whole, axis.size, axis.rank)
    local = copy_by_rank(local, axis) if local is whole else local
    placement = rule.placement if rule.packing is None else PackedShard(rule.packing)
    spec = make_spec(axis.mesh, (placement,), param.shape, param.dtype)
    new = nn.Parameter(make_dtensor(local, spec), requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)  # users' attributes, such as "no weight decay"
    set_param_layout(new, ParamLayout(rule.compute, rule.tp_grad))
    return new


def _watch_unplanned(
    model: nn.Module, plan: ResolvedPlan, axis: TpAxis, sequence: SequenceLength
) -> None:
    """Makes modules without a style raise if the input of their first forward is a part of the sequence.
    Their output would be right, but each rank's parameters would get the gradient of its part only, and so
    diverge."""
    splits = [p.style for p in plan.modules if p.style.splits_sequence]
    dims = {getattr(style, "sequence_dim", 1) for style in splits}
    if axis.size == 1 or not dims or not isinstance(axis.rank, int):  # simulated ranks
        return
    modules = dict(model.named_modules())
    for name in {n.rpartition(".")[0] for n in plan.unplanned}:
        if name in modules:
            check = _CheckInput(name, axis, sequence, tuple(dims))
            modules[name].register_forward_pre_hook(check)


@dataclass
class _CheckInput:
    """The forward pre-hook of ``_watch_unplanned``. It checks one forward only: in later ones a whole tensor
    may have a part's length by chance."""

    name: str
    axis: TpAxis
    sequence: SequenceLength
    dims: tuple[int, ...]
    done: bool = False

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:
        if self.done or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.done = True
        length, x = self.sequence.length, args[0] if args else None
        trained = any(p.requires_grad for p in module.parameters(recurse=False))
        if length is None or length <= 1 or not trained:
            return
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return
        rows = self.axis.rows(length)
        # The last dim is of features.
        if any(0 <= dim < x.dim() - 1 and x.shape[dim] == rows for dim in self.dims):
            self.done = False
            raise StateError(
                f"{self.name!r} has no style in the plan, but its input {tuple(x.shape)} looks like "
                f"this rank's part of a sequence of {length}: its parameters would get the gradient "
                'of that part alone. Give it SequenceParallel() or Replicated(tp_grad="partial"); or '
                "Replicated(), if its input is whole"
            )


def resolve_plan(
    model: nn.Module, plan: Plan, tp_size: int, *, strict: bool = True, example: Any = None
) -> ResolvedPlan:
    """Resolves ``plan`` against ``model`` for ``tp_size`` ranks; changes nothing.

    Args:
        model: a plain model, possibly on the meta device.
        plan: pattern -> style or style name. A pattern is the path of a module, or of a parameter
            (its own name without wildcards) whose module has a style that takes rules for parameters.
            In it ``*`` stands for any characters within one segment (also ``?`` and ``[...]``) and
            ``{q,k,v}_proj`` for three names; ``""`` is the root. ``"auto"``: the plan of
            :func:`auto_plan`.
        tp_size: the number of ranks of the ``tp`` axis.
        strict: whether a rule that matches nothing is an error; otherwise it is a note of the result.
        example: ``(args, kwargs)`` of a small batch for the model's forward, where no input can be guessed.
            A user's plan is checked by running the model once without weights, and comparing attention
            layers with themselves split, see ``docs/tensor_parallel.md``.

    Raises:
        PlanError: lists all problems: unmatched rules, two rules on one module, styles that don't fit their
            module, sizes that ``tp_size`` ranks can't share, shared parameters split in two ways, layers
            that compute something else on parts than on the whole, a split weight that is read outside its
            module, a model that is parallel already, an empty plan.
    """
    check_plan_type(plan)
    if type(tp_size) is not int or tp_size < 1:
        raise PlanError(f"tp_size is {tp_size!r}; it must be an int, 1 or more")
    parallel = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    if parallel:
        raise PlanError(
            f"the model is parallel already: {parallel[0]} is a DTensor "
            f"({len(parallel)} parameters are); plans are for plain models"
        )
    if isinstance(plan, str) and tp_size > 1:
        packed = [(n, kind) for n, p in model.named_parameters() if (kind := packed_kind(p))]
        if packed:
            raise PlanError(
                f"tp_plan is {plan!r}, and {packed[0][0]} is a {packed[0][1]}, whose values are packed in "
                f"blocks, which can't be split over tp ({len(packed)} parameters are). Use tp=1 and a larger "
                "shard axis, or a dict with rules for other layers only"
            )
    if isinstance(plan, str):
        # Here, so that importing parallel3d doesn't import what few programs use.
        from parallel3d.tp.auto.complete import choose

        plan_source = choose(model, tp_size, example)
    else:
        plan_source = PlanSource(plan)
    from_user = not plan_source.origin
    resolution = resolve(model, plan_source, tp_size, strict=strict and from_user)
    unchecked = list(plan_source.unproven)
    if not resolution.problems and from_user:
        # Imported when needed. An "auto" plan is proven, or written for the model's family.
        from parallel3d.tp.auto.check import check_groups

        unchecked = check_groups(model, resolution, example)
    if resolution.problems:
        listed = "".join(f"\n  - {problem}" for problem in resolution.problems)
        count = len(resolution.problems)
        raise PlanError(f"{count} problem{'s'[: count > 1]} in the tensor-parallel plan:{listed}")

    modules = []
    for ruled in resolution.ruled_in_order():
        params = dict(ruled.module.named_parameters(recurse=False, remove_duplicate=False))
        rules = resolution.rules[id(ruled.module)].items()
        planned = tuple(PlannedParam(name, tuple(params[name].shape), r) for name, r in rules)
        # Bytes of an element of what the module computes: of its parameters, or else of the model's.
        every = chain(ruled.module.parameters(), model.parameters())
        first = next((p for p in every if p.is_floating_point()), None)
        itemsize = 4 if first is None else first.dtype.itemsize
        style = ruled.style
        traffic = style.traffic(ruled.module, tp_size) if tp_size > 1 else ()
        modules.append(
            PlannedModule(ruled.name, ruled.pattern, style, planned, ruled.why, traffic, itemsize)
        )
    return ResolvedPlan(
        tp_size,
        tuple(modules),
        tuple(resolution.unplanned()),
        tuple(resolution.notes),
        tuple(resolution.attributes),
        tuple(unchecked),
    )
