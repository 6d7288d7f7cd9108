"""predict: memory and speed of one layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import mixture
from parallel3d.planner.cluster import (
    Cluster,
    Gpu,
    collective_time,
    describe_collective,
)
from parallel3d.planner.constants import Constant, Term, constant, explained, shown
from parallel3d.planner.context import (
    chosen,
    exchanges,
    joined_bytes,
    share_of,
    why_not_ulysses,
)
from parallel3d.planner.kernels import (
    attention_constants,
    attention_kernel,
    attention_time,
    elements,
    gemms_of,
    kernels_of,
    matmul_rate,
    memory_rate,
    power_limited,
    slower,
    sustained,
)
from parallel3d.planner.memory import PredictedMemory, memory_of
from parallel3d.planner.model_spec import ModelSpec, UnitSpec
from parallel3d.planner.recompute import KINDS
from parallel3d.planner.stacks import Stack
from parallel3d.planner.step_time import (
    StepTime,
    engine_collectives,
    local_parts,
    step_time,
    tp_collectives,
)
from parallel3d.planner.uncertainty import (
    Interval,
    fits_probability,
    memory_interval,
    residuals,
    speed_interval,
)
from parallel3d.planner.workload import Local, Step, Workload

_GIB = 2**30


@dataclass(frozen=True)
class Prediction(Step):
    """The predicted memory and time of a step: memory on the rank with the most, time on the slowest rank.

    Attributes:
        model, layout, cluster, workload: the inputs of the prediction.
        micro_batch: sequences per data rank and forward.
        accumulation: micro-batches per step.
        memory: bytes by component at the peak, what must fit, an upper bound.
        time: seconds by component.

    Both are computed when they are first read: the time of a layout that doesn't fit is rarely needed.
    """

    @cached_property
    def memory(self) -> PredictedMemory:
        return memory_of(self)

    @cached_property
    def time(self) -> StepTime:
        return step_time(self)

    @property
    def fits(self) -> bool:
        """Whether ``memory.needed`` is at most the GPU's capacity."""
        return self.memory.fits

    @property
    def fits_probability(self) -> float:
        """That it fits, from published verdicts: 0.5 where ``memory.needed`` is the capacity."""
        memory = self.memory
        if memory.host > memory.host_capacity:
            return 0.0
        return fits_probability(memory.needed, memory.capacity)

    @property
    def reserve(self) -> float:
        """Bytes of the GPU's memory beyond ``memory.needed``; below 0: what is missing."""
        return self.memory.capacity - self.memory.needed

    @property
    def familiarity(self) -> str:
        """A key of ``uncertainty.FAMILIARITY``: how near published runs are to this stack and GPU."""
        return residuals().familiarity(self.workload.profile, self.cluster.gpu)

    @property
    def speed_interval(self) -> Interval:
        """10th and 90th percentile of ``tokens_per_second_per_gpu``."""
        gpu, speed = self.cluster.gpu, self.tokens_per_second_per_gpu
        return speed_interval(speed, self.workload.profile, gpu)

    @property
    def memory_interval(self) -> Interval:
        """10th and 90th percentile of ``memory.reserved``."""
        return memory_interval(self.memory.reserved)

    @property
    def step_seconds(self) -> float:
        """Seconds of one optimizer step."""
        return self.time.total

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens of a step, divided by the GPUs; the ranks of cp and tp groups share their tokens."""
        sharing = self.layout.cp * self.layout.tp
        return self.micro_batch * self.accumulation * self.workload.seq_len / sharing

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """``tokens_per_gpu`` a second."""
        return self.tokens_per_gpu / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs per second, divided by the dense bf16 peak.

        The FLOPs are those of matmuls, with twice as many in backward, and of attention, with 2.5 times as
        many in backward (if causal, only half of the scores count). Those of the embedding and of
        recomputation don't count.
        """
        return self.time.model_flops / self.time.total / (self.cluster.gpu.peak * 1e12)

    @property
    def hfu(self) -> float:
        """As ``mfu``, with what checkpointing computes again."""
        return self.time.hardware_flops / self.time.total / (self.cluster.gpu.peak * 1e12)

    @property
    def mfu_6n(self) -> float:
        """The MFU by the common convention of 6 N + 12 L h s FLOPs a token (PaLM, arXiv:2204.02311, appendix
        B). N counts only the experts that a token goes through."""
        attention = sum(
            12 * u.count * a.heads * a.head_dim * self.workload.seq_len
            for u in self.model.units
            for a in u.attention
        )
        flops = 6 * self.model.active_numel + attention
        return flops * self.tokens_per_second_per_gpu / (self.cluster.gpu.peak * 1e12)

    def explain(self) -> str:
        """Every number with its formula and the formula's inputs, constants with their sources."""
        return "\n".join(_explanation(self))

    def as_dict(self) -> dict[str, Any]:
        """JSON values: GiB and seconds by component, and what follows from them."""
        memory, time = self.memory, self.time
        rates = ("tokens_per_second_per_gpu", "mfu", "hfu", "mfu_6n")
        gib = ("allocated", "reserved", "upper", "needed", "capacity")
        return {
            "model": self.model.name,
            "gpu": self.cluster.gpu.name,
            "nodes": self.cluster.nodes,
            "layout": self.layout.as_dict(views=True),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "checkpointing": self.workload.checkpointing,
            **({"cp_attention": self.workload.cp_attention} if self.layout.cp > 1 else {}),
            **({"routing": self.workload.routing} if self.layout.ep > 1 else {}),
            "stack": self.workload.profile.name,
            "fits": self.fits,
            "fits_probability": self.fits_probability,
            "reserve_gib": self.reserve / _GIB,
            "memory_gib": {name: term.value / _GIB for name, term in memory.terms.items()},
            "peak": memory.moment,
            **{f"{name}_gib": getattr(memory, name) / _GIB for name in gib},
            **({"host_gib": memory.host / _GIB} if memory.host else {}),
            "step_seconds": time.total,
            "seconds": {name: term.value for name, term in time.terms.items()},
            **{name: getattr(self, name) for name in rates},
            "familiarity": self.familiarity,
            "tokens_per_second_per_gpu_interval": list(self.speed_interval),
            "reserved_gib_interval": [end / _GIB for end in self.memory_interval],
        }


def predict(
    model: ModelSpec, layout: MeshLayout, cluster: Cluster, workload: Workload
) -> Prediction:
    """Predicts memory and speed of ``model`` on ``layout``, also of a layout that doesn't fit.

    Args:
        model: from ``spec_from_hf_config``, ``spec_from_module`` or ``spec_from_shapes``.
        layout: without -1, with as many ranks as ``cluster`` has GPUs.
        cluster: the machines.
        workload: ``micro_batch`` is needed; with ``global_batch`` gradients are accumulated to it.

    Raises:
        PlanningError: sizes of the arguments contradict each other.
        MeshError: ``layout`` has another number of ranks than ``cluster`` has GPUs.
    """
    if not isinstance(layout, MeshLayout):
        raise PlanningError(f"layout is {layout!r}; it must be a MeshLayout(replicate, shard, tp)")
    layout = layout.resolve(cluster.world_size)
    for axis in ("shard", "cp"):
        size = getattr(layout, axis)
        if workload.sharding != "fsdp" and size > 1:
            raise PlanningError(
                f"{workload.sharding} shards nothing over {axis}, which is {size}; it must be 1: give "
                f"replicate {layout.replicate * size}"
            )
    if layout.ep > 1 and (why := why_no_ep(model, layout.ep, workload)) is not None:
        raise PlanningError(why)
    micro_batch, accumulation = _batches(layout, workload)
    if layout.cp > 1:
        workload = _with_kind(
            model, Local(cluster.gpu, workload, layout.tp, micro_batch, layout.cp)
        )
    return Prediction(model, layout, cluster, workload, micro_batch, accumulation)


def why_no_ep(model: ModelSpec, ep: int, work: Workload) -> str | None:
    """Why ``ep``, which isn't 1, can't divide the experts of ``model``, in words; None if it can."""
    if not model.experts:
        return f"ep {ep}: {model.name} has no experts that it could divide"
    if model.experts < ep:
        return f"ep {ep} is more than the {model.experts} experts of a block: some ranks would have none"
    if work.sharding != "fsdp":
        return f"{work.sharding} and ep {ep}: only fsdp shards what ep leaves of a copy's ranks"
    return None


def _with_kind(model: ModelSpec, local: Local) -> Workload:
    """Returns the workload with "auto" replaced by the kind of attention over ``cp`` that is used.

    Raises:
        PlanningError: Ulysses with fewer heads than ranks.
    """
    work = replace(local.work, cp_attention=chosen(model, local))
    if work.cp_attention == "ulysses":
        for unit in model.units:
            for each in unit.attention:
                if (why := why_not_ulysses(each, local.tp, local.cp)) is not None:
                    raise PlanningError(f"cp_attention='ulysses': {why}; take 'gather' or 'ring'")
    return work


def _batches(layout: MeshLayout, work: Workload) -> tuple[int, int]:
    """Returns (micro-batch, number of micro-batches per step).

    Raises:
        PlanningError: the global batch is no multiple of the sequences that one forward of all ranks takes.
    """
    if work.micro_batch is None and work.global_batch is None:
        raise PlanningError("micro_batch and global_batch are both None; give one of them")
    if work.global_batch is None:
        assert work.micro_batch is not None
        return work.micro_batch, 1
    batch, by = work.global_batch, (work.micro_batch or 1) * layout.data_size
    if batch % by:
        what = "micro_batch * data ranks" if work.micro_batch else "data ranks"
        lower = max(batch // by, 1) * by
        raise PlanningError(
            f"global_batch is {batch}; it must be a multiple of {what}, {by}: {lower} or {lower + by}"
        )
    return (work.micro_batch, batch // by) if work.micro_batch else (batch // by, 1)


def _explanation(prediction: Prediction) -> Iterator[str]:
    """Lines: memory, time by component, then each kind of unit with its kernels and collectives."""
    memory, model, gpu = prediction.memory, prediction.model, prediction.cluster.gpu
    yield f"{model.name} ({model.source}) on {prediction.layout} of {gpu.name}"
    yield f"memory at its peak, {memory.moment}: {shown(memory.allocated, 'B')} allocated"
    for term in (*memory.terms.values(), *memory.beyond):
        yield from explained(term, "  ")
    yield f"step: {shown(prediction.step_seconds, 's')}"
    for term in prediction.time.terms.values():
        yield from explained(term, "  ")
    for term in _rates(gpu, prediction.workload.profile):
        yield from explained(term)
    for unit in model.units:
        yield f"one unit of {unit.count} {unit.name}, one micro-batch"
        for term in unit_terms(prediction, unit):
            yield from explained(term, "  ")


def unit_terms(prediction: Prediction, unit: UnitSpec) -> Iterator[Term]:
    """Seconds of the kernels and collectives of one ``unit`` in one micro-batch."""
    for terms in (_matmuls, _attention, _elementwise, _collectives):
        yield from terms(prediction, unit)


def _rates(gpu: Gpu, stack: Stack) -> Iterator[Term]:
    units = {"bandwidth": "TB/s", "peak": "TFLOP/s", "gemm_efficiency": "", "watts": "W"}
    own = {n: Constant(n, getattr(gpu, n), unit, gpu.source) for n, unit in units.items()}
    inputs = {
        "bandwidth": own.pop("bandwidth"),
        "memory_efficiency": constant("memory_efficiency"),
    }
    formula = "bandwidth * memory_efficiency"
    yield Term("memory rate", memory_rate(gpu), formula, inputs, "B/s")
    limit = {name: constant(name) for name in ("power_density", "power_exponent")}
    limit["watts"] = own.pop("watts")
    formula = "min(1, (power_density * watts / peak)^power_exponent)"
    yield Term("power limit", power_limited(gpu), formula, {**limit, "peak": own["peak"]}, "")
    rates: dict[str, float | str | Constant] = {**own, "power limit": power_limited(gpu)}
    rates |= sustained(gpu, stack)
    yield Term("matmul rate", matmul_rate(gpu, stack), " * ".join(rates), rates, "FLOP/s")


def _matmuls(prediction: Prediction, unit: UnitSpec) -> Iterator[Term]:
    gpu, work = prediction.cluster.gpu, prediction.workload
    itemsize = 1 if work.float8 and unit.kind == "block" else work.compute_itemsize
    formula = (
        "start + ((FLOPs * slowdown / (matmul rate * TFLOPs^gemm_growth))^p "
        "+ (bytes / memory rate)^p)^(1/p)"
    )
    casts = {"float8_cast": constant("float8_cast")} if itemsize == 1 else {}
    if casts:
        formula += " + float8_cast (m k + k n) / memory rate"
    for name, way, (m, n, k), seconds in gemms_of(unit, prediction.local):
        yield Term(
            f"{name} {way}",
            seconds,
            formula,
            {
                "m": m,
                "n": n,
                "k": k,
                "FLOPs": 2.0 * m * n * k,
                "bytes": (m * k + k * n) * itemsize + m * n * max(itemsize, 2),
                "start": Constant("start", gpu.gemm_start_us, "us", gpu.source),
                "gemm_growth": constant("gemm_growth"),
                "p": constant("roofline_power"),
                "slowdown": slower(gpu, itemsize),
                **casts,
            },
        )


def _attention(prediction: Prediction, unit: UnitSpec) -> Iterator[Term]:
    local = prediction.local
    gpu, work, kernel = local.gpu, local.work, attention_kernel(local.gpu, local.work)
    beside = work.profile.constant("attention_time")
    for attention in unit.attention:
        share, joined = share_of(attention, local), joined_bytes(attention, local)
        both = attention_time(attention, local)
        for way, seconds, joins in zip(("forward", "backward"), both, joined, strict=True):
            inputs: dict[str, float | str | Constant] = {
                "heads of a rank": share.heads.query,
                "head_dim": attention.head_dim,
                "seq_len": work.seq_len,
                "causal": str(attention.causal),
            }
            if local.cp > 1:
                inputs["part of their scores"] = share.part
            if kernel == "naive":
                formula = "4 b heads s^2 head_dim / matmul rate + bytes a score * b heads s^2 / memory rate"
                inputs["bytes a score"] = constant(f"naive_{way}")
            else:
                formula = (
                    "4 b heads s^2 head_dim (/ 2 if causal) / (peak * power limit of so busy tensor cores * "
                    "efficiency s / (s + ramp))"
                )
                inputs |= attention_constants(gpu, kernel, attention.head_dim)
                if way == "backward":
                    formula += " * attention_backward"
                    inputs["attention_backward"] = constant("attention_backward")
            if beside.value != 1:
                formula, inputs["attention_time"] = f"{formula} * attention_time", beside
            if share.joins:
                formula += " + bytes of joined results / memory rate"
                inputs["bytes of joined results"] = local.tokens * joins
                inputs["s"] = share.length
            if work.compute_itemsize > 2:
                formula += " * fp32_slowdown"
                inputs["fp32_slowdown"] = gpu.fp32_slowdown
            yield Term(f"attention {way} ({kernel})", seconds, formula, inputs)


def _elementwise(prediction: Prediction, unit: UnitSpec) -> Iterator[Term]:
    local, work = prediction.local, prediction.workload
    kernels = kernels_of(unit, local)
    beside = work.profile.constant("elementwise_time")
    sizes: dict[str, float] = {
        "tokens": local.tokens,
        "bytes an element": work.compute_itemsize,
    }
    for index, way in enumerate(("forward", "backward")):
        if kernels.elementwise[index]:
            moved: dict[str, float] = defaultdict(float)
            for e in unit.elementwise:
                moved[f"elements of {e.name}"] += elements(e, unit, local)[index]
            formula = "tokens * elements read and written * bytes an element / memory rate"
            if beside.value != 1:
                formula, sizes["elementwise_time"] = f"{formula} * elementwise_time", beside.value
            yield Term(
                f"elementwise {way}", kernels.elementwise[index], formula, {**sizes, **moved}
            )
    if kernels.again:
        is_block = unit.kind == "block"
        formula = KINDS[work.checkpointing].formula if is_block else "matmul forward (chunked loss)"
        yield Term("recompute", kernels.again, formula)


def _collectives(prediction: Prediction, unit: UnitSpec) -> Iterator[Term]:
    cluster, local = prediction.cluster, prediction.local
    calls: list[tuple[str, str, float, str]] = [
        (f"tp {kind} {way}", kind, nbytes, "tp")
        for way, kind, nbytes in tp_collectives(unit, local)
    ]
    for attention in unit.attention:
        for each in exchanges(attention, local):
            times = f", {each.count} times" if each.count > 1 else ""
            name = f"cp {each.operation} {each.way}{times}"
            calls.append((name, each.operation, each.nbytes, "cp"))
    for a2a in mixture.exchanges(unit, local):
        calls.append((f"ep {a2a.name} {a2a.way}", "all_to_all", a2a.nbytes, "ep"))
    for axis, parts in local_parts(unit, prediction.layout).items():
        own = engine_collectives(sum(prod(shape) for _, shape in parts), prediction, axis)
        of = " of experts" if axis == "efsdp" else ""
        calls += [
            (f"{name}{of}", *call)
            for name, call in own.items()
            if prediction.links[call[2]].size > 1
        ]
    beside = local.work.profile.constant("collective_time")
    for name, kind, nbytes, axis in calls:
        link = prediction.links[axis]
        formula, constants = describe_collective(kind, nbytes, link, cluster)
        group = {"bytes": nbytes, "ranks": link.size, "of them on a node": link.per_node}
        seconds = collective_time(kind, nbytes, link, cluster) * beside.value
        if beside.value != 1:
            formula, constants = (
                f"({formula}) * collective_time",
                {**constants, beside.name: beside},
            )
        yield Term(name, seconds, formula, {**group, **constants})
