"""Colwise and Rowwise: a linear layer whose output or input features are split over ``tp``."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from parallel3d.errors import PlanError, StateError
from parallel3d.tp.checks import (
    ParamRule,
    check_size,
    fit_rules,
    is_plain,
    need_plain,
    refuse_lookup_options,
)
from parallel3d.tp.chunked_gather import can_chunk, gather_linear
from parallel3d.tp.collectives import TpAxis, gather_from_tp, split_to_tp
from parallel3d.tp.forwards import SequenceLength, TpState, bind_forward, finish_sum, take_input
from parallel3d.tp.linear_overlap import linear
from parallel3d.tp.styles.base import Style, joined, summed
from parallel3d.tp.styles.embedding import VocabParallel, colwise_embedding

__all__ = ["Colwise", "Rowwise"]


@dataclass(frozen=True)
class Colwise(Style):
    """Output features split over ``tp``: ``nn.Linear`` (weight and bias rows) and ``nn.Embedding``
    (the width: each rank has all tokens, part of each vector).

    Attributes:
        input: ``"replicate"``: whole. ``"sequence"``: a part along ``sequence_dim``, gathered.
            ``"gathered"``: an enclosing :class:`PrepareInput` has prepared it.
        output: ``"shard"``: (..., out / tp). ``"replicate"``: gathered, (..., out).
        multiple_of: never cut inside groups of so many features: the size of a head, so that every
            rank holds whole heads, equally many.
        sequence_dim: of the input, when ``input="sequence"``.
        chunks: more than one: the sequence is gathered in so many chunks, one while another is
            multiplied. For a module that reads its input alone, on a backend whose collectives run
            beside a matmul (NCCL); a sequence that ``tp`` doesn't divide is gathered in one.
    """

    choices: ClassVar = {
        "input": ("replicate", "sequence", "gathered"),
        "output": ("shard", "replicate"),
    }

    input: Literal["replicate", "sequence", "gathered"] = "replicate"
    output: Literal["shard", "replicate"] = "shard"
    multiple_of: int = 1
    sequence_dim: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.chunks) is not int or self.chunks < 1:
            raise PlanError(f"chunks={self.chunks!r}: it must be an int, 1 or more")
        if self.chunks > 1 and self.input != "sequence":
            raise PlanError(f'chunks={self.chunks} are of a gathered sequence: input="sequence"')

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if is_plain(module, nn.Embedding):
            if self.input != "replicate":
                raise PlanError(f"an nn.Embedding takes token ids: no input={self.input!r} for it")
            refuse_lookup_options(module, scale_grad_by_freq=True)
            check_size(module, "embedding_dim", self.multiple_of, tp)
            return fit_rules(module, weight=ParamRule(Shard(1)))
        need_plain(self, module, nn.Linear, nn.Embedding)
        check_size(module, "out_features", self.multiple_of, tp)
        return fit_rules(module, weight=ParamRule(Shard(0)), bias=ParamRule(Shard(0)))

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        embedding = isinstance(module, nn.Embedding)
        forward = colwise_embedding if embedding else colwise_linear
        bind_forward(module, forward, TpState(self, axis, sequence))

    def communicates(self) -> tuple[str, str]:
        into = {
            "replicate": ("", "all-reduce"),
            "sequence": ("all-gather", "reduce-scatter"),
            "gathered": ("", ""),
        }[self.input]
        out = ("all-gather", "") if self.output == "replicate" else ("", "")
        return joined(into[0], out[0]), joined(out[1], into[1])

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        if self.output == "shard":
            return "features"
        return "whole" if self.input == "sequence" else ""

    @property
    def takes_parts(self) -> bool:
        return self.input == "sequence"


@dataclass(frozen=True)
class Rowwise(Style):
    """Input features of an ``nn.Linear`` split over ``tp``; the bias is whole and added once, after
    the sum. On an ``nn.Embedding`` it means :class:`VocabParallel`, as in torch.

    Attributes:
        input: ``"shard"``: (..., in / tp), what :class:`Colwise` puts out. ``"replicate"``: whole,
            split here.
        output: ``"replicate"``: whole. ``"sequence"``: this rank's part along ``sequence_dim``.
        multiple_of: as in :class:`Colwise`, of the input features.
        sequence_dim: of the output, when ``output="sequence"``.
    """

    choices: ClassVar = {"input": ("shard", "replicate"), "output": ("replicate", "sequence")}

    input: Literal["shard", "replicate"] = "shard"
    output: Literal["replicate", "sequence"] = "replicate"
    multiple_of: int = 1
    sequence_dim: int = 1

    def for_module(self, module: nn.Module) -> Style:
        if isinstance(module, nn.Embedding):
            return VocabParallel(output=self.output, sequence_dim=self.sequence_dim)
        return self

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        need_plain(self, module, nn.Linear)
        check_size(module, "in_features", self.multiple_of, tp)
        # Added to a part of the sequence, the bias gets a part of its gradient.
        bias_grad: Literal["whole", "partial"] = "partial" if self.splits_sequence else "whole"
        return fit_rules(module, weight=ParamRule(Shard(1)), bias=ParamRule(Replicate(), bias_grad))

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, rowwise_linear, TpState(self, axis, sequence))

    def communicates(self) -> tuple[str, str]:
        out = summed(self.output)
        return out[0], joined(out[1], "all-gather" if self.input == "replicate" else "")

    @property
    def random_after(self) -> Literal["", "features", "sequence", "whole"]:
        return "sequence" if self.output == "sequence" else "whole"

    @property
    def splits_sequence(self) -> bool:
        return self.output == "sequence"


def colwise_linear(self: Any, input: Tensor) -> Tensor:
    """(..., in) -> (..., out / tp), or (..., out) when gathered."""
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style
    y = None
    if style.chunks > 1:
        y = _in_chunks(self, input)
    if y is None:
        x = take_input(input, style.input, style.sequence_dim, tp, read_only=True)
        y = linear(x, self.weight, self.bias)
    if style.output == "replicate":
        y = gather_from_tp(y, -1, self.out_features, tp.axis)
    return y


def _in_chunks(self: Any, x: Tensor) -> Tensor | None:
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style
    size = tp.sequence.of(x, style.sequence_dim, tp.axis)
    if not can_chunk(x, style.sequence_dim, size, tp.axis):
        return None
    return gather_linear(x, self.weight, self.bias, style.sequence_dim, style.chunks, tp.axis)


def rowwise_linear(self: Any, input: Tensor) -> Tensor:
    """(..., in / tp), or (..., in) when it is to be split, -> (..., out)."""
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style
    x = input
    if style.input == "replicate":
        x = split_to_tp(x, -1, tp.axis)
    elif isinstance(x.shape[-1], int) and x.shape[-1] == self.in_features != self.weight.shape[1]:
        raise StateError(
            f"a Rowwise linear of {self.in_features} input features got all of them, but each tp "
            f'rank\'s part was expected (the output of Colwise). Rowwise(input="replicate") splits '
            "a whole input."
        )
    y = finish_sum(F.linear(x, self.weight), style.output, style.sequence_dim, tp)
    # After the sum: added before, it would count tp times.
    return y if self.bias is None else y + self.bias
