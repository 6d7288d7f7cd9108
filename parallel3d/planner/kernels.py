"""Seconds of a unit's kernels on one GPU: matmuls, attention, elementwise ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from parallel3d.planner.cluster import Gpu
from parallel3d.planner.constants import constant
from parallel3d.planner.model_spec import (
    Activation,
    Attention,
    Elementwise,
    Matmul,
    ModelSpec,
    Unit,
)
from parallel3d.planner.workload import Workload

# How attention's heads are shared by tensor-parallel ranks: what the fullest rank has.
#
# The same arithmetic as ``tp/auto/heads.py``, without torch;
# ``tests/planner/test_head_shares.py`` compares the two.


class HeadShare(NamedTuple):
    """Heads of the fullest rank.

    Attributes:
        query: of queries. kv: of keys and values that it computes. paired: of keys and values that go into
            attention: one comes as often as query heads need it, where they need different numbers.
    """

    query: int
    kv: int
    paired: int


@lru_cache(maxsize=4096)
def head_share(heads: int, kv_heads: int, tp: int) -> HeadShare:
    """Of ``heads`` query heads and ``kv_heads`` of keys and values on ``tp`` ranks.

    Groups that attend to one key and value stay together, ceil(kv_heads / tp) of them; with fewer than
    ranks, query heads are shared, and each rank has the keys and values that its own need; with fewer query
    heads than ranks each computes all.
    """
    if heads < tp:
        return HeadShare(heads, kv_heads, kv_heads)
    if kv_heads >= tp:
        groups = -(-kv_heads // tp)
        return HeadShare(groups * (heads // kv_heads), groups, groups)
    group, first, wanted = heads // kv_heads, 0, []
    for rank in range(tp):
        mine = heads // tp + (rank < heads % tp)
        wanted.append([head // group for head in range(first, first + mine)])
        first += mine
    each = [set(kv) for kv in wanted]
    alike = len({kv.count(head) for kv, own in zip(wanted, each, strict=True) for head in own}) == 1
    query, span = max(map(len, wanted)), max(map(len, each))
    return HeadShare(query, span, span if alike else query)


def rows_computed(size: int, heads: tuple[int, int] | None, kv: bool, tp: int) -> int:
    """Of ``size`` features that ``tp`` divides, those that the fullest rank computes.

    Args:
        heads: (query, key and value heads) that they are made of, if they are; kv: whether of the latter.
    """
    if heads is None or tp == 1:
        return -(-size // tp)
    share = head_share(*heads, tp)
    return size * share.kv // heads[1] if kv else size * share.query // heads[0]


@dataclass(frozen=True)
class Kernels:
    """Seconds of one unit for one micro-batch on one GPU, without communication.

    Attributes:
        matmul, attention, elementwise: (forward, backward).
        again: what checkpointing computes again in backward.
        flops: (forward, backward, again) of matmuls and attention.
        launches: (forward, backward) seconds that the host needs to start them.
    """

    matmul: tuple[float, float]
    attention: tuple[float, float]
    elementwise: tuple[float, float]
    again: float
    flops: tuple[float, float, float]
    launches: tuple[float, float]

    @property
    def forward(self) -> float:
        return max(self.matmul[0] + self.attention[0] + self.elementwise[0], self.launches[0])

    @property
    def backward(self) -> float:
        own = self.matmul[1] + self.attention[1] + self.elementwise[1]
        return max(own, self.launches[1]) + self.again


@lru_cache(maxsize=4096)
def kernels_of(unit: Unit, gpu: Gpu, work: Workload, tp: int, micro_batch: int) -> Kernels:
    """Of ``unit`` with ``micro_batch`` sequences, its layers divided over ``tp`` GPUs."""
    gemms = gemms_of(unit, gpu, work, tp, micro_batch)
    each = [seconds for _, way, _, seconds in gemms if way == "forward"]
    attention = [attention_time(a, gpu, work, tp, micro_batch) for a in unit.attention]
    counted = [elements(e, unit, work, tp) for e in unit.elementwise]
    rate = memory_rate(gpu)
    size = micro_batch * work.seq_len * work.compute_itemsize / rate
    matmul = sum(each), sum(seconds for _, way, _, seconds in gemms if way != "forward")
    attended = sum(a[0] for a in attention), sum(a[1] for a in attention)
    elementwise = sum(e[0] for e in counted) * size, sum(e[1] for e in counted) * size
    again = 0.0
    block = unit.kind == "block"
    if block and work.checkpointing == "full":
        again = matmul[0] + attended[0] + elementwise[0]
    elif block and work.checkpointing == "selective_layer":
        again = (matmul[0] + attended[0] + elementwise[0]) / 2
    elif block and work.checkpointing == "selective_op":
        again = sum(each[1::2]) + elementwise[0]
    return Kernels(
        matmul,
        attended,
        elementwise,
        again,
        _flops(unit, work, tp, micro_batch),
        _launches(unit, work),
    )


def memory_rate(gpu: Gpu) -> float:
    """Bytes a second that stream kernels reach."""
    return gpu.bandwidth * 1e12 * constant("memory_efficiency").value


def matmul_rate(gpu: Gpu) -> float:
    """FLOP/s of large matmuls in training."""
    return gpu.peak * 1e12 * gpu.gemm_efficiency * gpu.power * constant("gemm_sustained").value


def local_sizes(matmul: Matmul, tp: int) -> tuple[int, int]:
    """n and k of the fullest rank."""
    n, k, split = matmul.n, matmul.k, matmul.split
    if split == "n":
        return rows_computed(n, matmul.heads, matmul.kv, tp), k
    return (n, rows_computed(k, matmul.heads, matmul.kv, tp)) if split == "k" else (n, k)


def local_heads(attention: Attention, tp: int) -> HeadShare:
    """Heads of the fullest rank."""
    if not attention.fused:
        return head_share(attention.heads, attention.kv_heads, tp)
    groups = head_share(attention.kv_heads, attention.kv_heads, tp).kv
    return HeadShare(groups * (attention.heads // attention.kv_heads), groups, groups)


def gemms_of(
    unit: Unit, gpu: Gpu, work: Workload, tp: int, micro_batch: int
) -> list[tuple[str, str, tuple[int, int, int], float]]:
    """(name, "forward", "input gradient" or "weight gradient", (m, n, k), seconds) of one unit's matmuls."""
    tokens = micro_batch * work.seq_len
    found = []
    for each in unit.matmuls:
        n, k = local_sizes(each, tp)
        found.append((each.name, "forward", (tokens, n, k)))
        if each.input_gradient:
            found.append((each.name, "input gradient", (tokens, k, n)))
        found.append((each.name, "weight gradient", (n, k, tokens)))
    itemsize = work.compute_itemsize
    return [(name, way, sizes, gemm_time(*sizes, gpu, itemsize)) for name, way, sizes in found]


@lru_cache(maxsize=65536)
def gemm_time(m: int, n: int, k: int, gpu: Gpu, itemsize: int) -> float:
    """start + (compute^p + memory^p)^(1/p): FLOPs / (peak * efficiency * (TFLOPs)^growth), bytes / rate.

    Args:
        itemsize: bytes of an element of what is multiplied.
    """
    wide = gpu.fp32_slowdown if itemsize > 2 else 1
    flops = 2.0 * m * n * k
    growth = (flops / 1e12) ** constant("gemm_growth").value
    compute = flops * wide / (matmul_rate(gpu) * growth)
    memory = (m * k + k * n + m * n) * itemsize / memory_rate(gpu)
    p = constant("roofline_power").value
    return gpu.gemm_start_us * 1e-6 + (compute**p + memory**p) ** (1 / p)


def attention_kernel(gpu: Gpu, work: Workload) -> str:
    """The kernel that the workload names, or the best that there is for this GPU."""
    return best_attention(gpu) if work.attention is None else work.attention


def best_attention(gpu: Gpu) -> str:
    """The fastest kernel that torch has for this GPU."""
    return "cudnn" if gpu.family in ("h100", "h200", "b200", "gb200") else "flash2"


def attention_time(
    attention: Attention, gpu: Gpu, work: Workload, tp: int, micro_batch: int
) -> tuple[float, float]:
    """(forward, backward) seconds of the attention of one unit."""
    heads, seq = local_heads(attention, tp).query, work.seq_len
    scores = micro_batch * heads * seq * seq
    whole = 4 * scores * attention.head_dim
    kernel = attention_kernel(gpu, work)
    if kernel == "naive":
        slow = 1 if work.compute_itemsize == 2 else gpu.fp32_slowdown
        rate, memory = (
            matmul_rate(gpu) / slow,
            scores * work.compute_itemsize / 2 / memory_rate(gpu),
        )
        forward = constant("naive_forward").value * memory
        backward = constant("naive_backward").value * memory
        return whole / rate + forward, 2 * whole / rate + backward
    flops = whole / 2 if attention.causal else whole
    forward = flops / attention_rate(gpu, kernel, seq, attention.head_dim, work.compute_itemsize)
    return forward, forward * constant("attention_backward").value


def attention_rate(gpu: Gpu, kernel: str, seq: int, head_dim: int, itemsize: int) -> float:
    """FLOP/s of a fused attention ``kernel`` (not ``naive``)."""
    efficiency = constant(f"attention_{kernel}").value
    if kernel == "flash2" and gpu.family not in ("a100", "mi300x"):
        efficiency *= constant("flash2_after_ampere").value
    if head_dim <= 64:
        efficiency *= constant("head_dim_64").value
    efficiency *= seq / (seq + constant("attention_ramp").value)
    wide = gpu.fp32_slowdown if itemsize > 2 else 1
    return efficiency * gpu.peak * 1e12 * gpu.power / wide


def elements(each: Elementwise, unit: Unit, work: Workload, tp: int) -> tuple[float, float]:
    """(forward, backward) elements for one token on one GPU."""
    fused = work.compile or (each.norm and work.fused_norm)
    forward, backward = each.fused if fused else each.eager
    part = share(each.split, work, tp, unit.attention)
    return forward / part, backward / part


def share(
    split: str, work: Workload, tp: int, attention: tuple[Attention, ...] = ()
) -> int | float:
    """Over how many GPUs something of one token is divided, as the fullest sees it."""
    if split in ("heads", "kv") and attention:
        each, mine = attention[0], local_heads(attention[0], tp)
        return each.heads / mine.query if split == "heads" else each.kv_heads / mine.paired
    if split in ("tp", "heads", "kv"):
        return tp
    if split == "sequence":
        return tp if work.sequence_parallel else 1
    if (
        split == "gathered"
    ):  # Megatron, whose ZeRO-1 this is, keeps the part and gathers again in backward
        return tp if work.sequence_parallel and work.sharding != "fsdp" else 1
    if split == "loss":
        return tp if work.loss_parallel else 1
    return 1


def _flops(unit: Unit, work: Workload, tp: int, micro_batch: int) -> tuple[float, float, float]:
    tokens = micro_batch * work.seq_len
    each = [2.0 * tokens * n * k for m in unit.matmuls for n, k in [local_sizes(m, tp)]]
    attention = sum(
        4.0
        * micro_batch
        * local_heads(a, tp).query
        * work.seq_len**2
        * a.head_dim
        / (2 if a.causal else 1)
        for a in unit.attention
    )
    forward = sum(each) + attention
    backward = 2 * sum(each) + attention * constant("attention_backward").value
    again = 0.0
    if unit.kind == "block":
        again = {
            "full": forward,
            "selective_layer": forward / 2,
            "selective_op": sum(each[1::2]),
        }.get(work.checkpointing, 0.0)
    return forward, backward, again


def _launches(unit: Unit, work: Workload) -> tuple[float, float]:
    forward = len(unit.matmuls) + len(unit.attention)
    backward = 2 * forward
    if work.compile:
        forward, backward = forward + len(unit.elementwise), backward + len(unit.elementwise)
    else:
        forward += sum(e.kernels[0] for e in unit.elementwise)
        backward += sum(e.kernels[1] for e in unit.elementwise)
    host = constant("launch").value
    return forward * host, backward * host


# Bytes that forward keeps for backward, for one micro-batch on one GPU.

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
