"""ChosenPlan: the rules of a plan before they meet a model, and where they come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.tensor.parallel import ParallelStyle

from parallel3d.errors import PlanError
from parallel3d.tp.styles import Style

__all__ = ["ChosenPlan", "Plan", "Rule", "check_plan_type"]

Rule = str | Style | ParallelStyle
"""A style, its name, or one of torch's styles."""

Plan = Mapping[str, Rule] | Literal["auto"]
"""What users give: pattern -> style, style name or one of torch's styles, or ``"auto"``."""


@dataclass(frozen=True)
class ChosenPlan:
    """Rules, and why each is there.

    Attributes:
        rules: pattern -> style or style name.
        why: pattern -> why the rule is there, for the report; patterns the user gave have none.
        notes: what was done that a reader of the rules should know.
        source: where the rules come from; ``""`` is the user.
    """

    rules: Mapping[str, Rule]
    why: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: str = ""

    def reason(self, pattern: str) -> str:
        """Why ``pattern``'s rule is there; ``""``: the user gave it."""
        return self.why.get(pattern, self.source)


def check_plan_type(plan: Any) -> None:
    """Refuses what is neither a dict nor ``"auto"``.

    Raises:
        PlanError: it is neither.
    """
    if plan == "auto" or isinstance(plan, Mapping):
        return
    said = f"the plan is {plan!r}; it must be a dict from module-name patterns to styles, such as "
    raise PlanError(
        said + '{"layers.*.wq": "colwise"}, or "auto", which takes the plan the model brings or '
        "derives one"
    )
