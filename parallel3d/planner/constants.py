"""Constants of the time and memory model, read from constants.toml, and terms: computed numbers that keep
their formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel3d.planner.arguments import own_data


@dataclass(frozen=True)
class Constant:
    """A number of the time or memory model that is measured, fitted or published rather than computed.

    Attributes:
        source: where the value comes from, and why it was chosen.
        moved_by: the published runs to whose speeds the value was fitted; empty: it was not fitted.
    """

    name: str
    value: float
    unit: str = ""
    source: str = ""
    moved_by: tuple[str, ...] = ()
    chosen_with: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Term:
    """A computed number with its formula, and ``inputs``: the formula's variables by name.

    Attributes:
        value: the number, in the unit ``unit``, such as "B" or "s".
    """

    name: str
    value: float
    formula: str
    inputs: Mapping[str, float | str | Constant] = field(default_factory=dict)
    unit: str = "s"


def explained(term: Term, margin: str = "") -> Iterator[str]:
    """Yields lines of text: the term's value and formula, then each input, all indented by ``margin``."""
    yield f"{margin}{term.name} = {shown(term.value, term.unit)} = {term.formula}"
    for name, given in term.inputs.items():
        if isinstance(given, Constant):
            yield f"{margin}  {name} = {given.value:g} {given.unit}  [{given.source}]"
        elif isinstance(given, str):
            yield f"{margin}  {name} = {given}"
        else:
            yield f"{margin}  {name} = {given:,.6g}"


def shown(value: float, unit: str) -> str:
    """Returns ``value`` as text in a readable unit: bytes ("B") as GiB, seconds ("s") as s or ms."""
    if unit == "B":
        return f"{value / 2**30:,.3f} GiB" if abs(value) >= 2**20 else f"{value:,.0f} B"
    if unit == "s":
        return f"{value:,.3f} s" if value >= 1 else f"{value * 1e3:,.3f} ms"
    return f"{value:,.4g} {unit}".rstrip()


def read_constant(name: str, given: Mapping[str, Any], unit: str = "") -> Constant:
    """Makes a ``Constant`` of its TOML table ``given``; ``unit`` is for a table without one."""
    seen = (tuple(given.get(key, ())) for key in ("moved_by", "chosen_with"))
    return Constant(name, float(given["value"]), given.get("unit", unit), given["source"], *seen)


CONSTANTS = {name: read_constant(name, given) for name, given in own_data("constants.toml").items()}
constant = CONSTANTS.__getitem__
