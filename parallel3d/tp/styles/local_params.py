"""LocalParams: a module with raw parameters that are split by rules of their own."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn
from torch.distributed.tensor import Replicate

from parallel3d.tp.checks import ParamRule, fit_rules
from parallel3d.tp.styles.base import Style

__all__ = ["LocalParams"]


@dataclass(frozen=True)
class LocalParams(Style):
    """A module whose own parameters have rules of their own, such as attention sinks split by heads; its
    forward stays the plain one and computes with this rank's part of them.

    Attributes:
        params: the parameters' rules, (name, style); a plan gives them by the parameters' paths.
        tp_grad: of the parameters without a rule, as in :class:`Replicated`.
    """

    params: tuple[tuple[str, Style], ...] = ()
    tp_grad: Literal["whole", "partial"] = "whole"

    def with_params(self, params: dict[str, Style]) -> Style:
        return replace(self, params=(*self.params, *params.items()))

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        given = dict(self.params)
        rules = {}
        for name, param in module._parameters.items():
            if param is not None:
                style = given.get(name)
                rules[name] = (
                    ParamRule(Replicate(), self.tp_grad)
                    if style is None
                    else style.param_rule(param, tp)
                )
        return fit_rules(module, **rules)
