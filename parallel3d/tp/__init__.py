"""Tensor parallelism on local tensors: styles, plans, and the collectives under them."""

from parallel3d.tp.collectives import (
    TpAxis,
    copy_to_tp,
    gather_from_tp,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
    scatter_sequence,
    split_to_tp,
)
from parallel3d.tp.logits_head import LogitsHead
from parallel3d.tp.loss import linear_cross_entropy, vocab_parallel_cross_entropy
from parallel3d.tp.names import STYLE_NAMES, parse_style
from parallel3d.tp.plan import PlannedModule, PlannedParam, ResolvedPlan, resolve_plan
from parallel3d.tp.same_batch import check_same_batch
from parallel3d.tp.styles import (
    Colwise,
    PrepareInput,
    Replicated,
    Rowwise,
    SequenceParallel,
    Style,
    VocabParallel,
)
from parallel3d.tp.vocab_logits import VocabLogits

__all__ = [
    "STYLE_NAMES",
    "Colwise",
    "LogitsHead",
    "PlannedModule",
    "PlannedParam",
    "PrepareInput",
    "Replicated",
    "ResolvedPlan",
    "Rowwise",
    "SequenceParallel",
    "Style",
    "TpAxis",
    "VocabLogits",
    "VocabParallel",
    "check_same_batch",
    "copy_to_tp",
    "gather_from_tp",
    "gather_sequence",
    "linear_cross_entropy",
    "parse_style",
    "reduce_from_tp",
    "reduce_scatter_sequence",
    "resolve_plan",
    "scatter_sequence",
    "split_to_tp",
    "vocab_parallel_cross_entropy",
]
