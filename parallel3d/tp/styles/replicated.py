"""Replicated: parameters that stay whole on every rank."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, fit_rules
from parallel3d.tp.styles.base import Style

__all__ = ["Replicated"]


@dataclass(frozen=True)
class Replicated(Style):
    """The module's own parameters stay whole on every rank and its forward is the plain one.

    Attributes:
        tp_grad: ``"whole"``: the ranks compute the same. ``"partial"``: each computes on other data
            (a norm on this rank's heads), so gradients are summed over ``tp``.
    """

    choices: ClassVar = {"tp_grad": ("whole", "partial")}

    tp_grad: Literal["whole", "partial"] = "whole"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        own = [name for name, p in module._parameters.items() if p is not None]
        if not own and any(True for _ in module.parameters()):
            raise PlanError(
                f"{type(module).__name__} has no parameters of its own to keep replicated; name "
                "the modules inside it"
            )
        return fit_rules(module, **{name: ParamRule(Replicate(), self.tp_grad) for name in own})

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        return ParamRule(Replicate(), self.tp_grad)
