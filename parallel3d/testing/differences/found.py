"""Difference: what is reported."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Difference", "DifferenceKind", "owner_of"]

DifferenceKind = Literal[
    "structure",
    "weight at the start",
    "error",
    "input",
    "output",
    "loss",
    "gradient",
    "weight after a step",
    "buffer",
    "dropout",
]


@dataclass(frozen=True)
class Difference:
    """The first place where the parallel model departs from the plain one.

    Attributes:
        module: its name in the plain model; ``""`` is the model itself, ``"(loss)"`` the loss function.
        kind: of what it is a difference.
        what: that in words, such as ``"gradient of weight"``.
        step: counted from 0.
        rank: one that has it.
        difference: relative to the largest value of the plain model's tensor (of gradients: of all).
            Infinite where there is nothing to subtract.
        bound: what would have been accepted.
        hint: how the two are related, where that is simple.
        module_type: the module's class.
    """

    module: str
    kind: DifferenceKind
    what: str
    step: int = 0
    rank: int = 0
    difference: float = math.inf
    bound: float = 0.0
    hint: str = ""
    module_type: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None."""
        data = asdict(self)
        data["difference"] = self.difference if math.isfinite(self.difference) else None
        return data

    def __str__(self) -> str:
        name = self.module or "the model itself"
        kind = f" ({self.module_type})" if self.module_type else ""
        by = ""
        if math.isfinite(self.difference):
            by = f" differs by {self.difference:.3g} (relative; {self.bound:g} is allowed)"
        hint = f": {self.hint}" if self.hint else ""
        return f"{name}{kind}, step {self.step}, rank {self.rank}: {self.what}{by}{hint}"


def owner_of(parameter: str) -> tuple[str, str]:
    """A parameter's or buffer's module and its own name in it."""
    module, _, own = parameter.rpartition(".")
    return module, own
