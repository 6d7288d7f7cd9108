"""Bytes that forward keeps for backward, for one micro-batch on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from parallel3d.planner.cluster import Gpu
from parallel3d.planner.kernels import attention_kernel, local_heads, local_sizes, share
from parallel3d.planner.model_spec import Activation, ModelSpec, Unit
from parallel3d.planner.workload import Workload

__all__ = ["Activations", "activations_of", "logit_bytes"]

_NAIVE = (
    5  # bytes a score: softmax's output, dropout's mask and output (arXiv:2205.05198, section 4.1)
)
_LOGIT = {  # bytes a logit at the peak of the loss
    "fused": 6,  # bf16 logits, fp32 softmax, whose gradient is written into it
    "compiled": 12,  # bf16 logits, fp32 log_softmax, fp32 gradient, bf16 gradient
    "eager": 14,  # bf16 logits, fp32 log_softmax, its gradient, the fp32 logits' one
}


@dataclass(frozen=True)
class Activations:
    """Bytes.

    Attributes:
        kept: of all units, at the end of forward.
        block: what one block has at its backward beyond what was kept of it: computed again.
        gathered: inputs that tensor parallelism gathers for a moment, or sums.
        logits: logits, loss and their gradients at the peak.
    """

    kept: int
    block: int
    gathered: int
    logits: int


def activations_of(
    model: ModelSpec, gpu: Gpu, work: Workload, tp: int, micro_batch: int
) -> Activations:
    """Of ``micro_batch`` sequences."""
    tokens = micro_batch * work.seq_len
    kept = live = 0.0
    for unit in model.units:
        whole = _bytes(unit, unit.activations, gpu, work, tp)
        mine = _kept(unit, whole, gpu, work, tp)
        kept += unit.count * mine
        if unit.kind == "block":
            live = max(live, whole - mine if work.checkpointing != "selective_layer" else whole)
    if work.checkpointing in ("none", "selective_layer"):
        live = 0.0 if work.checkpointing == "none" else live
    features = max((n for u in model.units for n in u.tp_inputs + u.tp_outputs), default=0)
    gathered = 3 * features * tokens * work.compute_itemsize if tp > 1 else 0
    logits = ceil(model.vocab / share("loss", work, tp)) * tokens * logit_bytes(work)
    return Activations(int(kept * tokens), int(live * tokens), int(gathered), int(logits))


def logit_bytes(work: Workload) -> int:
    """Bytes a logit at the peak of the loss."""
    return _LOGIT["fused" if work.fused_loss else "compiled" if work.compile else "eager"]


def _kept(unit: Unit, whole: float, gpu: Gpu, work: Workload, tp: int) -> float:
    """Bytes a token that stay of one unit until its backward."""
    if unit.kind != "block" or work.checkpointing == "none":
        return whole
    entry = _input(unit, work, tp)
    if work.checkpointing == "full":
        return entry
    if work.checkpointing == "selective_layer":
        return (whole + entry) / 2
    outputs = sum(
        local_sizes(m, tp)[0] / (1 if m.split == "n" else share("sequence", work, tp))
        for m in unit.matmuls[0::2]
    )
    attended = [a for a in unit.activations if a.of == "attention"]
    return entry + outputs * work.compute_itemsize + _bytes(unit, attended, gpu, work, tp)


def _input(unit: Unit, work: Workload, tp: int) -> float:
    features = unit.tp_outputs[0] if unit.tp_outputs else unit.matmuls[0].k if unit.matmuls else 0
    return features / share("sequence", work, tp) * work.compute_itemsize


def _bytes(
    unit: Unit,
    activations: list[Activation] | tuple[Activation, ...],
    gpu: Gpu,
    work: Workload,
    tp: int,
) -> float:
    """Bytes a token of these."""
    found = 0.0
    for each in activations:
        fused = work.compile or (each.of == "norm" and work.fused_norm)
        if each.eager_only and fused:
            continue
        part = share(each.split, work, tp, unit.attention)
        found += each.elements * (each.itemsize or work.compute_itemsize) / part
    if unit.attention and attention_kernel(gpu, work) == "naive" and activations:
        found += sum(local_heads(a, tp).query * work.seq_len * _NAIVE for a in unit.attention)
    return found
