"""The names styles go by in plans."""

import difflib
from typing import Any

from torch.distributed.tensor.parallel import ParallelStyle

from parallel3d.errors import PlanError
from parallel3d.tp.styles import (
    Colwise,
    Experts,
    IdentityExpert,
    LocalParams,
    PrepareOutput,
    Replicated,
    RopeOutput,
    Rowwise,
    SequenceParallel,
    SplitHeads,
    Style,
    VocabParallel,
)
from parallel3d.tp.torch_styles import TorchStyle

__all__ = ["STYLE_NAMES", "parse_style"]

STYLE_NAMES: dict[str, Style] = {
    "attention": SplitHeads(),
    "colwise": Colwise(),
    "colwise_gather_output": Colwise(output="replicate"),
    "colwise_rep": Colwise(output="replicate"),
    "rowwise": Rowwise(),
    "rowwise_split_input": Rowwise(input="replicate"),
    "rowwise_rep": Rowwise(input="replicate"),
    "packed_colwise": Colwise(packed=2),
    "packed_rowwise": Rowwise(packed=2),
    "embedding": VocabParallel(),
    "embedding_rowwise": VocabParallel(),
    "embedding_colwise": Colwise(output="replicate"),
    "sequence_parallel": SequenceParallel(),
    "replicate": Replicated(),
    "replicated": Replicated(),
    "replicated_with_grad_allreduce": Replicated("partial"),
    "moe_tp_experts": Experts(),
    "moe_identity_expert": IdentityExpert(),
    "local_params": LocalParams(),
    "mla_kv_a_proj": RopeOutput(),
    "all_reduce": PrepareOutput(),
}
"""The names that rules of a plan may have, Hugging Face's old and new ones, and the styles they stand for."""
"""Hugging Face's names, old and new, and the style each means."""

_EXPERT_PARALLEL = ("grouped_gemm", "ep_", "moe_ep")


def parse_style(value: Any) -> Style:
    """A style, the style a name stands for, or one around one of torch's.

    Raises:
        PlanError: an unknown name, or neither a name nor a style.
    """
    if isinstance(value, Style):
        return value
    if isinstance(value, ParallelStyle):
        return TorchStyle(value)
    if not isinstance(value, str):
        raise PlanError(f"a style is a name or a Style, not {type(value).__name__} ({value!r})")
    if value.startswith(_EXPERT_PARALLEL):
        raise PlanError(
            f"style {value!r} is expert parallelism, which gives ranks different experts; tensor "
            "parallelism splits every expert: 'packed_colwise' and 'rowwise' for its weights, "
            "'moe_tp_experts' for their module"
        )
    if value not in STYLE_NAMES:
        near = difflib.get_close_matches(value, STYLE_NAMES, 1, 0.0)[0]
        raise PlanError(
            f"unknown style {value!r}; did you mean {near!r}? Known: {', '.join(STYLE_NAMES)}"
        )
    return STYLE_NAMES[value]
