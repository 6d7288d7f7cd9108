"""Style: how one module is tensor-parallel.

A style is a frozen value that names no module and no mesh. :meth:`Style.plan` is pure: it says
which parameter of a module gets which placement on the ``tp`` axis, or why that can't be.
:meth:`Style.install` mutates: it gives the module instance a forward on local tensors. Parameters
are replaced by :meth:`~parallel3d.tp.ResolvedPlan.apply`, which knows about sharing.
"""

import difflib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch import Tensor, nn

from parallel3d._packing import Packing
from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule
from parallel3d.tp.collectives import TpAxis
from parallel3d.tp.forwards import SequenceLength
from parallel3d.tp.styles.traffic import Traffic

__all__ = ["Style"]


@dataclass(frozen=True)
class Style(ABC):
    """Base of the styles. ``str()`` shows the fields that differ from their defaults."""

    choices: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            value = getattr(self, name)
            if value not in allowed:
                near = difflib.get_close_matches(str(value), allowed, 1, 0.0)[0]
                raise PlanError(
                    f"{type(self).__name__}({name}={value!r}): {name} is one of "
                    f"{', '.join(map(repr, allowed))}. Did you mean {near!r}?"
                )

    def __str__(self) -> str:
        shown = [
            f"{f.name}={_shown(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def for_module(self, module: nn.Module) -> "Style":
        """The style this one means on ``module``: itself, but for names used for two things."""
        return self

    def in_model(self, model: nn.Module, name: str) -> "Style":
        """The style with what it reads from the model around its module, whose path is ``name``."""
        return self

    def inside(self, module: nn.Module) -> dict[str, "Style"]:
        """Styles that modules inside get with this one, by their path from ``module``."""
        return {}

    def attributes(self, module: nn.Module, tp: int) -> dict[str, tuple[int, ...]]:
        """Attributes of the module that say how much this rank holds: name -> value on each rank."""
        return {}

    def with_params(self, params: dict[str, "Style"]) -> "Style":
        """This style for a module some of whose own parameters have rules of their own, by name.

        Raises:
            PlanError: it takes none.
        """
        raise PlanError(
            f"{self} takes no rules for single parameters ({', '.join(params)}); give their module "
            "the style 'local_params' or 'moe_tp_experts'"
        )

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        """What this style means for one parameter, given by its path; for styles that split features.

        Raises:
            PlanError: it is no style for a parameter, or its size can't be split.
        """
        raise PlanError(f"{self} is a style for modules, not for a parameter")

    @abstractmethod
    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        """The rule of each of the module's own parameters, by name.

        Raises:
            PlanError: a module type or a size this style can't do on ``tp`` ranks.
        """

    def install(  # noqa: B027 (optional)
        self, module: nn.Module, axis: TpAxis, sequence: SequenceLength
    ) -> None:
        """Gives ``module`` its tensor-parallel forward. Base: the forward it has is right."""

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        """What the module communicates for each token, for the report."""
        return ()

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        """What its output is a part of, for random numbers (``tp/random.py``); ``""``: as before it."""
        return ""

    @property
    def random_before(self) -> bool:
        """Whether the module itself computes on parts, though its input is whole."""
        return False

    @property
    def splits_sequence(self) -> bool:
        """Whether its forward splits the sequence among the ranks."""
        return False

    @property
    def takes_parts(self) -> bool:
        """Whether it must know the global length of the sequence it gets a part of."""
        return False


def _shown(value: object) -> str:
    if isinstance(value, Packing):
        return f"{value.lengths} by rank"
    return repr(value)
