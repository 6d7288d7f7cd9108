"""Model FLOPs, by the planner's count and by the common formula, and what a device can do at most."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel3d.planner import ModelSpec, gpu, spec_from_module
from parallel3d.planner.constants import constant

CONVENTION = (
    "matmuls (backward 2 x) and attention as it is (causal: half; backward 2.5 x); no embedding, nothing "
    "that is computed again"
)
CONVENTION_6N = "6 N + 12 L h s (PaLM, arXiv:2204.02311, appendix B), N with embeddings"


@dataclass(frozen=True)
class ModelFlops:
    """Forward and backward of one token.

    Attributes:
        per_token: by ``CONVENTION``: what the planner's ``mfu`` counts.
        per_token_6n: by ``CONVENTION_6N``: what most others report.
    """

    per_token: float
    per_token_6n: float


def model_flops(model: nn.Module | ModelSpec, seq_len: int, **options: Any) -> ModelFlops:
    """The FLOPs of training ``model`` on sequences of ``seq_len`` tokens.

    Args:
        model: a plain one, also on meta, before ``parallelize``; or the planner's description of it.
        options: ``example``, ``units`` and so on of ``planner.spec_from_module``.

    Raises:
        PlanningError: the model can't be looked into; see ``spec_from_module``.
    """
    if isinstance(model, ModelSpec):
        spec = model
    else:
        spec = spec_from_module(model, **{"tp_plan": None, **options})
    again = 1 + constant("attention_backward").value
    exact = scores = 0.0
    for unit in spec.units:
        exact += unit.count * sum(6.0 * m.n * m.k for m in unit.matmuls)
        for a in unit.attention:
            forward = 4.0 * seq_len * a.heads * a.head_dim
            exact += unit.count * again * forward / (2 if a.causal else 1)
            scores += unit.count * 3 * forward
    return ModelFlops(exact, 6.0 * spec.numel + scores)


_NAMES = (
    (r"\bmig\b", None),  # a part of a device
    ("gb300", None),
    ("mi355x", "mi355x"),
    ("mi325x", "mi325x"),
    ("mi300x", "mi300x"),
    ("gb200", "gb200"),
    ("gh200", "gh200"),
    ("b300", "b300"),
    ("b200", "b200"),
    ("h200 nvl", None),
    ("h200", "h200"),
    ("h800.*pcie", None),
    ("h800", "h800"),
    ("h100 nvl", "h100-nvl"),
    ("h100 pcie", "h100-pcie"),
    ("h100 80gb", "h100"),
    ("h100", "h100-96gb-sxm-500w"),
    ("h20(?![0-9])", "h20"),
    ("a800.*pcie", None),
    ("a800", "a800"),
    ("a100.*pcie.*40gb", "a100-40gb-pcie"),
    ("a100.*(pcie|80gb pcie)", "a100-80gb-pcie"),
    ("a100.*40gb", "a100-40gb"),
    ("a100", "a100-80gb"),
    ("l40s", "l40s"),
)
"""What torch calls a device, as a pattern -> the planner's name; the first that fits."""


def peak_of_device(device_type: str) -> float | None:
    """Dense bf16 peak of this process's device by the planner's table, FLOP/s; None where it isn't there."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return None
    return peak_by_name(torch.cuda.get_device_name())


def peak_by_name(name: str) -> float | None:
    """The same of a device that torch calls ``name``."""
    for pattern, known in _NAMES:
        if re.search(pattern, name.lower()):
            return None if known is None else gpu(known).peak * 1e12
    return None
