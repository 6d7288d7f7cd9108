"""Term: a predicted number that can say what it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Constant", "Term", "explained"]


@dataclass(frozen=True)
class Constant:
    """A number that isn't computed.

    Attributes:
        source: where it is from, and why it has this value.
    """

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Term:
    """A number, the formula that gives it, and what was put into that.

    Attributes:
        value: in ``unit``: "B", "s" or what it says.
        formula: in the inputs' names.
        inputs: by name: numbers, constants, other terms.
    """

    name: str
    value: float
    unit: str
    formula: str
    inputs: tuple[tuple[str, float | int | str | Constant | Term], ...] = ()


def explained(term: Term, depth: int = 0, seen: set[str] | None = None) -> Iterator[str]:
    """Lines of text: the term, its formula, what was put in; then each of those that is a term itself."""
    margin = "  " * depth
    yield f"{margin}{term.name} = {shown(term.value, term.unit)} = {term.formula}"
    for name, given in term.inputs:
        if isinstance(given, Term):
            yield from explained(given, depth + 1)
        elif isinstance(given, Constant):
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
