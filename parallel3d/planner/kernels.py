"""The kernels of a unit on one GPU: seconds of matmuls, attention, elementwise ops; bytes of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, prod

from parallel3d.planner import context, mixture
from parallel3d.planner.cluster import Gpu
from parallel3d.planner.constants import Constant, constant
from parallel3d.planner.context import share_of
from parallel3d.planner.model_spec import (
    Activation,
    AttentionSpec,
    Elementwise,
    Matmul,
    ModelSpec,
    UnitSpec,
    local_heads,
    rows_computed,
)
from parallel3d.planner.recompute import KINDS
from parallel3d.planner.stacks import OURS, Stack, stack_of
from parallel3d.planner.workload import Local, Workload


@dataclass(frozen=True)
class Kernels:
    """Seconds of one unit for one micro-batch on one GPU, without communication.

    Attributes:
        matmul, attention, elementwise: (forward, backward) seconds.
        again: seconds of forward kernels that checkpointing, or a chunked loss, repeats in backward.
        flops: FLOPs of matmuls and attention: (forward, backward, repeated).
        host: (forward, backward) seconds of the host to launch the kernels and run the engine's hooks.
    """

    matmul: tuple[float, float]
    attention: tuple[float, float]
    elementwise: tuple[float, float]
    again: float
    flops: tuple[float, float, float]
    host: tuple[float, float]

    @property
    def forward(self) -> float:
        return self.matmul[0] + self.attention[0] + self.elementwise[0]

    @property
    def backward(self) -> float:
        return self.matmul[1] + self.attention[1] + self.elementwise[1] + self.again


@lru_cache(maxsize=4096)
def kernels_of(unit: UnitSpec, local: Local) -> Kernels:
    """Returns the times of the kernels of ``unit`` on one GPU."""
    gpu, work = local.gpu, local.work
    gemms = gemms_of(unit, local)
    each = [seconds for _, way, _, seconds in gemms if way == "forward"]
    attention = [attention_time(a, local) for a in unit.attention]
    counted = [elements(e, unit, local) for e in unit.elementwise]
    size = local.tokens * work.compute_itemsize / memory_rate(gpu)
    size *= work.profile.value("elementwise_time")
    matmul = sum(each), sum(seconds for _, way, _, seconds in gemms if way != "forward")
    attended = sum(a[0] for a in attention), sum(a[1] for a in attention)
    # Whole rows are made of the gathered logits by a copy; of their gradient a rank's part is copied.
    gathered = 2 * gathered_logits(unit, local) / memory_rate(gpu)
    own_loss = gathered / local.tp + _own_loss(unit, local) / memory_rate(gpu)
    elementwise = (
        sum(e[0] for e in counted) * size + gathered,
        sum(e[1] for e in counted) * size + own_loss,
    )
    forward = matmul[0] + attended[0] + elementwise[0]
    flops = [2.0 * m * n * k for _, way, (m, n, k), _ in gemms if way == "forward"]
    scored = 0.0
    for a in unit.attention:
        mine = share_of(a, local)
        scores = local.micro_batch * mine.heads.query * mine.part * work.seq_len**2
        scored += 4.0 * scores * a.head_dim / (2 if a.causal else 1)
    all_flops = sum(flops) + scored
    of_matmuls = sum(2.0 * m * n * k for _, way, (m, n, k), _ in gemms if way != "forward")
    backward_flops = of_matmuls + scored * constant("attention_backward").value
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
            # Nor are the sums after it: of an adapter's scaled result, and of the residual.
            moved = unit.matmuls[-1].n * (8 if unit.matmuls[-1].is_adapter else 3)
            after = moved * size / share("sequence", local) * (kind.blocks or kind.elementwise)
            again -= left * each[-1] + (1 - again_of_last) * after
            again_flops -= left * flops[-1]
        if work.tiled_mlp:
            inside = [_is_of_mlp(m, unit) for m in unit.matmuls]
            again += sum(s for s, tiled in zip(each, inside, strict=True) if tiled)
            again_flops += sum(f for f, tiled in zip(flops, inside, strict=True) if tiled)
    elif unit.kind == "tail" and work.chunked_loss:
        again, again_flops = matmul[0], sum(flops)
    launch, engine = (host_time(name, gpu, work.profile) for name in ("launch", "unit"))
    engine += host_time("tp", gpu, work.profile) if local.tp > 1 else 0.0
    started = operations(unit, local)
    return Kernels(
        matmul,
        attended,
        elementwise,
        again,
        (all_flops, backward_flops, again_flops),
        (started[0] * launch + engine, started[1] * launch + engine),
    )


def operations(unit: UnitSpec, local: Local) -> tuple[float, float]:
    """Returns how many (forward, backward) operations of one unit the host launches, without the engine's."""
    work = local.work
    small = [(1, 1) if work.compile else e.kernels for e in unit.elementwise]
    products = len(unit.matmuls) + len(unit.attention)
    gradients = sum(m.input_gradient + m.weight_gradient for m in unit.matmuls)
    started = {"forward": float(products), "backward": 2.0 * len(unit.attention) + gradients}
    for index, way in enumerate(started):
        started[way] += sum(kernels[index] for kernels in small)
    # A message, and the copy, or the part of a ring's attention, that goes with it.
    for a in unit.attention:
        for sent in context.exchanges(a, local):
            started[sent.way] += 2 * sent.count
    for moved in mixture.exchanges(unit, local):
        started[moved.way] += 1 + (moved.copied > 0)
    forward, backward = started.values()
    if unit.kind == "block":
        kind, each = KINDS[work.checkpointing], [1.0] * len(unit.matmuls)
        backward += kind.again(forward, each, sum(n for n, _ in small))
    elif unit.kind == "tail" and work.chunked_loss:
        chunks = chunks_of(unit, local)
        forward, backward = chunks * forward, chunks * (backward + len(unit.matmuls))
    return forward, backward


_HOST = {"launch": "launch"} | {
    name: f"host_{name}" for name in ("unit", "replicate", "tp", "optimizer")
}
"""Attribute of ``HostTimes`` -> the constant where it wasn't measured."""


def host_time(name: str, gpu: Gpu, stack: Stack) -> float:
    """Returns the seconds that the host takes for ``name``, an attribute of ``HostTimes``: the stack's
    constant, on a measured host scaled by how much slower than this library's constant it was measured."""
    measured, usual = getattr(gpu.host_times, name) * 1e-6, constant(_HOST[name]).value
    slower = measured / usual if measured else 1.0
    return stack.value(_HOST[name]) * slower * stack.value("host_time")


def chunk_rows(tokens: int, hidden: int, classes: int) -> int:
    """Returns how many tokens a chunk of a chunked loss has; ``tp/vocab_parallel/rows.py`` does the same."""
    return min(max(tokens * hidden // max(classes, 1), _LEAST_ROWS), tokens)


def chunks_of(unit: UnitSpec, local: Local) -> int:
    """Returns the number of chunks in which the model's tail computes its logits and their loss."""
    if not local.work.chunked_loss or not unit.matmuls:
        return 1
    classes, hidden = max(local_sizes(m, local.tp, local.ep) for m in unit.matmuls)
    return ceil(local.tokens / chunk_rows(local.tokens, hidden, classes))


def gathered_logits(unit: UnitSpec, local: Local) -> float:
    """Bytes of the logits that a head that tp divides gathers for a loss that it doesn't divide. Trainers
    with ZeRO-1 (Megatron) always divide it."""
    work = local.work
    if unit.kind != "tail" or local.tp == 1 or work.loss_parallel or work.sharding != "fsdp":
        return 0.0
    classes = sum(matmul.n for matmul in unit.matmuls if matmul.split == "n")
    return float(local.tokens * classes * work.compute_itemsize)


def _own_loss(unit: UnitSpec, local: Local) -> float:
    """Returns the bytes that a loss of split or chunked logits moves beyond a plain one: each step of its
    softmax is an operation, and each chunk's gradient of the head is added to an fp32 sum."""
    work, tp, tokens = local.work, local.tp, local.tokens
    heads = [local_sizes(m, local.tp, local.ep) for m in unit.matmuls]
    is_split = tp > 1 and work.loss_parallel
    if unit.kind != "tail" or not heads or not (work.chunked_loss or is_split):
        return 0.0
    classes, hidden = max(heads)
    whole = _LOSS_FUSED if work.compile else _LOSS_EAGER
    moved = tokens * classes * max(work.profile.value("split_loss") - whole, 0.0)
    if work.chunked_loss:
        trained = any(matmul.weight_gradient for matmul in unit.matmuls)
        moved += chunks_of(unit, local) * classes * hidden * (work.compute_itemsize + 8) * trained
    return moved


_LOSS_EAGER, _LOSS_FUSED = 36, 12
"""Bytes that the elementwise kernels of a loss of whole logits move for each, see ``loss_work``."""


def memory_rate(gpu: Gpu) -> float:
    """Returns the bytes a second that elementwise kernels and copies reach."""
    return gpu.bandwidth * 1e12 * constant("memory_efficiency").value


def power_limited(gpu: Gpu, busy: float = 1.0) -> float:
    """Returns the fraction of its clock that a GPU keeps under load because of its power limit:
    (power_density / (peak / watts))^power_exponent.

    Args:
        busy: how busy the tensor cores are, relative to a matmul (1).
    """
    density = gpu.peak / gpu.watts * busy
    return min(1.0, (constant("power_density").value / density) ** constant("power_exponent").value)


def matmul_rate(gpu: Gpu, stack: Stack | None = None) -> float:
    """Returns the FLOP/s that large matmuls reach in training, in bf16."""
    factors = sustained(gpu, stack).values()
    if gpu.sustained:  # measured: only what this stack does differently counts
        usual = prod(constant(each.name).value for each in factors)
        return gpu.peak * 1e12 * gpu.sustained * prod(each.value for each in factors) / usual
    rate = gpu.peak * 1e12 * gpu.gemm_efficiency * power_limited(gpu)
    return rate * prod(each.value for each in factors)


def has_float8(gpu: Gpu) -> bool:
    """Whether the GPU has float8 matmuls."""
    return gpu.family not in (*_AMPERE, "cpu")


def sustained(gpu: Gpu, stack: Stack | None = None) -> dict[str, Constant]:
    """Returns the constants, by name, by which matmuls are slower in training than alone."""
    names = ["gemm_sustained"]
    if gpu.family not in _AMPERE and gpu.name != "cpu":
        names.append("gemm_amd" if gpu.family in _AMD else "gemm_hopper")
    return {name: (stack or stack_of(OURS)).constant(name) for name in names}


def local_sizes(matmul: Matmul, tp: int, ep: int = 1) -> tuple[int, int]:
    """Returns n and k of a matmul on the tp rank with most; tp doesn't cut experts that ep divides."""
    n, k, split = matmul.n, matmul.k, matmul.split
    if matmul.experts is not None and ep > 1:
        return n, k
    if split == "n":
        return rows_computed(n, matmul.heads, matmul.kv, tp), k
    return (n, rows_computed(k, matmul.heads, matmul.kv, tp)) if split == "k" else (n, k)


def rows_of(matmul: Matmul, unit: UnitSpec, local: Local) -> float:
    """Returns how many rows of this matmul the rank with most computes, for each of a rank's tokens."""
    return matmul.times * (mixture.load(unit, local).pairs if matmul.experts is not None else 1)


def gemms_of(unit: UnitSpec, local: Local) -> list[tuple[str, str, tuple[int, int, int], float]]:
    """Returns (name, pass, (m, n, k), seconds) of each matmul of one unit, "forward", "input gradient" and
    "weight gradient"."""
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
        if each.weight_gradient:
            found.append((each.name, "weight gradient", (n, k, rows)))
    itemsize = 1 if work.float8 and unit.kind == "block" else work.compute_itemsize
    # Factors are cast before each product.
    cast = work.profile.value("float8_cast") / memory_rate(gpu) if itemsize == 1 else 0.0

    def seconds(name: str, way: str, m: int, n: int, k: int) -> float:
        if (groups := experts.get(name, 1)) > 1:  # one kernel of a product for each expert
            m, k = (m, ceil(k / groups)) if way == "weight gradient" else (ceil(m / groups), k)
            start = gpu.gemm_start_us * 1e-6
            each = gemm_time(m, n, k, gpu, itemsize, work.profile, work.float8_scaling) - start
            return start + groups * (each + cast * (m * k + k * n))
        if not (work.chunked_loss and unit.kind == "tail"):
            each = gemm_time(m, n, k, gpu, itemsize, work.profile, work.float8_scaling)
            return each + cast * (m * k + k * n)
        classes, hidden = max(local_sizes(each, local.tp, local.ep) for each in unit.matmuls)
        rows = chunk_rows(tokens, hidden, classes)
        sizes = (m, n, rows) if way == "weight gradient" else (rows, n, k)
        return ceil(tokens / rows) * gemm_time(*sizes, gpu, itemsize, work.profile)

    return [(name, way, sizes, seconds(name, way, *sizes)) for name, way, sizes in found]


@lru_cache(maxsize=65536)
def gemm_time(
    m: int,
    n: int,
    k: int,
    gpu: Gpu,
    itemsize: int,
    stack: Stack | None = None,
    scaling: str = "tensorwise",
) -> float:
    """Returns the predicted seconds of one matmul: start + (compute^p + memory^p)^(1/p).

    compute is FLOPs / (peak * efficiency * (TFLOPs)^growth), and memory is bytes / rate.

    Args:
        itemsize: bytes of an element of the operands; 1: float8, with results in bf16.
        stack: the software that trains; this library by default.
        scaling: scaling of float8: "tensorwise" and "blockwise" run at twice the bf16 rate, "rowwise" at
            ``float8_rowwise`` times that rate.
    """
    flops = 2.0 * m * n * k
    growth = (flops / 1e12) ** constant("gemm_growth").value
    compute = flops * slower(gpu, itemsize, scaling) / (matmul_rate(gpu, stack) * growth)
    factors, result = m * k + k * n, m * n
    memory = (factors * itemsize + result * max(itemsize, 2)) / memory_rate(gpu)
    p = constant("roofline_power").value
    return gpu.gemm_start_us * 1e-6 + (compute**p + memory**p) ** (1 / p)


def slower(gpu: Gpu, itemsize: int, scaling: str = "tensorwise") -> float:
    """Returns how many times as long as in bf16 matmuls of this ``itemsize`` take; 1 is float8."""
    if itemsize == 1:
        faster = [2.0]
        faster += [constant("float8_rowwise").value] if scaling == "rowwise" else []
        faster += [constant("float8_amd").value] if gpu.family in _AMD else []
        return 1 / min(faster)
    return 1.0 if itemsize == 2 else gpu.fp32_slowdown


def attention_kernel(gpu: Gpu, work: Workload) -> str:
    """Returns the attention kernel: the workload's, else the stack's, else the fastest on this GPU."""
    usual = work.profile.attention
    return work.attention or usual.get(gpu.family) or usual.get("other") or best_attention(gpu)


def best_attention(gpu: Gpu) -> str:
    """Returns the fastest attention kernel that torch has for this GPU; for a calibrated GPU the kernel that
    torch ran there."""
    if gpu.attention_kernel:
        return gpu.attention_kernel
    return "cudnn" if gpu.family in (*_HOPPER, *_BLACKWELL) else "flash2"


def attention_time(attention: AttentionSpec, local: Local) -> tuple[float, float]:
    """Returns the (forward, backward) seconds of one attention layer on one GPU."""
    gpu, work, share = local.gpu, local.work, share_of(attention, local)
    scores = local.micro_batch * share.heads.query * share.part * work.seq_len**2
    joined = context.joined_bytes(attention, local)
    joining = [local.tokens * each / memory_rate(gpu) for each in joined]
    whole = 4 * scores * attention.head_dim * work.profile.value("attention_time")
    kernel = attention_kernel(gpu, work)
    if kernel == "naive":
        rate = matmul_rate(gpu, work.profile) / slower(gpu, work.compute_itemsize)
        memory = scores * work.compute_itemsize / 2 / memory_rate(gpu)
        forward = constant("naive_forward").value * memory
        backward = constant("naive_backward").value * memory
        return whole / rate + forward + joining[0], 2 * whole / rate + backward + joining[1]
    flops = whole / 2 if attention.causal else whole
    rate = attention_rate(gpu, kernel, share.length, attention.head_dim, work.compute_itemsize)
    forward = flops / rate
    if measured := measured_attention(gpu, kernel, attention.head_dim, work.compute_itemsize):
        beside = measured[0] / measured[1]
    else:
        beside = 1 / backward_rate(gpu)
    backward = forward * constant("attention_backward").value * beside
    return forward + joining[0], backward + joining[1]


def attention_rate(gpu: Gpu, kernel: str, seq: int, head_dim: int, itemsize: int) -> float:
    """Returns the forward FLOP/s of a fused attention ``kernel`` (not "naive") at ``seq`` tokens."""
    if measured := measured_attention(gpu, kernel, head_dim, itemsize):
        return measured[0] * 1e12 * seq / (seq + constant("attention_ramp").value)
    constants = attention_constants(gpu, kernel, head_dim)
    ramp = constants.pop("ramp").value
    efficiency = prod(each.value for each in constants.values()) * (seq / (seq + ramp))
    wide = gpu.fp32_slowdown if itemsize > 2 else 1
    return (
        efficiency * gpu.peak * 1e12 * power_limited(gpu, efficiency / gpu.gemm_efficiency) / wide
    )


def measured_attention(
    gpu: Gpu, kernel: str, head_dim: int, itemsize: int
) -> tuple[float, float] | None:
    """Returns (forward, backward) TFLOP/s that ``calibrate`` measured of this kernel at the nearest head_dim;
    None: not measured."""
    if kernel != gpu.attention_kernel or itemsize > 2:
        return None
    return min(gpu.attention, key=lambda each: abs(each[0] - head_dim))[1:]


_AMPERE = ("a100", "a800")  # whose flash2 and flash1 are measured forward and backward together
_WRITTEN_FOR_AMPERE = ("flash2", "flash1", "triton")  # without the tensor cores' newer instructions
_AMD = ("mi300x", "mi325x", "mi355x")
_HOPPER = ("h100", "h200", "h800", "h20", "gh200")
_ULTRA = ("b300", "gb300")
_BLACKWELL = ("b200", "gb200", *_ULTRA)


def attention_constants(gpu: Gpu, kernel: str, head_dim: int) -> dict[str, Constant]:
    """Returns the constants of a fused attention ``kernel``: "ramp", and the factors of its efficiency."""
    used = {"efficiency": f"attention_{kernel}", "ramp": "attention_ramp"}
    if kernel in _WRITTEN_FOR_AMPERE and gpu.family not in _AMPERE:
        of = {**dict.fromkeys(_AMD, "flash_amd"), **dict.fromkeys(_BLACKWELL, "flash_blackwell")}
        used["after Ampere"] = of.get(gpu.family, "flash_after_ampere")
    if gpu.family in _ULTRA:
        used["Blackwell Ultra"] = "attention_ultra"
    if head_dim <= 64:
        used["efficiency at 64"] = "head_dim_64"
    return {name: constant(each) for name, each in used.items()}


def backward_rate(gpu: Gpu) -> float:
    """Returns the FLOP/s of a fused attention kernel's backward, as a fraction of its forward's."""
    return 1.0 if gpu.family in _AMPERE else constant("backward_after_ampere").value


def elements(each: Elementwise, unit: UnitSpec, local: Local) -> tuple[float, float]:
    """Returns the (forward, backward) elements that this elementwise work moves for one token on one GPU."""
    fused = local.work.is_fused or (each.norm and local.work.fused_norm)
    forward, backward = each.fused if fused else each.eager
    part = _part(each, unit, local)
    return forward * part, backward * part


def tile_part(local: Local, hidden: int) -> float:
    """Returns the fraction of a rank's tokens that an MLP computes at a time (1 without ``tiled_mlp``)."""
    return min(hidden / max(local.tokens, 1), 1.0) if local.work.tiled_mlp else 1.0


def _is_of_mlp(matmul: Matmul, unit: UnitSpec) -> bool:
    return unit.kind == "block" and matmul.heads is None and bool(unit.attention)


def _part(each: Elementwise | Activation, unit: UnitSpec, local: Local) -> float:
    """Returns the part of a token's values that the rank with most has; above 1 if ep sends it more."""
    if each.of_experts and local.ep > 1:
        return mixture.load(unit, local).pairs
    return 1 / share(each.split, local, unit.attention)


def share(split: str, local: Local, attention: tuple[AttentionSpec, ...] = ()) -> int | float:
    """Returns by how many GPUs a token's values with this ``split`` (see ``Elementwise``) are divided."""
    work, tp = local.work, local.tp
    if split in ("heads", "kv") and attention:
        each, mine = attention[0], local_heads(attention[0], tp)
        return each.heads / mine.query if split == "heads" else each.kv_heads / mine.paired
    if split == "masked":
        return 1 if tp > 1 else inf
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
    "bf16": 8,  # bf16 logits, log_softmax, its gradient, the logits' one
}


@dataclass(frozen=True)
class Activations:
    """Bytes of one GPU's activations.

    Attributes:
        kept: activations of all units that are held at the end of forward.
        block: activations of one block that are on the GPU only around its backward, because they are
            computed again or fetched from the host.
        gathered: temporary tensors that tensor parallelism gathers or sums.
        logits: logits, loss and their gradients when these need most.
        host: activations of all blocks that are in the host's memory.
        gradients: temporary gradients of a block's activations, and buffers of attention over ``cp``.
    """

    kept: int
    block: int
    gathered: int
    logits: int
    host: int = 0
    gradients: int = 0


def activations_of(model: ModelSpec, local: Local) -> Activations:
    """Returns the bytes of activations of one micro-batch on one GPU.

    Activations that are offloaded to the host are on the GPU for two blocks: the one that computes, and the
    one whose activations are being copied. Those of the last block are not offloaded.
    """
    work, tp, tokens = local.work, local.tp, local.tokens
    kept = live = host = gradients = 0.0
    last = next((unit for unit in reversed(model.units) if unit.kind == "block"), None)
    for unit in model.units:
        gradients = max(gradients, _gradients(unit, model.hidden, local))
        whole = _whole(unit, local)
        mine = _kept(unit, whole, local)
        moved = offloaded(unit, local)
        away = (unit.count - (unit is last)) * moved
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
        tails = (m for unit in model.units if unit.kind == "tail" for m in unit.matmuls)
        summed = 4 * model.hidden if any(m.weight_gradient for m in tails) else 0
        logits = classes * (rows * logit_bytes(local) + summed)
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

    The backward of a branch (attention, MLP) holds the gradient of its last matmul's input and that of the
    ``hidden`` features between blocks. Attention's backward comes last, when the MLP's activations are freed.
    It also holds buffers of attention over ``cp`` and, if scores are materialized, the gradients of the
    probabilities and of the scores.
    """
    if unit.kind != "block":
        return 0.0
    work, tp = local.work, local.tp
    of_attention = [0.0]
    of_others, inside = [0.0], 0.0
    between = hidden / share("sequence", local)
    for matmul in (each for each in unit.matmuls if not each.is_adapter):
        n, k = (
            size * rows_of(matmul, unit, local) for size in local_sizes(matmul, local.tp, local.ep)
        )
        if matmul.n != hidden:
            inside += n
            continue
        is_of_mlp = _is_of_mlp(matmul, unit)
        part = tile_part(local, hidden) if is_of_mlp else 1.0
        branch = of_others if is_of_mlp else of_attention
        branch.append((max(inside, k) * part + between) * work.compute_itemsize)
        inside = 0.0
    held = max((context.working_bytes(a, local) for a in unit.attention), default=0.0)
    if attention_kernel(local.gpu, work) == "naive":
        rows = (local_heads(a, tp).query for a in unit.attention)
        held += 2 * max(rows, default=0) * work.seq_len * work.compute_itemsize
    free = sum(a.elements for a in unit.activations if a.split == "tp" and not a.eager_only) / tp
    free *= tile_part(local, hidden)
    return max(*of_others, max(of_attention) + held - free * work.compute_itemsize, 0.0)


def offloaded(unit: UnitSpec, local: Local) -> float:
    """Returns the bytes, for each token, that one unit copies to the host in forward and back in backward."""
    if unit.kind != "block":
        return 0.0
    if local.work.checkpointing == "offload":
        return _whole(unit, local)
    return _entry(unit, local) if local.work.checkpointing == "full_offload" else 0.0


def logit_bytes(local: Local) -> float:
    """Returns the bytes for each logit when the loss needs most memory."""
    work = local.work
    if local.tp > 1 and work.loss_parallel and not work.fused_loss:
        whole = _LOGIT["compiled" if work.compile else "eager"]
        return min(work.profile.value("split_logit"), whole)
    kind = "fused" if work.fused_loss else "compiled" if work.compile else "eager"
    return _LOGIT[kind if work.fp32_logits or work.fused_loss else "bf16"]


def _whole(unit: UnitSpec, local: Local) -> float:
    """Returns the bytes, for each token, that one unit keeps if nothing is computed again."""
    beyond = sum(context.kept(a, local).beyond for a in unit.attention)
    return _bytes(unit, unit.activations, local) + beyond * local.work.compute_itemsize


def _entry(unit: UnitSpec, local: Local) -> float:
    """Returns the bytes of a block's input, for each token."""
    inputs = [*unit.tp_outputs, *(m.k for m in unit.matmuls)]
    return (inputs[0] if inputs else 0) / share("sequence", local) * local.work.compute_itemsize


def _kept(unit: UnitSpec, whole: float, local: Local) -> float:
    """Returns the bytes, for each token, that one unit keeps for its backward; ``whole``: see ``_whole``."""
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
    """Returns the bytes of ``activations`` on one GPU, for each token."""
    work, found = local.work, 0.0
    for each in activations:
        is_fused = work.compile or (each.of == "norm" and work.fused_norm)
        if not (each.eager_only and is_fused):
            size = each.elements * (each.itemsize or work.compute_itemsize)
            if work.tiled_mlp and each.split == "tp" and each.of != "attention":
                size *= tile_part(local, unit.tp_inputs[0] if unit.tp_inputs else 0)
            found += size * _part(each, unit, local)
    if unit.attention and attention_kernel(local.gpu, work) == "naive" and activations:
        found += sum(local_heads(a, local.tp).query * work.seq_len * _NAIVE for a in unit.attention)
    return found
