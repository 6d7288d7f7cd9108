"""predict: memory and speed of one layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.mesh.axes import AXES
from parallel3d.planner.cluster import (
    AxisLink,
    Cluster,
    collective_time,
    describe_collective,
    link_of,
)
from parallel3d.planner.constants import Constant, Term, constant, explained, shown
from parallel3d.planner.kernels import (
    attention_kernel,
    attention_time,
    elements,
    gemms_of,
    kernels_of,
    local_heads,
    matmul_rate,
    memory_rate,
)
from parallel3d.planner.memory import Memory, memory_of
from parallel3d.planner.model_spec import ModelSpec, Unit
from parallel3d.planner.step_time import StepTime, local_numel, step_time, tp_collectives
from parallel3d.planner.workload import Workload

_GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """Memory and time of a step, on the fullest and slowest rank.

    Attributes:
        layout, cluster, model, workload: of what.
        micro_batch: sequences per data rank and forward. accumulation: micro-batches a step.
        memory: bytes by component at the peak, what must fit, an upper bound.
        time: seconds by component.
    """

    model: ModelSpec
    layout: MeshLayout
    cluster: Cluster
    workload: Workload
    micro_batch: int
    accumulation: int
    memory: Memory
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether ``memory.needed`` is within the GPU's."""
        return self.memory.fits

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step."""
        return self.time.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The ranks of a tp group share their tokens."""
        tokens = self.micro_batch * self.accumulation * self.workload.seq_len
        return tokens / self.layout.tp / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs over the dense bf16 peak. Counted are matmuls, twice as many backward, and attention as
        it is (causal: half of the scores, 2.5 times as many backward); no embedding, nothing computed again.
        """
        return self.time.model_flops / self.time.total / (self.cluster.gpu.peak * 1e12)

    @property
    def hfu(self) -> float:
        """As ``mfu``, with what checkpointing computes again."""
        return self.time.hardware_flops / self.time.total / (self.cluster.gpu.peak * 1e12)

    @property
    def mfu_6n(self) -> float:
        """By the common convention: 6 N + 12 L h s FLOPs a token (PaLM, arXiv:2204.02311, appendix B)."""
        attention = sum(
            12 * u.count * a.heads * a.head_dim * self.workload.seq_len
            for u in self.model.units
            for a in u.attention
        )
        flops = 6 * self.model.numel + attention
        return flops * self.tokens_per_second_per_gpu / (self.cluster.gpu.peak * 1e12)

    def explain(self) -> str:
        """Every number with its formula and what went into it, constants with their sources."""

        return "\n".join(explanation(self))

    def as_dict(self) -> dict[str, Any]:
        """JSON values: GiB and seconds by component, and what follows from them."""
        memory, time = self.memory, self.time
        return {
            "model": self.model.name,
            "gpu": self.cluster.gpu.name,
            "nodes": self.cluster.nodes,
            "layout": dict(zip(AXES, self.layout.sizes, strict=True)),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "checkpointing": self.workload.checkpointing,
            "fits": self.fits,
            "memory_gib": {name: term.value / _GIB for name, term in memory.terms.items()},
            "peak": memory.moment,
            "allocated_gib": memory.allocated / _GIB,
            "reserved_gib": memory.reserved / _GIB,
            "upper_gib": memory.upper / _GIB,
            "needed_gib": memory.needed / _GIB,
            "capacity_gib": memory.capacity / _GIB,
            "step_seconds": time.total,
            "seconds": {name: term.value for name, term in time.terms.items()},
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "mfu_6n": self.mfu_6n,
        }


def predict(
    model: ModelSpec, layout: MeshLayout, cluster: Cluster, workload: Workload
) -> Prediction:
    """Predicts memory and speed of ``model`` on ``layout``, also of a layout that doesn't fit.

    Args:
        workload: ``micro_batch`` is needed; with ``global_batch`` gradients are accumulated to it.

    Raises:
        PlanningError: sizes that don't go together.
        MeshError: a layout of another number of ranks.
    """
    if not isinstance(layout, MeshLayout):
        raise PlanningError(f"layout is {layout!r}; it must be a MeshLayout(replicate, shard, tp)")
    layout = layout.resolve(cluster.world_size)
    if workload.sharding != "fsdp" and layout.shard > 1:
        raise PlanningError(
            f"{workload.sharding} shards nothing over shard, which is {layout.shard}; it must be 1: give "
            f"replicate {layout.replicate * layout.shard}"
        )
    micro_batch, accumulation = batches(layout, workload)
    return Prediction(
        model,
        layout,
        cluster,
        workload,
        micro_batch,
        accumulation,
        memory_of(model, layout, cluster, workload, micro_batch, accumulation),
        step_time(model, layout, cluster, workload, micro_batch, accumulation),
    )


def batches(layout: MeshLayout, work: Workload) -> tuple[int, int]:
    """(micro-batch, accumulation).

    Raises:
        PlanningError: the global batch isn't a multiple of what a forward of all ranks takes.
    """
    if work.micro_batch is None and work.global_batch is None:
        raise PlanningError("micro_batch and global_batch are both None; give one of them")
    if work.micro_batch is None:
        assert work.global_batch is not None
        if work.global_batch % layout.data_size:
            raise _uneven(work.global_batch, layout.data_size, "data ranks")
        return work.global_batch // layout.data_size, 1
    if work.global_batch is None:
        return work.micro_batch, 1
    each = work.micro_batch * layout.data_size
    if work.global_batch % each:
        raise _uneven(work.global_batch, each, "micro_batch * data ranks")
    return work.micro_batch, work.global_batch // each


def _uneven(batch: int, by: int, what: str) -> PlanningError:
    lower = max(batch // by, 1) * by
    return PlanningError(
        f"global_batch is {batch}; it must be a multiple of {what}, {by}: {lower} or {lower + by}"
    )


def explanation(found: Prediction) -> Iterator[str]:
    """Lines: memory, time by component, then each kind of unit with its kernels and collectives."""
    memory = found.memory
    yield f"{found.model.name} ({found.model.source}) on {found.layout} of {found.cluster.gpu.name}"
    yield f"memory at its peak, {memory.moment}: {shown(memory.allocated, 'B')} allocated"
    for term in (*memory.terms.values(), *memory.beyond):
        yield from explained(term, 1)
    yield f"step: {shown(found.step_seconds, 's')}"
    for term in found.time.terms.values():
        yield from explained(term, 1)
    yield from _rates(found)
    for unit in found.model.units:
        yield f"one unit of {unit.count} {unit.name}, one micro-batch"
        for term in unit_terms(found, unit):
            yield from explained(term, 1)


def _rates(found: Prediction) -> Iterator[str]:
    gpu = found.cluster.gpu
    source = gpu.source
    memory = Term(
        "memory rate",
        memory_rate(gpu),
        "B/s",
        "bandwidth * memory_efficiency",
        (
            ("bandwidth", Constant("bandwidth", gpu.bandwidth, "TB/s", source)),
            ("memory_efficiency", constant("memory_efficiency")),
        ),
    )
    matmul = Term(
        "matmul rate",
        matmul_rate(gpu),
        "FLOP/s",
        "peak * gemm_efficiency * power * gemm_sustained",
        (
            ("peak", Constant("peak", gpu.peak, "TFLOP/s", source)),
            ("gemm_efficiency", Constant("gemm_efficiency", gpu.gemm_efficiency, "", source)),
            ("power", Constant("power", gpu.power, "", source)),
            ("gemm_sustained", constant("gemm_sustained")),
        ),
    )
    for term in (memory, matmul):
        yield from explained(term)


def unit_terms(found: Prediction, unit: Unit) -> list[Term]:
    """Seconds of the kernels and collectives of one ``unit`` in one micro-batch."""
    return [
        *_matmuls(found, unit),
        *_attention(found, unit),
        *_elementwise(found, unit),
        *_links(found, unit),
    ]


def _matmuls(found: Prediction, unit: Unit) -> Iterator[Term]:
    gpu, tp = found.cluster.gpu, found.layout.tp
    for name, way, (m, n, k), seconds in gemms_of(unit, gpu, found.workload, tp, found.micro_batch):
        yield Term(
            f"{name} {way}",
            seconds,
            "s",
            "start + ((FLOPs * fp32_slowdown / (matmul rate * TFLOPs^gemm_growth))^p "
            "+ (bytes / memory rate)^p)^(1/p)",
            (
                ("m", m),
                ("n", n),
                ("k", k),
                ("FLOPs", 2.0 * m * n * k),
                ("bytes", (m * k + k * n + m * n) * found.workload.compute_itemsize),
                ("start", Constant("start", gpu.gemm_start_us, "us", gpu.source)),
                ("gemm_growth", constant("gemm_growth")),
                ("p", constant("roofline_power")),
                ("fp32_slowdown", gpu.fp32_slowdown if found.workload.compute_itemsize > 2 else 1),
            ),
        )


def _attention(found: Prediction, unit: Unit) -> Iterator[Term]:
    gpu, work = found.cluster.gpu, found.workload
    kernel = attention_kernel(gpu, work)
    for each in unit.attention:
        both = attention_time(each, gpu, work, found.layout.tp, found.micro_batch)
        for way, seconds in zip(("forward", "backward"), both, strict=True):
            inputs: list[tuple[str, float | int | str | Constant | Term]] = [
                ("heads of a rank", local_heads(each, found.layout.tp).query),
                ("head_dim", each.head_dim),
                ("seq_len", work.seq_len),
                ("causal", str(each.causal)),
            ]
            if kernel == "naive":
                formula = "4 b heads s^2 head_dim / matmul rate + bytes a score * b heads s^2 / memory rate"
                inputs.append(("bytes a score", constant(f"naive_{way}")))
            else:
                formula = "4 b heads s^2 head_dim (/ 2 if causal) / (peak power efficiency s / (s + ramp))"
                inputs += [
                    ("efficiency", constant(f"attention_{kernel}")),
                    ("ramp", constant("attention_ramp")),
                ]
                if kernel == "flash2" and gpu.family not in ("a100", "mi300x"):
                    inputs.append(("after Ampere", constant("flash2_after_ampere")))
                if each.head_dim <= 64:
                    inputs.append(("efficiency at 64", constant("head_dim_64")))
                if way == "backward":
                    formula += " * attention_backward"
                    inputs.append(("attention_backward", constant("attention_backward")))
            if work.compute_itemsize > 2:
                formula += " * fp32_slowdown"
                inputs.append(("fp32_slowdown", gpu.fp32_slowdown))
            yield Term(f"attention {way} ({kernel})", seconds, "s", formula, tuple(inputs))


def _elementwise(found: Prediction, unit: Unit) -> Iterator[Term]:
    kernels = kernels_of(
        unit, found.cluster.gpu, found.workload, found.layout.tp, found.micro_batch
    )
    for which, way in enumerate(("forward", "backward")):
        seconds = kernels.elementwise[which]
        if seconds:
            each = [
                (e.name, elements(e, unit, found.workload, found.layout.tp)[which])
                for e in unit.elementwise
            ]
            yield Term(
                f"elementwise {way}",
                seconds,
                "s",
                "tokens * elements read and written * bytes an element / memory rate",
                (
                    ("tokens", found.micro_batch * found.workload.seq_len),
                    ("bytes an element", found.workload.compute_itemsize),
                    *((f"elements of {name}", count) for name, count in each),
                ),
            )
    if kernels.again:
        yield Term(
            "recompute",
            kernels.again,
            "s",
            {
                "full": "forward kernels",
                "selective_layer": "forward kernels / 2",
                "selective_op": "every second matmul forward + elementwise forward",
            }[found.workload.checkpointing],
        )


def _links(found: Prediction, unit: Unit) -> Iterator[Term]:
    links = {axis: link_of(found.layout, axis, found.cluster) for axis in AXES}
    for way, kind, nbytes in tp_collectives(unit, found.workload, found.micro_batch, links["tp"]):
        yield _collective(f"tp {kind} {way}", kind, nbytes, links["tp"], found)
    numel = local_numel(unit, found.layout.tp)
    if found.workload.sharding != "fsdp" or not numel:
        return
    shard, replicate = links["shard"], links["replicate"]
    work = found.workload
    if shard.size > 1:
        yield _collective("gather", "all_gather", numel * work.compute_itemsize, shard, found)
        yield _collective("reduce", "reduce_scatter", numel * work.reduce_itemsize, shard, found)
    if replicate.size > 1:
        part = numel * work.reduce_itemsize / shard.size
        yield _collective("all-reduce", "all_reduce", part, replicate, found)


def _collective(name: str, kind: str, nbytes: float, link: AxisLink, found: Prediction) -> Term:
    formula, inputs = describe_collective(kind, nbytes, link, found.cluster)
    seconds = collective_time(kind, nbytes, link, found.cluster)
    given = (("bytes", nbytes), ("ranks", link.size), ("of them on a node", link.per_node))
    return Term(name, seconds, "s", formula, (*given, *inputs))
