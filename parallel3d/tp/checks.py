"""What the styles refuse, and the rule a parameter gets when it is found fit."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from parallel3d._layout.packing import Packing
from parallel3d._layout.param_layout import ParamLayout
from parallel3d.errors import PlanError


@dataclass(frozen=True)
class ParamRule:
    """What becomes of one parameter: its placement on ``tp`` and what its gradient is there.

    Attributes:
        placement: on ``tp``.
        tp_grad: as in ``ParamLayout``.
        packing: the rows of ``placement.dim`` each rank holds, where they are not ``torch.chunk``'s.
        compute: as in ``ParamLayout``.
    """

    placement: Shard | Replicate
    tp_grad: Literal["whole", "partial"] = "whole"
    packing: Packing | None = None
    compute: Literal["local", "dtensor"] = "local"

    @property
    def layout(self) -> ParamLayout:
        """The mark the engine reads."""
        return ParamLayout(self.compute, self.tp_grad)

    @property
    def changes_compute(self) -> bool:
        """Whether a module that uses the parameter without knowing the rule would be wrong."""
        return (
            isinstance(self.placement, Shard)
            or self.tp_grad == "partial"
            or self.compute == "dtensor"
        )

    def describe(self) -> str:
        """The rule in words."""
        kind = " (a DTensor)" if self.compute == "dtensor" else ""
        if isinstance(self.placement, Shard):
            packed = "" if self.packing is None else f" as {self.packing.rows}"
            return f"split along dim {self.placement.dim}{packed}{kind}"
        return ("whole" if self.tp_grad == "whole" else "whole with its gradient summed") + kind


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``module`` is a ``kind`` that computes what ``kind`` computes, by being called."""
    # A subclass that computes something else, an instance whose forward was replaced and
    # MultiheadAttention's projection, which is never called, would be silently wrong.
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in module.__dict__
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def check_count(what: str, size: int, multiple_of: int) -> None:
    """Refuses a size, called ``what``, that isn't made of whole groups of ``multiple_of``."""
    if type(multiple_of) is not int or multiple_of < 1:
        raise PlanError(f"multiple_of={multiple_of!r}: it must be an int, 1 or more")
    if size % multiple_of:
        raise PlanError(f"{what} {size} is not a multiple of multiple_of={multiple_of}")


def refuse_lookup_options(module: Any, *, scale_grad_by_freq: bool) -> None:
    """Refuses embedding options that need whole rows, or counts of ids other ranks look up."""
    refused = {
        "max_norm": module.max_norm is not None,
        "scale_grad_by_freq": module.scale_grad_by_freq and not scale_grad_by_freq,
        "sparse": module.sparse,
    }
    given = [name for name, is_on in refused.items() if is_on]
    if given:
        raise PlanError(f"an nn.Embedding with {', '.join(given)} can't be split over tp")


def fit_rules(module: nn.Module, **rules: ParamRule) -> dict[str, ParamRule]:
    """``rules`` for the parameters the module has, once they are found fit."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    extra = [name for name in own if name not in rules]
    if extra or ("weight" in rules and "weight" not in own):
        raise PlanError(
            f"{type(module).__name__} has the parameters {', '.join(own) or 'none'}, where "
            f"{', '.join(rules)} are expected; is it parametrized?"
        )
    for name, param in own.items():
        if isinstance(param, DTensor):
            raise PlanError(f"{name} is a DTensor already: the module is parallel")
        if is_lazy(param):
            raise PlanError(f"{name} has no size yet: run a batch through the model first")
        if not param.is_floating_point():
            raise PlanError(f"{name} is {param.dtype}; only floating-point parameters can be split")
    return {name: rules[name] for name in own}


# torch's own modules that do to each token what they'd do without the others. Other people's are
# judged by their parameters.
_PER_TOKEN = (nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)


def need_per_token(module: nn.Module) -> None:
    """Refuses a module that doesn't treat each token of the sequence by itself."""
    kind = type(module).__name__
    unknown = type(module).__module__.split(".")[0] == "torch" and type(module) not in _PER_TOKEN
    if unknown or any(module.children()):
        raise PlanError(f"SequenceParallel is for norms over the last dim and dropout, not {kind}")
    normalized = getattr(module, "normalized_shape", (0,))
    if isinstance(normalized, tuple) and len(normalized) > 1:
        raise PlanError(f"{kind} normalizes over the dims {normalized}, the sequence among them")
    wrong = [
        f"{name} {tuple(p.shape)}"
        for name, p in module._parameters.items()
        if p is not None and p.dim() != 1
    ]
    if wrong:
        raise PlanError(
            "SequenceParallel needs parameters of one dim, elementwise on the last dim of the "
            f"input; {kind} has {', '.join(wrong)}"
        )
