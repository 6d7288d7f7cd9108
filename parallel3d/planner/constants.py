"""The constants of the time and memory model, each with its reason. The same for all GPUs and models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Constant:
    """A number that isn't computed.

    Attributes:
        source: where it is from, and why it has this value.
        moved_by: the published sources whose speeds it was fitted to; none: it is from elsewhere.
    """

    name: str
    value: float
    unit: str
    source: str
    moved_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Term:
    """A number, the formula that gives it, and what was put into that, by the formula's names.

    Attributes:
        value: in ``unit``: "B", "s" or what it says.
    """

    name: str
    value: float
    formula: str
    inputs: Mapping[str, float | str | Constant] = field(default_factory=dict)
    unit: str = "s"


def explained(term: Term, margin: str = "") -> Iterator[str]:
    """Lines of text: the term, its formula, what was put in."""
    yield f"{margin}{term.name} = {shown(term.value, term.unit)} = {term.formula}"
    for name, given in term.inputs.items():
        if isinstance(given, Constant):
            yield f"{margin}  {name} = {given.value:g} {given.unit}  [{given.source}]"
        elif isinstance(given, str):
            yield f"{margin}  {name} = {given}"
        else:
            yield f"{margin}  {name} = {given:,.6g}"


def shown(value: float, unit: str) -> str:
    """With a unit that a person reads: GiB, ms."""
    if unit == "B":
        return f"{value / 2**30:,.3f} GiB" if abs(value) >= 2**20 else f"{value:,.0f} B"
    if unit == "s":
        return f"{value:,.3f} s" if value >= 1 else f"{value * 1e3:,.3f} ms"
    return f"{value:,.4g} {unit}".rstrip()


_FLASH2 = "FlashAttention-2, arXiv:2307.08691, figures 4 to 7: A100, forward and backward"
_FLASH3 = "FlashAttention-3, arXiv:2407.08608, figure 5: H100, head dim 128"
_AZURE = "FlashAttention-2's times in Azure's AI-benchmarking-guide"
_BACKWARD = (
    "rate beside the forward's: 322 of 370 TFLOP/s (FlashAttention-2), 516 of 595 (cuDNN), 561 of 648 "
    "(FlashAttention-3) at 16k tokens, arXiv:2407.08608, figures 5 and 6: H100, head dim 128"
)
_SUSTAINED = (
    "matmuls of a training step run one after another with random data, those of the tables alone; "
    "weight gradients have a slower layout. Of GPUs up to power_density; see power_exponent"
)
_POWER = (
    "at the limit power is clock * voltage^2, and voltage goes with clock: clock ~ power^(1/3). A V100 at "
    "200 and 250 W is 1.05 and 1.13 times as fast as at 175 W (0.34 to 0.37; bradrlaw/ai-server#32)"
)
_HOPPER = (
    "beside Ampere's, beyond the power limit: Hopper's matmuls keep their pace only from the largest tiles "
    "and beside no other kernel. PyTorch's FSDP on H100 (llm-foundry, fms-fsdp, torchtitan)"
)
_DENSITY = (
    "A100: 312 TFLOP/s at 400 W, where random data still reach 0.82 of the peak (254 to 257 TFLOP/s; Azure's "
    "AI-benchmarking-guide, 10,000 warm-ups); an H100's float8 reach 0.65 to 0.70"
)
_TP_WAIT = (
    "collectives between kernels that differ by rank take longer than NCCL's back to back: waiting for the "
    "slowest rank, starting, no warm buffers. Aleph-Alpha's tp 2 to 8 (1.5 to 2.3) and SimuMax's tp 8 (1.4)"
)
_STOPS = (
    "torch.utils.checkpoint(use_reentrant=False) stops when the last saved tensor is there, before the "
    "block's last matmul (torch 2.1 and later): llm-foundry's recomputed runs are 7 % faster than with it, "
    "on A100 and on H100"
)
_GROWTH = (
    "larger matmuls are more efficient: medians of NVIDIA's H200 table rise from 0.63 (16 to 64 GFLOP) "
    "over 0.70 (1 to 4 TFLOP) to 0.78 (above 10)"
)
_STRAGGLER = (
    "each collective waits for the slowest: from 8 to 128 GPUs Llama-3-8B loses 2.3 to 2.7 % (torchtitan's "
    "performance page)"
)
_STREAM = "stream kernels reach about 80 % of a datasheet's HBM bandwidth"
_EDGES = "a matmul's first loads and last stores are not hidden: between a sum (1) and a maximum"
_SCORES = "five kernels that read and write bf16 scores: scale, mask, softmax, dropout, copy"
_FLOAT8 = "a bf16 factor is read for its largest value, read again and written as float8"
_ONE = "1 unless measured steps of a machine say otherwise (calibrate)"
_HOST = "pinned copies reach 25 to 26 GB/s of PCIe 4's 31, 52 to 55 of PCIe 5's 63 (bandwidthTest)"
_FRAGMENTATION = (
    "reserved beyond allocated where the GPU has room: 3 to 8 % (SimuMax prints both), 14 % (torchtitan), "
    "13 % (Nemotron4-15B)"
)
_LEAST = "what is left of it when the allocator has freed its caches and tried again, near the GPU's limit"
_FREED = (
    "when half of a unit's large gradients are there compute waits for the reduction before, frees its input "
    "and issues the next gather (fsdp/context.py); 0 where gathers do not wait for that"
)
_GATHERED = (
    "parameters are views of the gathered buffer; 4 where they are copied out of it (FSDP1, FSDP2)"
)

# The published sources that some values were fitted to.
_LF, _FMS = "mosaicml/llm-foundry", "foundation-model-stack/fms-fsdp"
_TT, _SM = "pytorch/torchtitan", "MooreThreads/SimuMax"
_AA = "Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts"

# name -> value, unit, source, the published sources that moved it
_TABLE: dict[str, tuple[Any, ...]] = {
    "gemm_sustained": (0.89, "", _SUSTAINED, (_LF, _AA, _FMS)),
    "power_density": (0.78, "TFLOP/J", _DENSITY),
    "power_exponent": (1 / 3, "", _POWER),
    "gemm_hopper": (0.93, "", _HOPPER, (_LF, _FMS, _TT)),
    "gemm_growth": (0.035, "", _GROWTH),
    "memory_efficiency": (0.80, "", _STREAM),
    "roofline_power": (2.0, "", _EDGES),
    "overlap_slowdown": (0.19, "", "compute under NCCL's kernels: mean 18.9 %, arXiv:2507.03114"),
    "attention_flash1": (0.30, "of peak", f"half of flash2's; {_FLASH2}"),
    "attention_triton": (0.345, "of peak", f"0.40 and less; {_FLASH2}", (_LF,)),
    "attention_flash2": (0.60, "of peak", _FLASH2),
    "flash2_after_ampere": (0.62, "", f"370 of 989 TFLOP/s; {_FLASH3}"),
    "flash2_blackwell": (
        0.26,
        "",
        f"374 of 2,500 TFLOP/s, GB200, head dim 128, 8k tokens; {_AZURE}",
    ),
    "flash2_amd": (0.54, "", f"329 of 1,307 TFLOP/s, MI300X, head dim 64, 8k tokens; {_AZURE}"),
    "attention_flash3": (0.62, "of peak", f"610 to 650 of 989 TFLOP/s; {_FLASH3}"),
    "attention_cudnn": (0.60, "of peak", f"600 of 989 TFLOP/s; {_FLASH3}"),
    "attention_backward": (2.5, "", "five products of a flash backward for the forward's two"),
    "backward_after_ampere": (0.87, "", _BACKWARD),
    "attention_ramp": (256.0, "tokens", "tiles at the diagonal: efficiency is s / (s + ramp)"),
    "head_dim_64": (0.80, "", f"beside head dim 128; {_FLASH2}"),
    "naive_forward": (20.0, "B/score", _SCORES),
    "naive_backward": (18.0, "B/score", "their backward"),
    "float8_cast": (5.0, "B/element", _FLOAT8),
    "host_efficiency": (0.85, "", _HOST),
    "elementwise_time": (1.0, "", f"beside bytes / memory rate; {_ONE}"),
    "attention_time": (1.0, "", f"beside the kernel's rate; {_ONE}"),
    "collective_time": (1.0, "", f"beside the network's; {_ONE}"),
    "host_part": (
        0.8,
        "",
        "of a node's memory for pools; a fifth is left to programs, loaders and files",
    ),
    "launch": (6e-6, "s", "host time to start one eager op (5 to 7 us)"),
    "host_unit": (
        0.00034,
        "s",
        "of the engine, in forward and backward each; 673 us a unit and step: benchmarks/host_time.py",
    ),
    "host_tp": (
        0.00012,
        "s",
        "the same more with tp; 231 us a unit and step: benchmarks/host_time.py",
    ),
    "tp_wait": (1.4, "", _TP_WAIT, (_AA, _SM)),
    "tp_exposed": (1.0, "", "part of tensor parallelism's collectives that compute waits for"),
    "tp_packed": (
        2.0,
        "",
        "how often parts of several sequences, (batch, sequence), are read and written",
    ),
    "tp_beside": (
        1.0,
        "",
        "the weight gradients that hide the sum of an input's gradients (tp/overlap.py)",
    ),
    "last_matmul_again": (0.0, "", _STOPS),
    "straggler": (0.00625, "per doubling of nodes", _STRAGGLER),
    "split_logit": (
        6.0,
        "B/logit",
        "held by parallel3d.tp.vocab_parallel: bf16 logits, their gradient, chunks",
    ),
    "split_loss": (64.0, "B/logit", "what the kernels of parallel3d.tp.vocab_parallel move"),
    "freed_after": (0.4, "of a unit's backward", _FREED),
    "gather_copy": (0.0, "B/param", _GATHERED),
    "reduce_copy": (6.0, "B/param", "bf16 gradients copied into an fp32 reduce buffer"),
    "accumulate": (10.0, "B/param", "a bf16 gradient added to an fp32 sum"),
    "workspace": (0.5 * 2**30, "B", "of cuBLAS, cuDNN and attention kernels"),
    "fragmentation": (0.08, "", _FRAGMENTATION),
    "fragmentation_least": (0.025, "", _LEAST),
    "fragmentation_upper": (0.14, "", "the upper bound of the same, with what isn't modelled"),
    "context": (1.5 * 2**30, "B", "CUDA context (0.5 to 2 GiB) and NCCL's buffers (0.4 GiB)"),
}
CONSTANTS = {name: Constant(name, *given) for name, given in _TABLE.items()}
constant = CONSTANTS.__getitem__
