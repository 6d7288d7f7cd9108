"""SequenceParallel: norms and dropout on this rank's part of the sequence."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from parallel3d.tp.checks import ParamRule, fit_rules, need_per_token
from parallel3d.tp.collectives import TpAxis, gather_from_tp, scatter_sequence
from parallel3d.tp.forwards import SequenceLength, TpState, bind_forward, map_first
from parallel3d.tp.styles.base import Style
from parallel3d.tp.styles.traffic import Traffic

__all__ = ["SequenceParallel"]


@dataclass(frozen=True)
class SequenceParallel(Style):
    """A norm or dropout on this rank's part of the sequence; its parameters stay whole.

    For ``nn.LayerNorm`` and ``nn.RMSNorm`` over the last dim, ``nn.Dropout``, and any module of
    yours without children whose parameters are 1-D and elementwise on the last dim.

    Attributes:
        sequence_dim: of input and output.
        input: ``"sequence"``: a part. ``"replicate"``: whole, split here.
        output: ``"sequence"``: a part. ``"replicate"``: gathered, for what follows the last layer.
    """

    choices: ClassVar = {"input": ("sequence", "replicate"), "output": ("sequence", "replicate")}

    sequence_dim: int = 1
    input: Literal["sequence", "replicate"] = "sequence"
    output: Literal["sequence", "replicate"] = "sequence"

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        need_per_token(module)
        own = [name for name, p in module._parameters.items() if p is not None]
        return fit_rules(module, **{name: ParamRule(Replicate(), "partial") for name in own})

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        if "replicate" in (self.input, self.output):  # otherwise the plain forward is right
            bind_forward(module, sequence_parallel, TpState(self, axis, sequence))

    def traffic(self, module: nn.Module, tp: int) -> tuple[Traffic, ...]:
        sizes = [p.numel() for p in module._parameters.values() if p is not None]
        size = sizes[0] if sizes else None
        found: tuple[Traffic, ...] = ()
        if self.output == "replicate":
            found += (Traffic("all-gather", "forward", size),)
        if self.input == "replicate":
            found += (Traffic("all-gather", "backward", size),)
        return found

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        return "sequence" if self.output == "sequence" else "whole"

    @property
    def random_before(self) -> bool:
        return True

    @property
    def splits_sequence(self) -> bool:
        return self.input == "replicate"

    @property
    def takes_parts(self) -> bool:
        # Without a gather it need not know the length, but without a split there are no parts.
        return self.input == "sequence"


def sequence_parallel(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module on this rank's part of the sequence; splits before and joins after as asked."""
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style
    dim = style.sequence_dim

    def split(x: Tensor) -> Tensor:
        tp.sequence.length = x.shape[dim]
        return scatter_sequence(x, dim, tp.axis)

    if style.input == "replicate":
        args, kwargs = map_first(tp, args, kwargs, split)
    y = tp.inner(self, *args, **kwargs)
    if style.output == "replicate":
        y = gather_from_tp(y, dim, tp.sequence.of(y, dim, tp.axis), tp.axis)
    return y
