"""Seconds of a unit's kernels on one GPU: matmuls, attention, elementwise ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, prod
from typing import NamedTuple

from parallel3d.fsdp.layout import ceil_div
from parallel3d.planner.cluster import Gpu
from parallel3d.planner.constants import Constant, constant
from parallel3d.planner.model_spec import (
    Activation,
    Attention,
    Elementwise,
    Matmul,
    ModelSpec,
    Unit,
)
from parallel3d.planner.workload import Workload

# How attention's heads are shared by tensor-parallel ranks: what the fullest rank has. The same arithmetic as
# ``tp/auto/heads.py``, without torch; ``tests/planner/test_head_shares.py`` compares the two.


class HeadShare(NamedTuple):
    """Numbers of heads of the fullest rank.

    Attributes:
        query: query heads.
        kv: key and value heads that it computes.
        paired: key and value heads that go into attention. Where query heads need different numbers of them,
            each is repeated as often as query heads need it.
    """

    query: int
    kv: int
    paired: int


@lru_cache(maxsize=4096)
def head_share(heads: int, kv_heads: int, tp: int, fused: bool = False) -> HeadShare:
    """How ``heads`` query heads and ``kv_heads`` key and value heads are divided over ``tp`` ranks.

    Query heads that attend to one key and value head stay together: a rank has ceil(kv_heads / tp) such
    groups. With fewer key and value heads than ranks the query heads are divided, and each rank has the keys
    and values that its own need; but a ``fused`` matrix of queries, keys and values is then whole on each.
    With fewer query heads than ranks each rank computes all heads.
    """
    if heads < tp or (fused and kv_heads < tp):
        return HeadShare(heads, kv_heads, kv_heads)
    if kv_heads >= tp:
        groups = ceil_div(kv_heads, tp)
        return HeadShare(groups * (heads // kv_heads), groups, groups)
    ends = [rank * (heads // tp) + min(rank, heads % tp) for rank in range(tp + 1)]
    # Of each rank: key and value head -> how many of its query heads attend to it.
    wanted = [Counter(n * kv_heads // heads for n in range(*own)) for own in pairwise(ends)]
    alike = len({number for own in wanted for number in own.values()}) == 1
    query, span = ceil_div(heads, tp), max(map(len, wanted))
    return HeadShare(query, span, span if alike else query)


def rows_computed(size: int, heads: tuple[int, int] | None, kv: bool, tp: int) -> int:
    """How many of ``size`` features, which ``tp`` divides, the fullest rank computes.

    Args:
        heads: (query heads, key and value heads) if the features are made of heads.
        kv: whether they are made of key and value heads.
    """
    if heads is None or tp == 1:
        return ceil_div(size, tp)
    share = head_share(*heads, tp)
    return size * share.kv // heads[1] if kv else size * share.query // heads[0]


@dataclass(frozen=True)
class Kernels:
    """Seconds of one unit for one micro-batch on one GPU, without communication.

    Attributes:
        matmul, attention, elementwise: (forward, backward).
        again: forward kernels that checkpointing computes again in backward.
        flops: FLOPs of matmuls and attention: (forward, backward, again).
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
    """The kernels of ``unit`` with ``micro_batch`` sequences, its layers divided over ``tp`` GPUs."""
    gemms = gemms_of(unit, gpu, work, tp, micro_batch)
    each = [seconds for _, way, _, seconds in gemms if way == "forward"]
    attention = [attention_time(a, gpu, work, tp, micro_batch) for a in unit.attention]
    counted = [elements(e, unit, work, tp) for e in unit.elementwise]
    size = micro_batch * work.seq_len * work.compute_itemsize / memory_rate(gpu)
    matmul = sum(each), sum(seconds for _, way, _, seconds in gemms if way != "forward")
    attended = sum(a[0] for a in attention), sum(a[1] for a in attention)
    elementwise = sum(e[0] for e in counted) * size, sum(e[1] for e in counted) * size
    forward = matmul[0] + attended[0] + elementwise[0]
    flops = [2.0 * m * n * k for _, way, (m, n, k), _ in gemms if way == "forward"]
    scored = 0.0
    for a in unit.attention:
        scores = micro_batch * local_heads(a, tp).query * work.seq_len**2
        scored += 4.0 * scores * a.head_dim / (2 if a.causal else 1)
    all_flops = sum(flops) + scored
    backward_flops = 2 * sum(flops) + scored * constant("attention_backward").value
    started = [(1, 1) if work.compile else e.kernels for e in unit.elementwise]
    started += [(1, 2)] * (len(unit.matmuls) + len(unit.attention))
    host = constant("launch").value
    return Kernels(
        matmul,
        attended,
        elementwise,
        _recomputed(unit, work, forward, each, elementwise[0]),
        (all_flops, backward_flops, _recomputed(unit, work, all_flops, flops, 0.0)),
        (sum(n for n, _ in started) * host, sum(n for _, n in started) * host),
    )


def _recomputed(
    unit: Unit, work: Workload, forward: float, matmuls: list[float], elementwise: float
) -> float:
    """The part of ``forward`` (seconds or FLOPs) that checkpointing computes again in backward.

    Args:
        matmuls: of each matmul; elementwise: of all elementwise kernels.
    """
    if unit.kind != "block":
        return 0.0
    return {
        "none": 0.0,
        "full": forward,
        "selective_layer": forward / 2,
        "selective_op": sum(matmuls[1::2]) + elementwise,
    }[work.checkpointing]


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
    return head_share(attention.heads, attention.kv_heads, tp, attention.fused)


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
    return work.attention or best_attention(gpu)


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
        rate = matmul_rate(gpu) / (1 if work.compute_itemsize == 2 else gpu.fp32_slowdown)
        memory = scores * work.compute_itemsize / 2 / memory_rate(gpu)
        forward = constant("naive_forward").value * memory
        backward = constant("naive_backward").value * memory
        return whole / rate + forward, 2 * whole / rate + backward
    flops = whole / 2 if attention.causal else whole
    forward = flops / attention_rate(gpu, kernel, seq, attention.head_dim, work.compute_itemsize)
    return forward, forward * constant("attention_backward").value


def attention_rate(gpu: Gpu, kernel: str, seq: int, head_dim: int, itemsize: int) -> float:
    """FLOP/s of a fused attention ``kernel`` (not ``naive``)."""
    constants = attention_constants(gpu, kernel, head_dim)
    ramp = constants.pop("ramp").value
    efficiency = prod(each.value for each in constants.values()) * (seq / (seq + ramp))
    wide = gpu.fp32_slowdown if itemsize > 2 else 1
    return efficiency * gpu.peak * 1e12 * gpu.power / wide


def attention_constants(gpu: Gpu, kernel: str, head_dim: int) -> dict[str, Constant]:
    """The ramp of a fused attention ``kernel``, and what its efficiency is the product of."""
    used = {"efficiency": f"attention_{kernel}", "ramp": "attention_ramp"}
    if kernel == "flash2" and gpu.family not in ("a100", "mi300x"):
        used["after Ampere"] = "flash2_after_ampere"
    if head_dim <= 64:
        used["efficiency at 64"] = "head_dim_64"
    return {name: constant(each) for name, each in used.items()}


def elements(each: Elementwise, unit: Unit, work: Workload, tp: int) -> tuple[float, float]:
    """(forward, backward) elements for one token on one GPU."""
    fused = work.compile or (each.norm and work.fused_norm)
    forward, backward = each.fused if fused else each.eager
    part = share(each.split, work, tp, unit.attention)
    return forward / part, backward / part


def share(
    split: str, work: Workload, tp: int, attention: tuple[Attention, ...] = ()
) -> int | float:
    """Over how many GPUs ``split`` (see ``Elementwise``) divides a token's values, on the fullest rank."""
    if split in ("heads", "kv") and attention:
        each, mine = attention[0], local_heads(attention[0], tp)
        return each.heads / mine.query if split == "heads" else each.kv_heads / mine.paired
    divided = {
        "sequence": work.sequence_parallel,
        # Megatron (ZeRO-1) keeps the part and gathers again in backward.
        "gathered": work.sequence_parallel and work.sharding != "fsdp",
        "loss": work.loss_parallel,
    }
    return tp if divided.get(split, True) else 1


# Bytes that forward keeps for backward, for one micro-batch on one GPU.

# Bytes a score: softmax's output, dropout's mask and output (arXiv:2205.05198, section 4.1).
_NAIVE = 5
_LOGIT = {  # bytes a logit at the peak of the loss
    "fused": 6,  # bf16 logits, fp32 softmax, whose gradient is written into it
    "compiled": 12,  # bf16 logits, fp32 log_softmax, fp32 gradient, bf16 gradient
    "eager": 14,  # bf16 logits, fp32 log_softmax, its gradient, the fp32 logits' one
}


@dataclass(frozen=True)
class Activations:
    """Bytes of activations.

    Attributes:
        kept: of all units, at the end of forward.
        block: activations of one block that are computed again for its backward.
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
    """The activations of ``micro_batch`` sequences."""
    tokens = micro_batch * work.seq_len
    kept = live = 0.0
    for unit in model.units:
        whole = _bytes(unit, unit.activations, gpu, work, tp)
        mine = _kept(unit, whole, gpu, work, tp)
        kept += unit.count * mine
        if unit.kind == "block":
            live = max(live, whole if work.checkpointing == "selective_layer" else whole - mine)
    if work.checkpointing == "none":
        live = 0.0
    features = max((n for u in model.units for n in u.tp_inputs + u.tp_outputs), default=0)
    gathered = 3 * features * tokens * work.compute_itemsize if tp > 1 else 0
    logits = ceil(model.vocab / share("loss", work, tp)) * tokens * logit_bytes(work)
    return Activations(int(kept * tokens), int(live * tokens), int(gathered), int(logits))


def logit_bytes(work: Workload) -> int:
    """Bytes a logit at the peak of the loss."""
    return _LOGIT["fused" if work.fused_loss else "compiled" if work.compile else "eager"]


def _kept(unit: Unit, whole: float, gpu: Gpu, work: Workload, tp: int) -> float:
    """Bytes a token that one unit keeps until its backward; ``whole``: all its activations."""
    if unit.kind != "block" or work.checkpointing == "none":
        return whole
    sequence = share("sequence", work, tp)
    inputs = [*unit.tp_outputs, *(m.k for m in unit.matmuls)]
    entry = (inputs[0] if inputs else 0) / sequence * work.compute_itemsize
    if work.checkpointing == "full":
        return entry
    if work.checkpointing == "selective_layer":
        return (whole + entry) / 2
    kept = unit.matmuls[0::2]
    outputs = sum(local_sizes(m, tp)[0] / (1 if m.split == "n" else sequence) for m in kept)
    attended = [a for a in unit.activations if a.of == "attention"]
    return entry + outputs * work.compute_itemsize + _bytes(unit, attended, gpu, work, tp)


def _bytes(
    unit: Unit, activations: Sequence[Activation], gpu: Gpu, work: Workload, tp: int
) -> float:
    """Bytes a token of ``activations``."""
    found = 0.0
    for each in activations:
        is_fused = work.compile or (each.of == "norm" and work.fused_norm)
        if not (each.eager_only and is_fused):
            part = share(each.split, work, tp, unit.attention)
            found += each.elements * (each.itemsize or work.compute_itemsize) / part
    if unit.attention and attention_kernel(gpu, work) == "naive" and activations:
        found += sum(local_heads(a, tp).query * work.seq_len * _NAIVE for a in unit.attention)
    return found
