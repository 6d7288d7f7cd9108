"""Seconds of an optimizer step: kernels, tensor parallelism, the engine's communication, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2, prod

from parallel3d.planner.cluster import AxisLink, collective_time, link_of
from parallel3d.planner.constants import Term, constant
from parallel3d.planner.engine import tp_cut
from parallel3d.planner.kernels import Kernels, kernels_of, memory_rate, share
from parallel3d.planner.model_spec import Unit
from parallel3d.planner.workload import Step, Workload

# The exposed part of the engine's communication, unit by unit.
#
# While a unit computes, the all-gather of the next one runs; in backward also the reduction of the one
# before, and HSDP's all-reduce. What takes longer than compute is exposed. Compute is slower while
# collectives run (``overlap_slowdown``).


@dataclass(frozen=True)
class UnitTimes:
    """How many seconds each phase of a unit takes, for ``count`` equal units.

    Attributes:
        forward, backward: computation and tensor parallelism's communication.
        gather, reduce, all_reduce: the engine's collectives.
        gather_again: the all-gather in backward; 0 if the unit is not resharded after forward.
        tp_forward, tp_backward: tensor parallelism's part of the first two, for the timeline.
    """

    count: int
    forward: float
    backward: float
    gather: float = 0.0
    gather_again: float = 0.0
    reduce: float = 0.0
    all_reduce: float = 0.0
    tp_forward: float = 0.0
    tp_backward: float = 0.0


@dataclass
class Exposed:
    """Seconds of a micro-batch that nothing hides.

    Attributes:
        gather, reduce, all_reduce: that compute waits for them.
        slowdown: that compute takes longer under communication.
        hidden: communication beside compute.
    """

    gather: float = 0.0
    reduce: float = 0.0
    all_reduce: float = 0.0
    slowdown: float = 0.0
    hidden: float = 0.0

    def wait(self, times: int, compute: float, gather: float, reduce: float, extra: float) -> None:
        """Adds ``times`` times ``compute`` seconds with three collectives beside it."""
        together = gather + reduce + extra
        if not together:
            return
        slowed = compute + constant("overlap_slowdown").value * min(together, compute)
        left = max(0.0, together - slowed)
        self.slowdown += times * (slowed - compute)
        self.hidden += times * (together - left)
        self.gather += times * left * gather / together
        self.reduce += times * left * reduce / together
        self.all_reduce += times * left * extra / together


def fsdp_exposed(units: Sequence[UnitTimes], *, all_reduce: bool) -> Exposed:
    """One forward and backward; ``all_reduce``: whether HSDP's all-reduce runs in this micro-batch."""
    exposed = Exposed()
    if not units:
        return exposed
    if not all_reduce:
        units = [replace(unit, all_reduce=0.0) for unit in units]
    exposed.gather += units[0].gather  # nothing runs before it
    nothing = UnitTimes(0, 0.0, 0.0)
    around = list(zip([nothing, *units], units, [*units[1:], nothing], strict=False))
    for _, unit, after in around:
        exposed.wait(unit.count - 1, unit.forward, unit.gather, 0.0, 0.0)
        exposed.wait(1, unit.forward, after.gather, 0.0, 0.0)
    for before, unit, after in reversed(around):
        beside = unit.gather_again, unit.reduce, unit.all_reduce
        exposed.wait(unit.count - 1, unit.backward, *beside)
        exposed.wait(1, unit.backward, before.gather_again, after.reduce, after.all_reduce)
    exposed.reduce += units[0].reduce  # after the last backward
    exposed.all_reduce += units[0].all_reduce
    return exposed


def unsharded_exposed(units: Sequence[UnitTimes], *, reduce: float, gather: float) -> Exposed:
    """One step where parameters are unsharded (ZeRO-1, DDP).

    Gradients are reduced in the last backward (``reduce`` seconds in all), updated parameters gathered
    (ZeRO-1) in the next forward. Of the many buckets one is last, and exposed.
    """
    exposed = Exposed()
    count = max(sum(unit.count for unit in units), 1)
    forward = sum(unit.count * unit.forward for unit in units)
    backward = sum(unit.count * unit.backward for unit in units)
    exposed.wait(1, backward, 0.0, reduce * (1 - 1 / count), 0.0)
    exposed.wait(1, forward, gather * (1 - 1 / count), 0.0, 0.0)
    exposed.reduce += reduce / count
    exposed.gather += gather / count
    return exposed


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, and its FLOPs.

    Attributes:
        terms: by component; they add up to ``total``.
        model_flops: of the plain model's matmuls and attention in a step, forward and backward, over tp.
        hardware_flops: what one GPU computes, with what several GPUs compute and what checkpointing repeats.
        units: times of one micro-batch, for the timeline.
    """

    terms: dict[str, Term]
    model_flops: float
    hardware_flops: float
    units: list[tuple[Unit, UnitTimes]]

    @property
    def total(self) -> float:
        return sum(term.value for term in self.terms.values())


def step_time(step: Step) -> StepTime:
    """The time of ``step``."""
    return _Timing(step).time()


def tp_collectives(
    unit: Unit, work: Workload, micro_batch: int, link: AxisLink
) -> list[tuple[str, str, int]]:
    """("forward" or "backward", operation, bytes) of the collectives over ``tp`` of one unit."""
    if link.size == 1:
        return []
    size = micro_batch * work.seq_len * work.compute_itemsize
    inputs, outputs = ([size * n for n in each] for each in (unit.tp_inputs, unit.tp_outputs))
    if not work.sequence_parallel:
        calls = [("forward", "all_reduce", n) for n in outputs]
        return calls + [("backward", "all_reduce", n) for n in inputs]
    calls = [("forward", "all_gather", n) for n in inputs]
    calls += [("forward", "reduce_scatter", n) for n in outputs]
    calls += [("backward", "reduce_scatter", n) for n in inputs]
    calls += [("backward", "all_gather", n) for n in outputs]
    if share("gathered", work, link.size) > 1:
        calls += [("backward", "all_gather", n) for n in inputs]
    return calls


def local_numel(unit: Unit, tp: int) -> int:
    """Elements of a unit's parameters on the fullest rank of ``tp``."""
    return sum(prod(tp_cut(p, tp)[1]) for p in unit.parameters)


class _Timing:
    """Computes ``step_time``."""

    def __init__(self, step: Step) -> None:
        self.step, self.work, self.layout = step, step.workload, step.layout
        self.gpu, self.accumulation = step.cluster.gpu, step.accumulation
        self.units, self.rate = step.model.units, memory_rate(self.gpu)
        self.links = {axis: link_of(self.layout, axis, step.cluster) for axis in self.layout.axes}

    def time(self) -> StepTime:
        units, tp, micro_batch = self.units, self.layout.tp, self.step.micro_batch
        kernels = [kernels_of(u, self.gpu, self.work, tp, micro_batch) for u in units]
        times = [self.unit_times(u, k) for u, k in zip(units, kernels, strict=True)]
        tp_total = sum(t.count * (t.tp_forward + t.tp_backward) for t in times)
        terms = [
            *self.compute_terms(kernels),
            Term(
                "tensor parallel",
                tp_total * self.accumulation,
                "accumulation * sum of the units' collectives over tp, none of them hidden",
                {
                    "accumulation": self.accumulation,
                    "tp": tp,
                    "collectives of a micro-batch": tp_total,
                    "tokens": micro_batch * self.work.seq_len,
                },
            ),
            *self.engine_terms(*self.exposed(times)),
            self.optimizer(),
        ]
        terms.append(self.stragglers(sum(term.value for term in terms)))
        flops = [u.count * sum(k.flops) for u, k in zip(units, kernels, strict=True)]
        plain = [kernels_of(u, self.gpu, self.work, 1, micro_batch).flops for u in units]
        useful = sum(u.count * (f[0] + f[1]) for u, f in zip(units, plain, strict=True))
        return StepTime(
            {term.name: term for term in terms},
            useful * self.accumulation / tp,
            sum(flops) * self.accumulation,
            list(zip(units, times, strict=True)),
        )

    def numel(self, kind: str | None = None) -> int:
        """Elements of the parameters of one tp rank, before they are sharded."""
        units = [u for u in self.units if kind in (None, u.kind)]
        return sum(u.count * local_numel(u, self.layout.tp) for u in units)

    def collective(self, kind: str, nbytes: float, axis: str) -> float:
        return collective_time(kind, nbytes, self.links[axis], self.step.cluster)

    def tp_time(self, unit: Unit) -> tuple[float, float]:
        """(forward, backward) seconds of the collectives over ``tp`` of one unit."""
        total = {"forward": 0.0, "backward": 0.0}
        calls = tp_collectives(unit, self.work, self.step.micro_batch, self.links["tp"])
        for way, kind, nbytes in calls:
            total[way] += self.collective(kind, nbytes, "tp")
        again = {"full": 1.0, "selective_layer": 0.5, "selective_op": 0.5}
        if unit.kind == "block":
            total["backward"] += total["forward"] * again.get(self.work.checkpointing, 0.0)
        return total["forward"], total["backward"]

    def unit_times(self, unit: Unit, kernels: Kernels) -> UnitTimes:
        work, shard = self.work, self.links["shard"].size
        tp_forward, tp_backward = self.tp_time(unit)
        forward, backward = kernels.forward + tp_forward, kernels.backward + tp_backward
        numel = local_numel(unit, self.layout.tp)
        gather = reduce = summed = again = 0.0
        if work.sharding == "fsdp" and numel:
            gather = self.collective("all_gather", numel * work.compute_itemsize, "shard")
            reduce = self.collective("reduce_scatter", numel * work.reduce_itemsize, "shard")
            part = numel * work.reduce_itemsize / shard
            summed = self.collective("all_reduce", part, "replicate")
            again = gather if unit.kind == "block" and work.reshard_after_forward else 0.0
            if shard > 1:
                copy = constant("gather_copy").value * numel / self.rate
                copied = constant("reduce_copy").value * numel / self.rate
                forward += copy
                backward += copied + (copy if again else 0.0)
        return UnitTimes(
            unit.count, forward, backward, gather, again, reduce, summed, tp_forward, tp_backward
        )

    def exposed(self, times: list[UnitTimes]) -> tuple[Exposed, Exposed]:
        """(of every micro-batch but the last, of the last one)."""
        work, numel = self.work, self.numel()
        if work.sharding == "fsdp":
            return fsdp_exposed(times, all_reduce=False), fsdp_exposed(times, all_reduce=True)
        kind, gathered = "all_reduce", 0
        if work.sharding == "zero1":
            kind, gathered = "reduce_scatter", numel * work.compute_itemsize
        reduce = self.collective(kind, numel * work.reduce_itemsize, "replicate")
        gather = self.collective("all_gather", gathered, "replicate")
        return Exposed(), unsharded_exposed(times, reduce=reduce, gather=gather)

    def compute_terms(self, kernels: list[Kernels]) -> Iterator[Term]:
        """Kernels, recomputation, and host time beyond them."""
        each, n = list(zip(self.units, kernels, strict=True)), self.accumulation

        def term(name: str, seconds: float, what: str) -> Term:
            inputs = {"accumulation": n, "micro-batch": seconds}
            return Term(name, seconds * n, f"accumulation * {what}", inputs)

        busy = 0.0
        for part in ("matmul", "attention", "elementwise"):
            for index, way in enumerate(("forward", "backward")):
                seconds = sum(u.count * getattr(k, part)[index] for u, k in each)
                busy += seconds
                yield term(f"{part} {way}", seconds, f"sum over units of their {part} kernels")
        again = sum(u.count * k.again for u, k in each)
        host = sum(u.count * (k.forward + k.backward) for u, k in each) - again - busy
        yield term("recompute", again, "what checkpointing computes again")
        yield term("launch", max(0.0, host), "host time beyond that of the kernels it starts")

    def engine_terms(self, exposed: Exposed, last: Exposed) -> Iterator[Term]:
        """Copies in and out of buffers, exposed communication, accumulation."""
        n, numel, rate = self.accumulation, self.numel(), self.rate
        shard, is_fsdp = self.links["shard"].size, self.work.sharding == "fsdp"
        gather, reduce, add = map(constant, ("gather_copy", "reduce_copy", "accumulate"))
        gathered = numel + (self.numel("block") if self.work.reshard_after_forward else 0)
        copied = gather.value * gathered + reduce.value * numel if is_fsdp and shard > 1 else 0.0
        copies = {each.name: each for each in (gather, reduce)}
        yield Term(
            "copies",
            copied / rate * n,
            "accumulation * (gather_copy * gathered + reduce_copy * parameters) / memory rate",
            {"accumulation": n, "parameters": numel, **copies, "memory rate": rate},
        )
        slowdown = constant("overlap_slowdown")
        for name, what in _EXPOSED.items():
            each, final = getattr(exposed, name), getattr(last, name)
            yield Term(
                name if name == "slowdown" else f"exposed {name}",
                each * (n - 1) + final,
                f"(accumulation - 1) * each + last: {what}",
                {"accumulation": n, "each": each, "last": final, "overlap_slowdown": slowdown},
            )
        added = (numel // shard if is_fsdp else numel) if n > 1 else 0
        yield Term(
            "accumulate",
            add.value * added * n / rate,
            "accumulation * accumulate * gradients / memory rate",
            {"accumulation": n, "gradients": added, "accumulate": add, "memory rate": rate},
        )

    def optimizer(self) -> Term:
        """Parameters, gradients and state are read, parameters and state written."""
        work, numel, rate = self.work, self.numel(), self.rate
        ranks = {"fsdp": self.layout.shard, "zero1": self.layout.replicate, "ddp": 1}[work.sharding]
        per = 3 * work.param_itemsize + 2 * work.optimizer_bytes
        return Term(
            "optimizer",
            per * numel / ranks / rate,
            "(3 parameter itemsize + 2 state bytes) * parameters / ranks / memory rate",
            {"parameter itemsize": work.param_itemsize, "state bytes": work.optimizer_bytes}
            | {"parameters": numel, "ranks": ranks, "memory rate": rate},
        )

    def stragglers(self, others: float) -> Term:
        straggler, nodes = constant("straggler"), self.step.cluster.nodes
        return Term(
            "stragglers",
            straggler.value * log2(nodes) * others,
            "straggler * log2(nodes) * all else",
            {"straggler": straggler, "nodes": nodes, "all else": others},
        )


_EXPOSED = {
    "gather": "all-gather over shard that compute doesn't hide",
    "reduce": "reduce-scatter that compute doesn't hide",
    "all_reduce": "HSDP's all-reduce over replicate that compute doesn't hide",
    "slowdown": "compute that is slower while collectives run",
}
