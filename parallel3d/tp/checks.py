"""The rule of a parameter, and the checks that styles share."""

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
    """The placement of one parameter on ``tp``, and the kind of its gradient there.

    Attributes:
        placement: its placement.
        tp_grad, compute: as in ``ParamLayout``.
        packing: the rows of ``placement.dim`` that each rank holds, if not those of ``torch.chunk``.
    """

    placement: Shard | Replicate
    tp_grad: Literal["whole", "partial"] = "whole"
    packing: Packing | None = None
    compute: Literal["local", "dtensor"] = "local"

    @property
    def layout(self) -> ParamLayout:
        """The layout that the sharding engine reads."""
        return ParamLayout(self.compute, self.tp_grad)

    @property
    def changes_compute(self) -> bool:
        """Whether a module that uses the parameter without a rule of its own would be wrong."""
        changed = self.tp_grad == "partial" or self.compute == "dtensor"
        return changed or isinstance(self.placement, Shard)

    def describe(self) -> str:
        """Returns the rule in words."""
        kind = " (a DTensor)" if self.compute == "dtensor" else ""
        if isinstance(self.placement, Shard):
            packed = "" if self.packing is None else f" as {self.packing.rows}"
            return f"split along dim {self.placement.dim}{packed}{kind}"
        return ("whole" if self.tp_grad == "whole" else "whole with its gradient summed") + kind


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` runs the forward of ``kind``."""
    # Not a subclass or an instance with another forward, nor MultiheadAttention's projection, which is never
    # called.
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in module.__dict__
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def check_count(what: str, size: int, multiple_of: int) -> None:
    """Raises PlanError for a size, named ``what``, that isn't a multiple of ``multiple_of``."""
    if type(multiple_of) is not int or multiple_of < 1:
        raise PlanError(f"multiple_of={multiple_of!r}: it must be an int, 1 or more")
    if size % multiple_of:
        raise PlanError(f"{what} {size} is not a multiple of multiple_of={multiple_of}")


def refuse_lookup_options(module: Any, *, scale_grad_by_freq: bool) -> None:
    """Raises PlanError for embedding options that need whole rows, or counts of ids on other ranks."""
    refused = {
        "max_norm": module.max_norm is not None,
        "scale_grad_by_freq": module.scale_grad_by_freq and not scale_grad_by_freq,
        "sparse": module.sparse,
    }
    options = [name for name, is_on in refused.items() if is_on]
    if options:
        raise PlanError(f"an nn.Embedding with {', '.join(options)} can't be split over tp")


def own_params(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the module's parameters, without those of its children, by name."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def fit_rules(module: nn.Module, **rules: ParamRule) -> dict[str, ParamRule]:
    """Returns the rules of the parameters that the module has.

    Raises:
        PlanError: a parameter without a rule, no weight, or a parameter that can't be split.
    """
    own = own_params(module)
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


# torch's modules that treat each token by itself. Modules of other packages are judged by their parameters.
_PER_TOKEN = (nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)


def need_per_token(module: nn.Module) -> None:
    """Raises PlanError for a module that doesn't treat each token of the sequence by itself."""
    kind = type(module).__name__
    unknown = type(module).__module__.split(".")[0] == "torch" and type(module) not in _PER_TOKEN
    if unknown or any(module.children()):
        raise PlanError(f"SequenceParallel is for norms over the last dim and dropout, not {kind}")
    normalized = getattr(module, "normalized_shape", (0,))
    if isinstance(normalized, tuple) and len(normalized) > 1:
        raise PlanError(f"{kind} normalizes over the dims {normalized}, the sequence among them")
    wrong = [f"{name} {tuple(p.shape)}" for name, p in own_params(module).items() if p.dim() != 1]
    if wrong:
        raise PlanError(
            "SequenceParallel needs parameters of one dim, elementwise on the last dim of the "
            f"input; {kind} has {', '.join(wrong)}"
        )
