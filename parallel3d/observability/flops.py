"""Model FLOPs, by the planner's count and by the common formula, and the peak FLOP/s of a device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel3d.planner import ModelSpec, gpu, spec_from_module
from parallel3d.planner.constants import constant

CONVENTION = (
    "matmuls (backward 2 x) and attention (causal: half of the scores; backward 2.5 x); no embedding, no "
    "recomputation"
)


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward for one token.

    Attributes:
        per_token: by ``CONVENTION``, as the planner's ``mfu`` counts.
        per_token_6n: 6 N + 12 L h s (PaLM, arXiv:2204.02311, appendix B), N with embeddings, as most count.
    """

    per_token: float
    per_token_6n: float


def model_flops(model: nn.Module | ModelSpec, seq_len: int, **options: Any) -> ModelFlops:
    """Returns the FLOPs of training ``model`` on sequences of ``seq_len`` tokens.

    Args:
        model: a plain model before ``parallelize``, which may be on meta; or the planner's description of it.
        options: of ``planner.spec_from_module``, such as ``example`` and ``units``.

    Raises:
        PlanningError: the model can't be analysed; see ``spec_from_module``.
    """
    spec = model
    if not isinstance(spec, ModelSpec):
        spec = spec_from_module(spec, **{"tp_plan": None, **options})
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
    (r"\bmig\b", None),  # a slice of a device
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
"""(pattern of torch's device name, the planner's name or None); the first that matches counts."""


def peak_of_device(device_type: str) -> float | None:
    """Returns the dense bf16 peak of this process's device in FLOP/s, or None if the planner lacks it."""
    on_gpu = device_type == "cuda" and torch.cuda.is_available()
    return peak_by_name(torch.cuda.get_device_name()) if on_gpu else None


def peak_by_name(name: str) -> float | None:
    """Returns the same for the device that torch calls ``name``."""
    known = next((known for pattern, known in _NAMES if re.search(pattern, name.lower())), None)
    return None if known is None else gpu(known).peak * 1e12
