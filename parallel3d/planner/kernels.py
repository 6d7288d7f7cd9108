"""Seconds of a unit's kernels on one GPU: matmuls, attention, elementwise ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from parallel3d.planner import context, mixture
from parallel3d.planner.cluster import Gpu
from parallel3d.planner.constants import Constant, constant
from parallel3d.planner.context import share_of
from parallel3d.planner.heads import local_heads, rows_computed
from parallel3d.planner.model_spec import (
    Activation,
    AttentionSpec,
    Elementwise,
    Matmul,
    ModelSpec,
    UnitSpec,
)
from parallel3d.planner.recompute import KINDS
from parallel3d.planner.stacks import OURS, Stack, stack_of
from parallel3d.planner.workload import Local, Workload


@dataclass(frozen=True)
class Kernels:
    """Seconds of one unit for one micro-batch on one GPU, without communication.

    Attributes:
        matmul, attention, elementwise: (forward, backward).
        again: forward kernels that checkpointing, or a chunked loss, computes again in backward.
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
def kernels_of(unit: UnitSpec, local: Local) -> Kernels:
    """The kernels of ``unit`` on one GPU."""
    gpu, work = local.gpu, local.work
    gemms = gemms_of(unit, local)
    each = [seconds for _, way, _, seconds in gemms if way == "forward"]
    attention = [attention_time(a, local) for a in unit.attention]
    counted = [elements(e, unit, local) for e in unit.elementwise]
    size = local.tokens * work.compute_itemsize / memory_rate(gpu)
    size *= work.profile.value("elementwise_time")
    matmul = sum(each), sum(seconds for _, way, _, seconds in gemms if way != "forward")
    attended = sum(a[0] for a in attention), sum(a[1] for a in attention)
    beyond = _own_loss(unit, local) / memory_rate(gpu)
    elementwise = sum(e[0] for e in counted) * size, sum(e[1] for e in counted) * size + beyond
    forward = matmul[0] + attended[0] + elementwise[0]
    flops = [2.0 * m * n * k for _, way, (m, n, k), _ in gemms if way == "forward"]
    scored = 0.0
    for a in unit.attention:
        share = share_of(a, local)
        scores = local.micro_batch * share.heads.query * share.part * work.seq_len**2
        scored += 4.0 * scores * a.head_dim / (2 if a.causal else 1)
    all_flops = sum(flops) + scored
    backward_flops = 2 * sum(flops) + scored * constant("attention_backward").value
    started = [(1, 1) if work.compile else e.kernels for e in unit.elementwise]
    started += [(1, 2)] * (len(unit.matmuls) + len(unit.attention))
    host, engine = work.profile.value("launch"), work.profile.value("host_unit")
    engine += work.profile.value("host_tp") if local.tp > 1 else 0.0
    again = again_flops = 0.0
    if unit.kind == "block":
        kind = KINDS[work.checkpointing]
        again = kind.again(forward, each, elementwise[0])
        again_flops = kind.again(all_flops, flops, 0.0)
        if each:
            # Of experts the results are needed for the gradients of their weights.
            needed = unit.matmuls[-1].experts is not None
            again_of_last = 1.0 if needed else work.profile.value("last_matmul_again")
            left = kind.blocks * (1 - again_of_last)
            again, again_flops = again - left * each[-1], again_flops - left * flops[-1]
    elif unit.kind == "tail" and work.chunked_loss:
        again, again_flops = matmul[0], sum(flops)
    return Kernels(
        matmul,
        attended,
        elementwise,
        again,
        (all_flops, backward_flops, again_flops),
        (sum(n for n, _ in started) * host + engine, sum(n for _, n in started) * host + engine),
    )


def chunk_rows(tokens: int, hidden: int, classes: int) -> int:
    """Tokens of a chunk of logits: see ``tp/vocab_parallel/rows.py``."""
    return min(max(tokens * hidden // max(classes, 1), _LEAST_ROWS), tokens)


def _own_loss(unit: UnitSpec, local: Local) -> float:
    """Returns the bytes that a loss over split logits, or in chunks, moves in addition to a plain loss.

    Each step of its softmax is a separate operation, and the head's gradient of each chunk is added to an
    fp32 sum.
    """
    work, tp, tokens = local.work, local.tp, local.tokens
    heads = [local_sizes(m, local.tp, local.ep) for m in unit.matmuls]
    is_split = tp > 1 and work.loss_parallel
    if unit.kind != "tail" or not heads or not (work.chunked_loss or is_split):
        return 0.0
    classes, hidden = max(heads)
    whole = _LOSS_FUSED if work.compile else _LOSS_EAGER
    moved = tokens * classes * max(work.profile.value("split_loss") - whole, 0.0)
    if work.chunked_loss:
        chunks = ceil(tokens / chunk_rows(tokens, hidden, classes))
        moved += chunks * classes * hidden * (work.compute_itemsize + 8)
    return moved


_LOSS_EAGER, _LOSS_FUSED = 36, 12
"""Bytes that the elementwise kernels of a loss of whole logits move for each, see ``loss_work``."""


def memory_rate(gpu: Gpu) -> float:
    """Bytes a second that stream kernels reach."""
    return gpu.bandwidth * 1e12 * constant("memory_efficiency").value


def power_limited(gpu: Gpu, busy: float = 1.0) -> float:
    """Returns the fraction of its clock that a GPU keeps under load because of its power limit:
    (power_density / (peak / watts))^power_exponent.

    Args:
        busy: utilization of the tensor cores, relative to that of a matmul.
    """
    density = gpu.peak / gpu.watts * busy
    return min(1.0, (constant("power_density").value / density) ** constant("power_exponent").value)


def matmul_rate(gpu: Gpu, stack: Stack | None = None) -> float:
    """FLOP/s of large matmuls in training."""
    rate = gpu.peak * 1e12 * gpu.gemm_efficiency * power_limited(gpu)
    return rate * prod(each.value for each in sustained(gpu, stack).values())


def sustained(gpu: Gpu, stack: Stack | None = None) -> dict[str, Constant]:
    """What a stack's matmuls reach of a GPU's."""
    before = gpu.family in _AMPERE or gpu.name == "cpu"
    names = ["gemm_sustained"] if before else ["gemm_sustained", "gemm_hopper"]
    return {name: (stack or stack_of(OURS)).constant(name) for name in names}


def local_sizes(matmul: Matmul, tp: int, ep: int = 1) -> tuple[int, int]:
    """n and k of the fullest rank; experts that ep divides are whole."""
    n, k, split = matmul.n, matmul.k, matmul.split
    if matmul.experts is not None and ep > 1:
        return n, k
    if split == "n":
        return rows_computed(n, matmul.heads, matmul.kv, tp), k
    return (n, rows_computed(k, matmul.heads, matmul.kv, tp)) if split == "k" else (n, k)


def rows_of(matmul: Matmul, unit: UnitSpec, local: Local) -> float:
    """Rows of this product on the fullest rank for each of a rank's tokens."""
    return matmul.times * (mixture.load(unit, local).pairs if matmul.experts is not None else 1)


def gemms_of(unit: UnitSpec, local: Local) -> list[tuple[str, str, tuple[int, int, int], float]]:
    """(name, "forward", "input gradient" or "weight gradient", (m, n, k), seconds) of one unit's matmuls."""
    gpu, work, tokens = local.gpu, local.work, local.tokens
    found, experts = [], {}
    for each in unit.matmuls:
        n, k = local_sizes(each, local.tp, local.ep)
        rows = ceil(tokens * rows_of(each, unit, local))
        if each.experts is not None:
            experts[each.name] = min(ceil(each.experts[0] / local.ep), rows)
        found.append((each.name, "forward", (rows, n, k)))
        if each.input_gradient:
            found.append((each.name, "input gradient", (rows, k, n)))
        found.append((each.name, "weight gradient", (n, k, rows)))
    itemsize = 1 if work.float8 and unit.kind == "block" else work.compute_itemsize
    # Factors are cast before each product.
    cast = constant("float8_cast").value / memory_rate(gpu) if itemsize == 1 else 0.0

    def seconds(name: str, way: str, m: int, n: int, k: int) -> float:
        if (groups := experts.get(name, 1)) > 1:  # one kernel of a product for each expert
            m, k = (m, ceil(k / groups)) if way == "weight gradient" else (ceil(m / groups), k)
            start = gpu.gemm_start_us * 1e-6
            each = gemm_time(m, n, k, gpu, itemsize, work.profile) - start
            return start + groups * (each + cast * (m * k + k * n))
        if not (work.chunked_loss and unit.kind == "tail"):
            return gemm_time(m, n, k, gpu, itemsize, work.profile) + cast * (m * k + k * n)
        classes, hidden = max(local_sizes(each, local.tp, local.ep) for each in unit.matmuls)
        rows = chunk_rows(tokens, hidden, classes)
        sizes = (m, n, rows) if way == "weight gradient" else (rows, n, k)
        return ceil(tokens / rows) * gemm_time(*sizes, gpu, itemsize, work.profile)

    return [(name, way, sizes, seconds(name, way, *sizes)) for name, way, sizes in found]


@lru_cache(maxsize=65536)
def gemm_time(m: int, n: int, k: int, gpu: Gpu, itemsize: int, stack: Stack | None = None) -> float:
    """Returns the predicted seconds of one matmul: start + (compute^p + memory^p)^(1/p).

    compute is FLOPs / (peak * efficiency * (TFLOPs)^growth), and memory is bytes / rate.

    Args:
        itemsize: bytes of an element of the operands; 1: float8, at twice the peak, with results in bf16.
        stack: the software that trains; this library by default.
    """
    flops = 2.0 * m * n * k
    growth = (flops / 1e12) ** constant("gemm_growth").value
    compute = flops * slower(gpu, itemsize) / (matmul_rate(gpu, stack) * growth)
    factors, result = m * k + k * n, m * n
    memory = (factors * itemsize + result * max(itemsize, 2)) / memory_rate(gpu)
    p = constant("roofline_power").value
    return gpu.gemm_start_us * 1e-6 + (compute**p + memory**p) ** (1 / p)


def slower(gpu: Gpu, itemsize: int) -> float:
    """How many times as long matmuls take as in bf16."""
    return {1: 0.5, 2: 1.0}.get(itemsize, gpu.fp32_slowdown)


def attention_kernel(gpu: Gpu, work: Workload) -> str:
    """The kernel that the workload names, or the best that there is for this GPU."""
    usual = work.profile.attention
    return work.attention or usual.get(gpu.family) or usual.get("other") or best_attention(gpu)


def best_attention(gpu: Gpu) -> str:
    """The fastest kernel that torch has for this GPU."""
    return "cudnn" if gpu.family in ("h100", "h200", "b200", "gb200") else "flash2"


def attention_time(attention: AttentionSpec, local: Local) -> tuple[float, float]:
    """(forward, backward) seconds of the attention of one unit."""
    gpu, work, share = local.gpu, local.work, share_of(attention, local)
    scores = local.micro_batch * share.heads.query * share.part * work.seq_len**2
    joined = context.joined_bytes(attention, local)
    joining = [local.tokens * each / memory_rate(gpu) for each in joined]
    whole = 4 * scores * attention.head_dim * work.profile.value("attention_time")
    kernel = attention_kernel(gpu, work)
    if kernel == "naive":
        rate = matmul_rate(gpu, work.profile) / (
            1 if work.compute_itemsize == 2 else gpu.fp32_slowdown
        )
        memory = scores * work.compute_itemsize / 2 / memory_rate(gpu)
        forward = constant("naive_forward").value * memory
        backward = constant("naive_backward").value * memory
        return whole / rate + forward + joining[0], 2 * whole / rate + backward + joining[1]
    flops = whole / 2 if attention.causal else whole
    rate = attention_rate(gpu, kernel, share.length, attention.head_dim, work.compute_itemsize)
    forward = flops / rate
    backward = forward * constant("attention_backward").value / backward_rate(gpu)
    return forward + joining[0], backward + joining[1]


def attention_rate(gpu: Gpu, kernel: str, seq: int, head_dim: int, itemsize: int) -> float:
    """FLOP/s of a fused attention ``kernel`` (not ``naive``)."""
    constants = attention_constants(gpu, kernel, head_dim)
    ramp = constants.pop("ramp").value
    efficiency = prod(each.value for each in constants.values()) * (seq / (seq + ramp))
    wide = gpu.fp32_slowdown if itemsize > 2 else 1
    return (
        efficiency * gpu.peak * 1e12 * power_limited(gpu, efficiency / gpu.gemm_efficiency) / wide
    )


_AMPERE = ("a100", "a800")  # whose flash2 and flash1 are measured forward and backward together
_AMD = ("mi300x", "mi325x", "mi355x")
_BLACKWELL = ("b200", "gb200", "b300")


def attention_constants(gpu: Gpu, kernel: str, head_dim: int) -> dict[str, Constant]:
    """The ramp of a fused attention ``kernel``, and what its efficiency is the product of."""
    used = {"efficiency": f"attention_{kernel}", "ramp": "attention_ramp"}
    if kernel == "flash2" and gpu.family not in _AMPERE:
        of = {**dict.fromkeys(_AMD, "flash2_amd"), **dict.fromkeys(_BLACKWELL, "flash2_blackwell")}
        used["after Ampere"] = of.get(gpu.family, "flash2_after_ampere")
    if head_dim <= 64:
        used["efficiency at 64"] = "head_dim_64"
    return {name: constant(each) for name, each in used.items()}


def backward_constants(gpu: Gpu) -> dict[str, Constant]:
    """Returns constants of a fused attention kernel's backward, relative to its forward: the number of its
    matmuls, and their rate."""
    used = {"products": "attention_backward"}
    if gpu.family not in _AMPERE:
        used["rate after Ampere"] = "backward_after_ampere"
    return {name: constant(each) for name, each in used.items()}


def backward_rate(gpu: Gpu) -> float:
    """The FLOP/s of a fused attention kernel's backward beside its forward's."""
    return prod(
        each.value for each in backward_constants(gpu).values() if each.name != "attention_backward"
    )


def elements(each: Elementwise, unit: UnitSpec, local: Local) -> tuple[float, float]:
    """(forward, backward) elements for one token on one GPU."""
    fused = local.work.compile or (each.norm and local.work.fused_norm)
    forward, backward = each.fused if fused else each.eager
    part = _part(each, unit, local)
    return forward * part, backward * part


def _part(each: Elementwise | Activation, unit: UnitSpec, local: Local) -> float:
    """The part of a token's values that the fullest rank has, for each of a rank's tokens."""
    if each.of_experts and local.ep > 1:
        return mixture.load(unit, local).pairs
    return 1 / share(each.split, local, unit.attention)


def share(split: str, local: Local, attention: tuple[AttentionSpec, ...] = ()) -> int | float:
    """Over how many GPUs ``split`` (see ``Elementwise``) divides a token's values, on the fullest rank."""
    work, tp = local.work, local.tp
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
_LEAST_ROWS = 256  # tokens in a chunk of logits
_LOGIT = {  # bytes a logit at the peak of the loss
    "fused": 6,  # bf16 logits, fp32 softmax, whose gradient is written into it
    "compiled": 12,  # bf16 logits, fp32 log_softmax, fp32 gradient, bf16 gradient
    "eager": 14,  # bf16 logits, fp32 log_softmax, its gradient, the fp32 logits' one
}


@dataclass(frozen=True)
class Activations:
    """Bytes of activations.

    Attributes:
        kept: activations of all units that exist at the end of forward.
        block: activations of one block that are computed again for its backward, or come from the host.
        gathered: temporary inputs that tensor parallelism gathers or sums.
        logits: logits, loss and their gradients at the peak.
        host: activations of all blocks in the host's memory.
        gradients: temporary gradients of a block's activations, and buffers of attention over cp.
    """

    kept: int
    block: int
    gathered: int
    logits: int
    host: int = 0
    gradients: int = 0


def activations_of(model: ModelSpec, local: Local) -> Activations:
    """Returns the bytes of activations of a micro-batch.

    Activations that are offloaded to the host are on the GPU for two blocks: the one that computes, and the
    one whose activations are being copied. Those of the last block are not offloaded.
    """
    work, tp, tokens = local.work, local.tp, local.tokens
    kept = live = host = gradients = 0.0
    for unit in model.units:
        gradients = max(gradients, _gradients(unit, model.hidden, local))
        whole = _whole(unit, local)
        mine = _kept(unit, whole, local)
        moved = offloaded(unit, local)
        away = max(unit.count - 1, 0) * moved
        kept += unit.count * mine - away
        host += away
        if unit.kind == "block":
            again = whole if work.checkpointing == "selective_layer" else max(whole - mine, 0.0)
            live = max(live, again + moved)
    if work.checkpointing == "none":
        live = 0.0
    features = max((n for u in model.units for n in u.tp_inputs + u.tp_outputs), default=0)
    gathered = 3 * features * tokens * work.compute_itemsize if tp > 1 else 0
    classes = ceil(model.vocab / share("loss", local))
    logits = classes * tokens * logit_bytes(local)
    if (
        work.chunked_loss
    ):  # of a chunk, see tp/vocab_parallel/rows.py; and the sum of the weight's gradient
        rows = chunk_rows(tokens, model.hidden, classes)
        logits = classes * (rows * logit_bytes(local) + 4 * model.hidden)
    return Activations(
        int(kept * tokens),
        int(live * tokens),
        int(gathered),
        int(logits),
        int(host * tokens),
        int(gradients * tokens),
    )


def _gradients(unit: UnitSpec, hidden: int, local: Local) -> float:
    """Returns the bytes per token that the backward of a block holds in addition to the block's activations.

    The backward of a branch that ends in ``hidden`` features (attention, MLP) holds the gradient of its last
    matmul's input and that of the features between the blocks. The former replaces that input, or the results
    that it was computed from. The backward of attention comes last, when the MLP's activations are freed. It
    also holds buffers of attention over ``cp`` and, if scores are materialized, the gradients of the
    probabilities and of the scores.
    """
    if unit.kind != "block":
        return 0.0
    work, tp = local.work, local.tp
    of_attention = [0.0]
    of_others, inside = [0.0], 0.0
    between = hidden / share("sequence", local)
    for matmul in unit.matmuls:
        n, k = (
            size * rows_of(matmul, unit, local) for size in local_sizes(matmul, local.tp, local.ep)
        )
        if matmul.n != hidden:
            inside += n
            continue
        branch = of_others if matmul.heads is None and unit.attention else of_attention
        branch.append((max(inside, k) + between) * work.compute_itemsize)
        inside = 0.0
    held = max((context.working_bytes(a, local) for a in unit.attention), default=0.0)
    if attention_kernel(local.gpu, work) == "naive":
        rows = (local_heads(a, tp).query for a in unit.attention)
        held += 2 * max(rows, default=0) * work.seq_len * work.compute_itemsize
    free = sum(a.elements for a in unit.activations if a.split == "tp" and not a.eager_only) / tp
    return max(*of_others, max(of_attention) + held - free * work.compute_itemsize, 0.0)


def offloaded(unit: UnitSpec, local: Local) -> float:
    """Bytes a token that one unit sends to the host in forward and fetches in backward."""
    if unit.kind != "block":
        return 0.0
    if local.work.checkpointing == "offload":
        return _whole(unit, local)
    return _entry(unit, local) if local.work.checkpointing == "full_offload" else 0.0


def logit_bytes(local: Local) -> float:
    """Bytes a logit at the peak of the loss."""
    work = local.work
    if local.tp > 1 and work.loss_parallel and not work.fused_loss:
        whole = _LOGIT["compiled" if work.compile else "eager"]
        return min(work.profile.value("split_logit"), whole)
    return _LOGIT["fused" if work.fused_loss else "compiled" if work.compile else "eager"]


def _whole(unit: UnitSpec, local: Local) -> float:
    """Bytes a token that one unit keeps without recomputation."""
    beyond = sum(context.kept(a, local).beyond for a in unit.attention)
    return _bytes(unit, unit.activations, local) + beyond * local.work.compute_itemsize


def _entry(unit: UnitSpec, local: Local) -> float:
    """Bytes a token of a block's input."""
    inputs = [*unit.tp_outputs, *(m.k for m in unit.matmuls)]
    return (inputs[0] if inputs else 0) / share("sequence", local) * local.work.compute_itemsize


def _kept(unit: UnitSpec, whole: float, local: Local) -> float:
    """Bytes a token that one unit keeps until its backward; ``whole``: all its activations."""
    work = local.work
    if unit.kind != "block" or work.checkpointing in ("none", "offload"):
        return whole
    entry = _entry(unit, local)
    if work.checkpointing in ("full", "full_offload"):
        return entry
    if work.checkpointing == "selective_layer":
        return (whole + entry) / 2
    sequence = share("sequence", local)
    attended = [a for a in unit.activations if a.of == "attention"]
    if work.checkpointing == "selective":
        # Of a rowwise matmul, whose result is only summed over tp, the sum is kept; of a colwise one also
        # the input that tp gathers.
        split = {"n": 1.0, "k": float(sequence)}
        results = mixture.received_bytes(unit, local) / work.compute_itemsize
        for m in unit.matmuls:
            parts = 1.0 if m.experts and local.ep > 1 else split.get(m.split or "", 1.0)
            results += rows_of(m, unit, local) * local_sizes(m, local.tp, local.ep)[0] / parts
        results += sum(unit.tp_inputs) if sequence > 1 else 0
        results += sum(context.kept(a, local).received for a in unit.attention)
    else:
        kept = unit.matmuls[0::2]
        results = sum(
            local_sizes(m, local.tp, local.ep)[0] / (1 if m.split == "n" else sequence)
            for m in kept
        )
    return entry + results * work.compute_itemsize + _bytes(unit, attended, local)


def _bytes(unit: UnitSpec, activations: Sequence[Activation], local: Local) -> float:
    """Bytes a token of ``activations``."""
    work, found = local.work, 0.0
    for each in activations:
        is_fused = work.compile or (each.of == "norm" and work.fused_norm)
        if not (each.eager_only and is_fused):
            size = each.elements * (each.itemsize or work.compute_itemsize)
            found += size * _part(each, unit, local)
    if unit.attention and attention_kernel(local.gpu, work) == "naive" and activations:
        found += sum(local_heads(a, local.tp).query * work.seq_len * _NAIVE for a in unit.attention)
    return found
