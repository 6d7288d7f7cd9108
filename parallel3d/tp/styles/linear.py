"""Colwise and Rowwise: a linear layer whose output or input features are split over ``tp``."""

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.nn import functional as F

from parallel3d._packed import packing_of
from parallel3d.errors import PlanError, StateError
from parallel3d.tp.base_forward import bind_base_forward
from parallel3d.tp.checks import ParamRule, fit_rules, refuse_lookup_options
from parallel3d.tp.collectives import TpAxis
from parallel3d.tp.comm.chunked_gather import gather_linear, obstacle
from parallel3d.tp.comm.linear_overlap import linear
from parallel3d.tp.forwards import (
    SequenceLength,
    TpState,
    finish_sum,
    gather_features,
    split_features,
    take_input,
)
from parallel3d.tp.styles.base import Style
from parallel3d.tp.styles.embedding import VocabParallel, colwise_embedding
from parallel3d.tp.styles.kinds import is_embedding, linear_kind, works_by_element
from parallel3d.tp.styles.sections import Packed, cut_features
from parallel3d.tp.styles.traffic import Traffic, entered, summed

__all__ = ["Colwise", "Rowwise"]


@dataclass(frozen=True)
class Colwise(Style):
    """Output features split over ``tp``: ``nn.Linear`` and transformers' ``Conv1D`` (weight and bias) and
    ``nn.Embedding`` (the width: each rank has all tokens, part of each vector).

    On a parameter: its last dim but one is split, of a parameter of one dim that one.

    Attributes:
        input: ``"replicate"``: whole. ``"sequence"``: a part along ``sequence_dim``, gathered.
            ``"gathered"``: an enclosing :class:`PrepareInput` has prepared it.
        output: ``"shard"``: (..., out / tp). ``"replicate"``: gathered, (..., out).
        multiple_of: never cut inside groups of so many features: the size of a head, so that every
            rank holds whole heads, the first ranks one more if need be. For each section, or for all.
        packed: the output is packed of sections, each of which is split: so many equal ones (2 for fused
            gate and up), or ones of these sizes (fused q, k and v). A ``Packing`` says for each rank which
            features it holds. A gathered output has the order of the plain module's.
        sequence_dim: of the input, when ``input="sequence"``.
        chunks: more than one: the sequence is gathered in so many chunks, one while another is
            multiplied. For a module that reads its input alone, on a backend whose collectives run
            beside a matmul (NCCL). Where that can't be (a sequence that ``tp`` doesn't divide, autocast) a
            warning says so; with ``parallelize(compile=...)`` of its block it is an error.
    """

    choices: ClassVar = {
        "input": ("replicate", "sequence", "gathered"),
        "output": ("shard", "replicate"),
    }

    input: Literal["replicate", "sequence", "gathered"] = "replicate"
    output: Literal["shard", "replicate"] = "shard"
    multiple_of: int | tuple[int, ...] = 1
    packed: Packed = 1
    sequence_dim: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.chunks) is not int or self.chunks < 1:
            raise PlanError(f"chunks={self.chunks!r}: it must be an int, 1 or more")
        if self.chunks > 1 and self.input != "sequence":
            raise PlanError(f'chunks={self.chunks} are of a gathered sequence: input="sequence"')

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if is_embedding(module):
            if self.input != "replicate":
                raise PlanError(f"an nn.Embedding takes token ids: no input={self.input!r} for it")
            refuse_lookup_options(module, scale_grad_by_freq=True)
            self._check_forward(module, nn.Embedding)
            return fit_rules(module, weight=self._cut("embedding_dim", module.embedding_dim, 1, tp))
        kind = linear_kind(self, module)
        self._check_forward(module, kind.base)
        return fit_rules(
            module,
            weight=self._cut(kind.out_name, kind.out_features, kind.out_dim, tp),
            bias=self._cut(kind.out_name, kind.out_features, 0, tp),
        )

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        dim = max(param.dim() - 2, 0)
        return self._cut(f"dim {dim}", param.shape[dim], dim, tp)

    def _cut(self, what: str, size: Any, dim: int, tp: int) -> ParamRule:
        return cut_features(what, size, dim, self.packed, self.multiple_of, tp)

    def _check_forward(self, module: nn.Module, base: type[nn.Module]) -> None:
        whole = (self.input, self.output) == ("replicate", "replicate")
        if not whole and not works_by_element(module, base):
            raise PlanError(
                f"{type(module).__name__} does something of its own with what {base.__name__} takes or "
                'gives, which may need all features; Colwise(output="replicate") gives it all'
            )

    def install(self, module: Any, axis: TpAxis, sequence: SequenceLength) -> None:
        state = TpState(self, axis, sequence)
        state.packing = packing_of(module.weight)
        if isinstance(module, nn.Embedding):
            bind_base_forward(module, nn.Embedding, colwise_embedding, state)
        else:
            bind_base_forward(module, linear_kind(self, module).base, colwise_linear, state)

    def traffic(self, module: Any, tp: int) -> tuple[Traffic, ...]:
        if is_embedding(module):
            width = module.embedding_dim
            return (Traffic("all-gather", "forward", width),) * (self.output == "replicate")
        kind = linear_kind(self, module)
        found = entered(self.input, kind.in_features)
        if self.output == "replicate":
            found += (Traffic("all-gather", "forward", kind.out_features),)
        return found

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
    """Input features of an ``nn.Linear`` or ``Conv1D`` split over ``tp``; the bias is whole and added once,
    after the sum. On an ``nn.Embedding`` it means :class:`VocabParallel`, as in torch.

    On a parameter: its last dim is split; one of one dim, a bias, is whole.

    Attributes:
        input: ``"shard"``: (..., in / tp), what :class:`Colwise` puts out. ``"replicate"``: whole,
            split here.
        output: ``"replicate"``: whole. ``"sequence"``: this rank's part along ``sequence_dim``.
        multiple_of, packed: as in :class:`Colwise`, of the input features.
        sequence_dim: of the output, when ``output="sequence"``.
    """

    choices: ClassVar = {"input": ("shard", "replicate"), "output": ("replicate", "sequence")}

    input: Literal["shard", "replicate"] = "shard"
    output: Literal["replicate", "sequence"] = "replicate"
    multiple_of: int | tuple[int, ...] = 1
    packed: Packed = 1
    sequence_dim: int = 1

    def for_module(self, module: nn.Module) -> Style:
        if isinstance(module, nn.Embedding):
            return VocabParallel(output=self.output, sequence_dim=self.sequence_dim)
        return self

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        kind = linear_kind(self, module)
        whole = (self.input, self.output) == ("replicate", "replicate")
        if not whole and not works_by_element(module, kind.base):
            raise PlanError(
                f"{type(module).__name__} does something of its own before or after the product, which may "
                'need all features; Rowwise(input="replicate") gives it all'
            )
        # Added to a part of the sequence, the bias gets a part of its gradient.
        bias_grad: Literal["whole", "partial"] = "partial" if self.splits_sequence else "whole"
        return fit_rules(
            module,
            weight=cut_features(
                kind.in_name, kind.in_features, kind.in_dim, self.packed, self.multiple_of, tp
            ),
            bias=ParamRule(Replicate(), bias_grad),
        )

    def param_rule(self, param: Tensor, tp: int) -> ParamRule:
        if param.dim() == 1:
            return ParamRule(Replicate())
        dim = param.dim() - 1
        return cut_features(f"dim {dim}", param.shape[dim], dim, self.packed, self.multiple_of, tp)

    def install(self, module: Any, axis: TpAxis, sequence: SequenceLength) -> None:
        state = TpState(self, axis, sequence)
        state.packing = packing_of(module.weight)
        bind_base_forward(module, linear_kind(self, module).base, rowwise_linear, state)

    def traffic(self, module: Any, tp: int) -> tuple[Traffic, ...]:
        kind = linear_kind(self, module)
        found = summed(self.output, kind.out_features)
        if self.input == "replicate":
            found += (Traffic("all-gather", "backward", kind.in_features),)
        return found

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
    weight, y = _as_linear(self), None
    if style.chunks > 1:
        y = _in_chunks(tp, input, weight, self.bias)
    if y is None:
        x = take_input(input, style.input, style.sequence_dim, tp, read_only=True)
        y = linear(x, weight, self.bias)
    return gather_features(y, _sizes(self)[0], tp) if style.output == "replicate" else y


def _in_chunks(tp: TpState, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    style: Any = tp.style
    size = tp.sequence.of(x, style.sequence_dim, tp.axis)
    if tp.axis.size == 1:
        return None
    why_not = obstacle(x, style.sequence_dim, size, tp.axis)
    if why_not:
        if not torch.compiler.is_compiling():  # parallelize(compile=...) has refused it
            warnings.warn(
                f"{style}: the sequence is gathered at once, not in {style.chunks} chunks beside the matmul: "
                f"{why_not}",
                stacklevel=2,
            )
        return None
    return gather_linear(x, weight, bias, style.sequence_dim, style.chunks, tp.axis)


def rowwise_linear(self: Any, input: Tensor) -> Tensor:
    """(..., in / tp), or (..., in) when it is to be split, -> (..., out)."""
    tp: TpState = self._parallel3d_tp
    style: Any = tp.style
    x, weight, features = input, _as_linear(self), _sizes(self)[1]
    if style.input == "replicate":
        x = split_features(x, tp)
    elif isinstance(x.shape[-1], int) and x.shape[-1] == features != weight.shape[1]:
        raise StateError(
            f"a Rowwise linear of {features} input features got all of them, but each tp "
            f'rank\'s part was expected (the output of Colwise). Rowwise(input="replicate") splits '
            "a whole input."
        )
    y = finish_sum(F.linear(x, weight), style.output, style.sequence_dim, tp)
    # After the sum: added before, it would count tp times.
    return y if self.bias is None else y + self.bias


def _as_linear(module: Any) -> Tensor:
    """The weight as ``nn.Linear`` has it, (out, in); Conv1D's is the other way."""
    return module.weight if isinstance(module, nn.Linear) else module.weight.t()


def _sizes(module: Any) -> tuple[int, int]:
    """Output and input features of the plain module."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return module.nf, module.nx
