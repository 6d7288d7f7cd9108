"""Model FLOPs, by the planner's count and by the common formula, and the peak FLOP/s of a device."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel3d.planner import ModelSpec, gpus, spec_from_module
from parallel3d.planner.cluster import Gpu
from parallel3d.planner.constants import constant

CONVENTION = (
    "matmuls (backward 2 x) and attention (causal: half of the scores; backward 2.5 x); no embedding, no "
    "recomputation"
)


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward for one token.

    Attributes:
        per_token: counted by the planner's ``CONVENTION``, as for its ``mfu``.
        per_token_6n: 6 N + 12 L h s (PaLM, arXiv:2204.02311, appendix B), N with embeddings, as most count.
    """

    per_token: float
    per_token_6n: float


def model_flops(model: nn.Module | ModelSpec, seq_len: int, **options: Any) -> ModelFlops:
    """Returns the FLOPs of training ``model`` on sequences of ``seq_len`` tokens.

    Args:
        model: a plain model before ``parallelize``, which may be on meta; or the planner's description of it.
        seq_len: tokens of a whole sequence, also where cp ranks share it.
        options: options of ``planner.spec_from_module``, such as ``example`` and ``units``.

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


_FORMS = ("pcie", "nvl", "sxm")


def gpus_called(device: str) -> list[Gpu]:
    """Returns the planner's GPUs that match a device's name in torch: family and form (SXM, PCIe, NVL)."""
    words = re.split("[-_ ]", device.lower())
    form = next((f for f in _FORMS if any(word.startswith(f) for word in words)), "sxm")
    return [
        gpu
        for gpu in gpus().values()
        if gpu.family in words
        and "mig" not in words  # a slice of a device
        and (form in gpu.name or not any(f in gpu.name for f in _FORMS))
    ]


def peak_of_device(device_type: str) -> float | None:
    """Returns the dense bf16 peak of this process's device in FLOP/s, or None if the planner lacks it."""
    on_gpu = device_type == "cuda" and torch.cuda.is_available()
    return peak_by_name(torch.cuda.get_device_name()) if on_gpu else None


def peak_by_name(name: str) -> float | None:
    """Returns the dense bf16 peak in FLOP/s of the device that torch calls ``name``; None if unknown."""
    peaks = {gpu.peak for gpu in gpus_called(name)}
    return peaks.pop() * 1e12 if len(peaks) == 1 else None
