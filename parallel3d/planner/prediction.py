"""predict: memory and speed of one layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner import mixture
from parallel3d.planner.cluster import Cluster, Gpu, collective_time, describe_collective
from parallel3d.planner.constants import Constant, Term, constant, explained, shown
from parallel3d.planner.context import chosen, exchanges, joined_bytes, share_of, why_not_ulysses
from parallel3d.planner.engine import local_numels
from parallel3d.planner.kernels import (
    attention_constants,
    attention_kernel,
    attention_time,
    elements,
    gemms_of,
    has_float8,
    host_time,
    kernels_of,
    matmul_rate,
    measured_attention,
    memory_rate,
    operations,
    power_limited,
    slower,
    sustained,
)
from parallel3d.planner.lora import with_lora
from parallel3d.planner.memory import PredictedMemory, memory_of
from parallel3d.planner.model_spec import ModelSpec, UnitSpec
from parallel3d.planner.pipeline import NO_PIPELINE, Pipeline, blocks_of_stages
from parallel3d.planner.recompute import KINDS
from parallel3d.planner.stacks import Stack
from parallel3d.planner.stages import pipelined_memory, pipelined_time
from parallel3d.planner.step_time import StepTime, engine_collectives, step_time, tp_collectives
from parallel3d.planner.uncertainty import Interval, fits_probability, residuals
from parallel3d.planner.workload import Local, Step, Workload

_GIB = 2**30
_HOST_BOUND = 0.05


@dataclass(frozen=True)
class HostBound:
    """What a step loses because the GPU waits for the host, and what would help.

    Attributes:
        waits: "forward", "backward", "optimizer" -> seconds of a step in which the GPU waits for the host.
        part: their sum as a fraction of the step.
        helps: change -> factor by which it would raise tokens/s, of changes that fit into the memory.
    """

    waits: dict[str, float]
    part: float
    helps: dict[str, float]

    def __str__(self) -> str:
        each = (f"{name} {shown(s, 's')}" for name, s in self.waits.items() if s > 0)
        text = f"host-bound: the GPU waits for the host in {self.part:.0%} of the step ({', '.join(each)})"
        helps = (f"{change} ({times - 1:+.0%} tokens/s)" for change, times in self.helps.items())
        return f"{text}; what would help: {', '.join(helps) or 'a faster host'}"


def _without_host(now: Prediction) -> dict[str, float]:
    """Returns ``HostBound.helps`` for this prediction."""
    speed = now.tokens_per_second_per_gpu
    found: dict[str, Prediction | None] = {}

    def tried(**change: Any) -> Prediction | None:
        work = replace(now.workload, **change)
        try:
            other = predict(now.model, now.layout, now.cluster, work, now.pipeline)
        except PlanningError:  # the global batch is no multiple
            return None
        return other if other.fits or not now.fits else None

    if not now.workload.compile:
        found["compile=True"] = tried(compile=True)
    larger, best = now, now
    batch = now.workload.global_batch if now.accumulation > 1 else None
    while larger.micro_batch < _MOST_MICRO * now.micro_batch:
        other = tried(micro_batch=2 * larger.micro_batch, global_batch=batch)
        if other is None:
            break
        larger = other
        if other.tokens_per_second_per_gpu > 1.02 * best.tokens_per_second_per_gpu:
            best = other
    if best is not now:
        found[f"micro-batch {best.micro_batch}"] = best
    stack = now.workload.profile
    captured = stack.with_values(stack.name, {"host_time": 1e-9}, "a captured step")
    found["the step captured in a CUDA graph, at most"] = tried(stack=captured)
    times = {
        name: p.tokens_per_second_per_gpu / speed for name, p in found.items() if p is not None
    }
    return {name: each for name, each in times.items() if each > 1.01}


_MOST_MICRO = 16


@dataclass(frozen=True)
class Prediction(Step):
    """The predicted memory and time of a step: memory on the rank with the most, time on the slowest rank.

    Attributes:
        model, layout, cluster, workload: the inputs of the prediction.
        micro_batch: sequences per data rank and forward.
        accumulation: micro-batches per step.
        memory: bytes by component at the peak, what must fit, an upper bound.
        time: seconds by component.

    ``memory`` and ``time`` are computed when first read: the time of a layout that doesn't fit is rarely
    needed.
    """

    @cached_property
    def memory(self) -> PredictedMemory:
        return memory_of(self) if self.pipeline.stages == 1 else pipelined_memory(self)

    @cached_property
    def time(self) -> StepTime:
        return step_time(self) if self.pipeline.stages == 1 else pipelined_time(self)

    @property
    def fits(self) -> bool:
        """Whether ``memory.needed`` is at most the GPU's capacity."""
        return self.memory.fits

    @property
    def fits_probability(self) -> float:
        """The probability that it fits, from published runs; 0.5 where ``memory.needed`` is the capacity."""
        memory = self.memory
        if memory.host > memory.host_capacity:
            return 0.0
        return fits_probability(memory.needed, memory.capacity)

    @property
    def reserve(self) -> float:
        """Bytes of the GPU's memory that ``memory.needed`` leaves free; below 0: bytes that are missing."""
        return self.memory.capacity - self.memory.needed

    @property
    def familiarity(self) -> str:
        """A key of ``uncertainty.FAMILIARITY``: how near published runs are to this stack and GPU."""
        return residuals().familiarity(self.workload.profile, self.cluster.gpu)

    @property
    def speed_interval(self) -> Interval:
        """10th and 90th percentile of ``tokens_per_second_per_gpu``."""
        return residuals().speed[self.familiarity].around(self.tokens_per_second_per_gpu)

    @property
    def memory_interval(self) -> Interval:
        """10th and 90th percentile of ``memory.reserved``."""
        return residuals().memory.around(self.memory.reserved)

    @property
    def step_seconds(self) -> float:
        return self.time.total

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens of a step divided by the number of GPUs."""
        sharing = self.layout.cp * self.layout.tp * self.pipeline.stages
        return self.micro_batch * self.accumulation * self.workload.seq_len / sharing

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_gpu / self.time.total

    @property
    def expected(self) -> float:
        """``tokens_per_second_per_gpu`` times ``fits_probability``, by which ``plan`` ranks layouts."""
        return self.tokens_per_second_per_gpu * self.fits_probability

    @property
    def mfu(self) -> float:
        """Model FLOPs per second, divided by the dense bf16 peak.

        Matmuls count, with twice the FLOPs in backward, and attention, with 2.5 times in backward (half of
        the scores if causal). Embedding and recomputation don't count.
        """
        return self.time.model_flops / self.time.total / (self.cluster.gpu.peak * 1e12)

    @property
    def hfu(self) -> float:
        """As ``mfu``, but FLOPs that checkpointing repeats count too."""
        return self.time.hardware_flops / self.time.total / (self.cluster.gpu.peak * 1e12)

    @property
    def mfu_6n(self) -> float:
        """The MFU if a token takes 6 N + 12 L h s FLOPs (PaLM, arXiv:2204.02311, appendix B). N are the
        parameters that a token uses; frozen ones count 4 instead of 6."""
        attention = sum(
            12 * u.count * a.heads * a.head_dim * self.workload.seq_len
            for u in self.model.units
            for a in u.attention
        )
        each = [(u.count * p.numel * p.used, p) for u in self.model.units for p in u.parameters]
        flops = sum((6 if p.trainable else 4) * numel for numel, p in each) + attention
        return flops * self.tokens_per_second_per_gpu / (self.cluster.gpu.peak * 1e12)

    @cached_property
    def host_bound(self) -> HostBound | None:
        """How the GPU waits for the host; None if that is less than a twentieth of the step."""
        part = self.time.terms["host"].value / self.step_seconds
        return None if part < _HOST_BOUND else HostBound(self.time.host, part, _without_host(self))

    def explain(self) -> str:
        """Returns a text with every number, its formula, the formula's inputs and the constants' sources."""
        return "\n".join(_explanation(self))

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values: GiB and seconds by component, and the speeds derived from them."""
        memory, time = self.memory, self.time
        rates = ("tokens_per_second_per_gpu", "mfu", "hfu", "mfu_6n")
        gib = ("allocated", "reserved", "upper", "upper_needed", "needed", "capacity")
        return {
            "model": self.model.name,
            "gpu": self.cluster.gpu.name,
            "nodes": self.cluster.nodes,
            "layout": self.layout.as_dict(views=True),
            **({"pipeline": asdict(self.pipeline)} if self.pipeline.stages > 1 else {}),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "checkpointing": self.workload.checkpointing,
            **({"cp_attention": self.workload.cp_attention} if self.layout.cp > 1 else {}),
            **({"routing": self.workload.routing} if self.layout.ep > 1 else {}),
            **({"lora": self.workload.lora.as_dict()} if self.workload.lora else {}),
            "stack": self.workload.profile.name,
            "fits": self.fits,
            "fits_probability": self.fits_probability,
            "reserve_gib": self.reserve / _GIB,
            "memory_gib": {name: term.value / _GIB for name, term in memory.terms.items()},
            "peak": memory.moment,
            **{f"{name}_gib": getattr(memory, name) / _GIB for name in gib},
            "counts_gib": {
                name: {part: value / _GIB for part, value in parts.items()}
                for name, parts in memory.counts.items()
            },
            **({"host_gib": memory.host / _GIB} if memory.host else {}),
            "step_seconds": time.total,
            "seconds": {name: term.value for name, term in time.terms.items()},
            **{name: getattr(self, name) for name in rates},
            "expected_tokens_per_second_per_gpu": self.expected,
            "host_bound": None if self.host_bound is None else asdict(self.host_bound),
            "familiarity": self.familiarity,
            "tokens_per_second_per_gpu_interval": list(self.speed_interval),
            "reserved_gib_interval": [end / _GIB for end in self.memory_interval],
        }


def predict(
    model: ModelSpec,
    layout: MeshLayout,
    cluster: Cluster,
    workload: Workload,
    pipeline: Pipeline = NO_PIPELINE,
) -> Prediction:
    """Predicts memory and speed of ``model`` on ``layout``, also of a layout that doesn't fit.

    Args:
        model: from ``spec_from_hf_config``, ``spec_from_module`` or ``spec_from_shapes``.
        layout: a resolved layout (no -1) with as many ranks as ``cluster`` has GPUs.
        cluster: the machines.
        workload: its ``micro_batch`` or ``global_batch`` is needed; with both, gradients are accumulated.
        pipeline: pipeline stages, each of which has a ``layout``. ``parallelize`` has none, so name another
            stack in the workload, such as ``Workload(stack="megatron-te", sharding="zero1")``.

    Raises:
        PlanningError: sizes of the arguments contradict each other, or the GPU has no float8 matmuls.
        MeshError: ``layout`` has another number of ranks than ``cluster``, or a stage, has GPUs.
    """
    if not isinstance(pipeline, Pipeline):
        raise PlanningError(
            f"pipeline is {pipeline!r}; it must be a Pipeline(stages, schedule, virtual)"
        )
    ranks, left = divmod(cluster.world_size, pipeline.stages)
    if left:
        raise PlanningError(
            f"{pipeline.stages} stages don't divide {cluster.world_size} GPUs; take a divisor of them"
        )
    if not isinstance(layout, MeshLayout):
        raise PlanningError(f"layout is {layout!r}; it must be a MeshLayout(replicate, shard, tp)")
    layout = layout.resolve(ranks)
    if workload.sharding != "fsdp" and layout.shard > 1 and layout.ep == 1:
        raise PlanningError(
            f"{workload.sharding} shards nothing over shard, which is {layout.shard}; it must be 1: give "
            f"replicate {layout.replicate * layout.shard}"
        )
    if workload.sharding == "fsdp" and layout.replicate > 1 and pipeline.stages > 1:
        raise PlanningError(
            f"replicate is {layout.replicate} with {pipeline.stages} stages; HSDP in a pipeline isn't known: "
            f"give shard {layout.replicate * layout.shard}"
        )
    if (why := why_no_ep(model, layout.ep)) is not None:
        raise PlanningError(why)
    if workload.float8 and not has_float8(cluster.gpu):
        raise PlanningError(
            f"float8 is True; {cluster.gpu.name} has no float8 matmuls: leave it out, or take a newer GPU, "
            "such as h100"
        )
    if pipeline.stages > 1:
        blocks_of_stages(model, pipeline)  # raises if they can't be divided
    model = with_lora(model, workload.lora)
    micro_batch, accumulation = _batches(layout, workload)
    if layout.cp > 1:
        workload = _with_kind(
            model, Local(cluster.gpu, workload, layout.tp, micro_batch, layout.cp)
        )
    return Prediction(model, layout, cluster, workload, micro_batch, accumulation, pipeline)


def why_no_ep(model: ModelSpec, ep: int) -> str | None:
    """Returns why ``ep`` can't divide the experts of ``model``, as text; None if it can."""
    if ep == 1:
        return None
    if not model.experts:
        return f"ep {ep}: {model.name} has no experts that it could divide"
    if model.experts < ep:
        return f"ep {ep} is more than the {model.experts} experts of a block: some ranks would have none"
    return None


def _with_kind(model: ModelSpec, local: Local) -> Workload:
    """Returns the workload with ``cp_attention="auto"`` replaced by the chosen kind."""
    work = replace(local.work, cp_attention=chosen(model, local))
    if work.cp_attention == "ulysses":
        for unit in model.units:
            for each in unit.attention:
                if (why := why_not_ulysses(each, local.tp, local.cp)) is not None:
                    raise PlanningError(f"cp_attention='ulysses': {why}; take 'gather' or 'ring'")
    return work


def _batches(layout: MeshLayout, work: Workload) -> tuple[int, int]:
    """Returns (sequences of a micro-batch, number of micro-batches in a step)."""
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
    """Yields lines: memory and time by component, then for each kind of unit its kernels and collectives."""
    memory, model, gpu = prediction.memory, prediction.model, prediction.cluster.gpu
    stages = f", {prediction.pipeline}" if prediction.pipeline.stages > 1 else ""
    yield f"{model.name} ({model.source}) on {prediction.layout}{stages} of {gpu.name}"
    yield f"memory at its peak, {memory.moment}: {shown(memory.allocated, 'B')} allocated"
    for term in (*memory.terms.values(), *memory.beyond):
        yield from explained(term, "  ")
    yield f"step: {shown(prediction.step_seconds, 's')}"
    if prediction.host_bound is not None:
        yield f"  {prediction.host_bound}"
    for term in prediction.time.terms.values():
        yield from explained(term, "  ")
    for term in _rates(gpu, prediction.workload.profile):
        yield from explained(term)
    for unit in model.units:
        yield f"one unit of {unit.count} {unit.name}, one micro-batch"
        for term in unit_terms(prediction, unit):
            yield from explained(term, "  ")


def unit_terms(prediction: Prediction, unit: UnitSpec) -> Iterator[Term]:
    """Yields the seconds of the kernels and collectives of one ``unit`` in one micro-batch, as terms."""
    for terms in (_matmuls, _attention, _elementwise, _host, _collectives):
        yield from terms(prediction, unit)


def _rates(gpu: Gpu, stack: Stack) -> Iterator[Term]:
    units = {"bandwidth": "TB/s", "peak": "TFLOP/s", "gemm_efficiency": "", "watts": "W"}
    own = {n: Constant(n, getattr(gpu, n), unit, gpu.source) for n, unit in units.items()}
    names = ("memory_efficiency", "power_density", "power_exponent")
    efficiency, density, exponent = ({name: constant(name)} for name in names)
    inputs = {"bandwidth": own["bandwidth"], **efficiency}
    yield Term("memory rate", memory_rate(gpu), "bandwidth * memory_efficiency", inputs, "B/s")
    rates: dict[str, float | str | Constant] = {"peak": own["peak"]}
    if gpu.sustained:
        rates["sustained"] = Constant("sustained", gpu.sustained, "", gpu.source)
        for name, here in sustained(gpu, stack).items():
            if here.value != (usual := constant(name).value):
                rates[f"{name} / {usual:g}"] = here.value / usual
    else:
        limited = power_limited(gpu)
        inputs = density | exponent | {"watts": own["watts"], "peak": own["peak"]}
        formula = "min(1, (power_density * watts / peak)^power_exponent)"
        yield Term("power limit", limited, formula, inputs, "")
        rates |= {"gemm_efficiency": own["gemm_efficiency"], "power limit": limited}
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
                width = attention.head_dim
                if measured := measured_attention(gpu, kernel, width, work.compute_itemsize):
                    formula = "4 b heads s^2 head_dim (/ 2 if causal) / (rate * s / (s + ramp))"
                    rate = measured[way == "backward"]
                    inputs["rate"] = Constant("rate", rate, "TFLOP/s", gpu.source)
                    inputs["ramp"] = constant("attention_ramp")
                else:
                    inputs |= attention_constants(gpu, kernel, width)
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
    sizes: dict[str, float] = {"tokens": local.tokens, "bytes an element": work.compute_itemsize}
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


def _host(prediction: Prediction, unit: UnitSpec) -> Iterator[Term]:
    local, layout = prediction.local, prediction.layout
    gpu, stack = local.gpu, local.work.profile
    names = ["unit"] + ["tp"] * (layout.tp > 1)
    replicas = layout.replicate > 1 and local.work.sharding == "fsdp"
    for index, way in enumerate(("forward", "backward")):
        inputs: dict[str, float] = {"operations": operations(unit, local)[index]}
        own = [*names, *(["replicate", "replicate"] if replicas and index else [])]
        inputs |= {each: host_time(each, gpu, stack) for each in ("launch", *own)}
        seconds = inputs["operations"] * inputs["launch"] + sum(inputs[each] for each in own)
        formula = " + ".join(
            ["operations * launch", *names] + ["2 replicate"] * (len(own) > len(names))
        )
        yield Term(f"host {way}", seconds, formula, inputs)


def _collectives(prediction: Prediction, unit: UnitSpec) -> Iterator[Term]:
    cluster, local = prediction.cluster, prediction.local
    calls: list[tuple[str, str, float, str]] = [
        (f"tp {kind} {way}", kind, nbytes, "tp")
        for way, kind, nbytes in tp_collectives(unit, local)
    ]
    sent = [("cp", each) for a in unit.attention for each in exchanges(a, local)]
    sent += [("ep", each) for each in mixture.exchanges(unit, local)]
    for axis, each in sent:
        times = f", {each.count} times" if each.count > 1 else ""
        name = f"{axis} {each.name} {each.way}{times}"
        calls.append((name, each.operation, each.nbytes, axis))
    for axis, numels in local_numels(unit, prediction.layout).items():
        own = engine_collectives(*numels, prediction, axis)
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
            formula = f"({formula}) * collective_time"
            constants = {**constants, beside.name: beside}
        yield Term(name, seconds, formula, {**group, **constants})
