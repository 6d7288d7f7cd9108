"""Report: a resolved plan as a table to read before training."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallel3d.tp.heads.local_attributes import describe_attributes
from parallel3d.tp.patterns import numberless

if TYPE_CHECKING:
    from parallel3d.tp.plan import PlannedModule, PlannedParam, ResolvedPlan

__all__ = ["report"]

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
