"""The constants of the time and memory model, from constants.toml; terms: numbers with their formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from parallel3d.planner.arguments import own_data


@dataclass(frozen=True)
class Constant:
    """A number that the planner doesn't compute.

    Attributes:
        source: where the value comes from, and why it is this one.
        moved_by: the published sources whose speeds it was fitted to; empty: it was not fitted to any.
    """

    name: str
    value: float
    unit: str = ""
    source: str = ""
    moved_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Term:
    """A computed number, its formula, and the inputs of the formula by their names in it.

    Attributes:
        value: the number, in the unit ``unit``, such as "B" or "s".
    """

    name: str
    value: float
    formula: str
    inputs: Mapping[str, float | str | Constant] = field(default_factory=dict)
    unit: str = "s"


def explained(term: Term, margin: str = "") -> Iterator[str]:
    """Lines of text: the term, its formula, what was put in."""
    yield f"{margin}{term.name} = {shown(term.value, term.unit)} = {term.formula}"
    for name, given in term.inputs.items():
        if isinstance(given, Constant):
            yield f"{margin}  {name} = {given.value:g} {given.unit}  [{given.source}]"
        elif isinstance(given, str):
            yield f"{margin}  {name} = {given}"
        else:
            yield f"{margin}  {name} = {given:,.6g}"


def shown(value: float, unit: str) -> str:
    """With a unit that a person reads: GiB, ms."""
    if unit == "B":
        return f"{value / 2**30:,.3f} GiB" if abs(value) >= 2**20 else f"{value:,.0f} B"
    if unit == "s":
        return f"{value:,.3f} s" if value >= 1 else f"{value * 1e3:,.3f} ms"
    return f"{value:,.4g} {unit}".rstrip()


CONSTANTS = {
    name: Constant(name, **{**given, "moved_by": tuple(given.get("moved_by", ()))})
    for name, given in own_data("constants.toml").items()
}
constant = CONSTANTS.__getitem__
