"""LocalParams: a module with raw parameters that are split by rules of their own."""

from dataclasses import dataclass, replace

from torch import nn

from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, fit_rules
from parallel3d.tp.styles.base import Style

__all__ = ["LocalParams"]


@dataclass(frozen=True)
class LocalParams(Style):
    """A module whose own parameters have rules of their own, such as attention sinks split by heads; its
    forward stays the plain one and computes with this rank's part of them.

    Attributes:
        params: the parameters' rules, (name, style); a plan gives them by the parameters' paths.
    """

    params: tuple[tuple[str, Style], ...] = ()

    def with_params(self, params: dict[str, Style]) -> Style:
        return replace(self, params=(*self.params, *params.items()))

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        given = dict(self.params)
        own = {name: p for name, p in module._parameters.items() if p is not None}
        # Used on this rank's heads, a parameter gets a part of its gradient; the module alone doesn't tell.
        missing = [name for name in own if name not in given]
        if missing:
            raise PlanError(
                f"{', '.join(missing)} of {type(module).__name__} has no rule: give it 'colwise', "
                "'replicate' (used alike on every rank) or 'replicated_with_grad_allreduce' (used with this "
                "rank's heads)"
            )
        return fit_rules(module, **{name: given[name].param_rule(p, tp) for name, p in own.items()})
