"""VocabParallel: the vocabulary of an embedding split over ``tp``."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from parallel3d._torch.autograd import assert_async
from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, fit_rules, refuse_lookup_options
from parallel3d.tp.collectives import SequenceLength, TpAxis
from parallel3d.tp.forwards import TpState, bind_base_forward, finish_sum, gather_features
from parallel3d.tp.styles.base import (
    LayoutStyle,
    Traffic,
    is_embedding,
    sum_traffic,
    works_by_element,
)


@dataclass(frozen=True)
class VocabParallel(LayoutStyle):
    """Splits the vocabulary of an ``nn.Embedding`` over ``tp``: each rank looks up the tokens that it holds.
    ``padding_idx`` works; ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` raise.

    Attributes:
        output: ``"replicate"``: whole. ``"sequence"``: this rank's part along ``sequence_dim``.
        sequence_dim: the sequence dim of the output, when ``output="sequence"``.
    """

    choices: ClassVar = {"output": ("replicate", "sequence")}

    output: Literal["replicate", "sequence"] = "replicate"
    sequence_dim: int = 1

    def plan(self, module: nn.Module, tp: int) -> dict[str, ParamRule]:
        if not is_embedding(module):
            raise PlanError(
                f"VocabParallel is for nn.Embedding with its own forward, not {type(module).__name__}"
            )
        if self.splits_sequence and not works_by_element(module, nn.Embedding):
            raise PlanError(
                f"{type(module).__name__} does something with what it looks up, which may need the whole "
                'sequence; VocabParallel(output="replicate") gives it all'
            )
        refuse_lookup_options(module, scale_grad_by_freq=False)
        return fit_rules(module, weight=ParamRule(Shard(0)))

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        state = TpState(self, axis, sequence)
        bind_base_forward(module, nn.Embedding, vocab_parallel_embedding, state)

    def traffic(self, module: Any, tp: int) -> tuple[Traffic, ...]:
        return sum_traffic(self.output, module.embedding_dim)


def colwise_embedding(self: Any, input: Tensor) -> Tensor:
    """(...) ids -> (..., width / tp), or (..., width) if gathered."""
    tp: TpState = self._parallel3d_tp
    y = tp.inner(self, input)
    return gather_features(y, self.embedding_dim, tp) if tp.style.output == "replicate" else y


def vocab_parallel_embedding(self: Any, input: Tensor) -> Tensor:
    """(...) ids -> (..., width): each rank looks up the ids that it holds, and zeros for the others.

    An id outside the vocabulary is an error on every rank, as in the plain module.
    """
    tp: TpState = self._parallel3d_tp
    size, chunk = self.num_embeddings, tp.axis.chunk(self.num_embeddings)
    start = tp.axis.rank * chunk
    ids = input
    if isinstance(start, torch.SymInt):  # simulated ranks: a factory call makes one tensor each
        ids = torch.empty(ids.shape, dtype=ids.dtype, device=ids.device).copy_(ids)
    assert_async(((ids >= 0) & (ids < size)).all(), f"an id is outside the vocabulary of {size}")
    local = ids - start
    elsewhere = (local < 0) | (local >= chunk)
    weight = self.weight
    if chunk * (tp.axis.size - 1) >= size:  # the last rank holds no row
        weight = F.pad(weight, (0, 0, 0, 1))  # a row for id 0
    y = F.embedding(local.masked_fill(elsewhere, 0), weight)
    y = y.masked_fill(elsewhere.unsqueeze(-1), 0)
    if self.padding_idx is not None:  # its row is looked up but not trained
        y = torch.where((ids == self.padding_idx).unsqueeze(-1), y.detach(), y)
    return finish_sum(y, tp.style.output, tp.style.sequence_dim, tp)
