"""Seconds of an optimizer step: kernels, tensor parallelism, the engine's communication, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, log2, prod

from parallel3d._play.units import Exposed, PlayRules, UnitTimes, exposed_of
from parallel3d.mesh import MeshLayout
from parallel3d.planner import mixture
from parallel3d.planner.cluster import Gpu, collective_time
from parallel3d.planner.constants import Constant, Term, constant
from parallel3d.planner.context import exchanges
from parallel3d.planner.engine import tp_cut
from parallel3d.planner.kernels import (
    Kernels,
    attention_time,
    gemms_of,
    kernels_of,
    memory_rate,
    offloaded,
    share,
)
from parallel3d.planner.model_spec import Parameter, UnitSpec
from parallel3d.planner.recompute import KINDS
from parallel3d.planner.workload import Local, Step


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, and its FLOPs.

    Attributes:
        terms: seconds by component; they add up to ``total``.
        model_flops: FLOPs of the plain model's matmuls and attention in a step, forward and backward, divided
            by the size of tp.
        hardware_flops: FLOPs that one GPU executes, including those that other GPUs execute as well and those
            that checkpointing repeats.
        units, rules: times of the units in one micro-batch, and rules of its communication; for the timeline.
    """

    terms: dict[str, Term]
    model_flops: float
    hardware_flops: float
    units: list[tuple[UnitSpec, UnitTimes]]
    rules: PlayRules

    @property
    def total(self) -> float:
        return sum(term.value for term in self.terms.values())


def step_time(step: Step) -> StepTime:
    """The time of ``step``."""
    return _Timing(step).time()


def tp_collectives(unit: UnitSpec, local: Local) -> list[tuple[str, str, int]]:
    """("forward" or "backward", operation, bytes) of the collectives over ``tp`` of one unit."""
    if local.tp == 1:
        return []
    work, size = local.work, local.tokens * local.work.compute_itemsize
    inputs, outputs = ([size * n for n in each] for each in (unit.tp_inputs, unit.tp_outputs))
    if not work.sequence_parallel:
        calls = [("forward", "all_reduce", n) for n in outputs]
        return calls + [("backward", "all_reduce", n) for n in inputs]
    calls = [("forward", "all_gather", n) for n in inputs]
    calls += [("forward", "reduce_scatter", n) for n in outputs]
    calls += [("backward", "reduce_scatter", n) for n in inputs]
    calls += [("backward", "all_gather", n) for n in outputs]
    if share("gathered", local) > 1:
        calls += [("backward", "all_gather", n) for n in inputs]
    return calls


def engine_collectives(
    numel: int, step: Step, axis: str = "shard"
) -> dict[str, tuple[str, float, str]]:
    """Returns the all-gather and the reductions of a unit in the engine: name -> (operation, bytes, axis).

    Args:
        numel: elements of the unit's parameters on one rank of ``tp``, or of ``ep``.
        axis: that shards them, "efsdp" of experts that ep divides.
    """
    work = step.workload
    if work.sharding != "fsdp" or not numel:
        return {}
    reduced = numel * work.reduce_itemsize
    is_hybrid = work.is_hybrid(step.layout.replicate)
    name = "reduce over replicate" if is_hybrid else "all-reduce"
    over_replicate = "reduce_scatter" if is_hybrid else "all_reduce"
    return {
        "gather": ("all_gather", numel * work.compute_itemsize, axis),
        "reduce": ("reduce_scatter", reduced, axis),
        name: (over_replicate, reduced / step.links[axis].size, "replicate"),
    }


def local_numel(unit: UnitSpec, tp: int) -> int:
    """Elements of a unit's parameters on the fullest rank of ``tp``."""
    return sum(prod(tp_cut(p, tp)[1]) for p in unit.parameters)


def local_parts(unit: UnitSpec, layout: MeshLayout) -> dict[str, list[tuple[Parameter, list[int]]]]:
    """Axis -> a unit's parameters that it shards, and their shapes on the fullest rank of tp, or of ep.

    Experts are sharded over "efsdp" if ep divides them, all others over "shard".
    """
    found: dict[str, list[tuple[Parameter, list[int]]]] = {"shard": [], "efsdp": []}
    for p in unit.parameters:
        if p.experts and layout.ep > 1:
            found["efsdp"].append((p, [ceil(p.shape[0] / layout.ep), *p.shape[1:]]))
        else:
            found["shard"].append((p, tp_cut(p, layout.tp)[1]))
    return found


def host_rate(gpu: Gpu) -> float:
    """Bytes a second of pinned copies to or from the host."""
    return gpu.host * 1e9 * constant("host_efficiency").value


_Inputs = dict[str, float | str | Constant]


class _Timing:
    """Computes ``step_time``."""

    def __init__(self, step: Step) -> None:
        self.step, self.work, self.layout = step, step.workload, step.layout
        self.gpu, self.accumulation = step.cluster.gpu, step.accumulation
        self.stack = step.workload.profile
        self.units, self.rate = step.model.units, memory_rate(self.gpu)
        self.local = step.local
        self.hybrid = step.workload.is_hybrid(step.layout.replicate)
        self.links = step.links
        # Parameters of one rank of tp, or of ep, before they are sharded, by unit and axis: with their
        # shapes, and their elements. All elements, and those of a shard.
        self.parts = {id(u): local_parts(u, self.layout) for u in self.units}
        self.sizes = {
            key: {axis: sum(prod(shape) for _, shape in own) for axis, own in parts.items()}
            for key, parts in self.parts.items()
        }
        every = [(u.count * n, axis) for u in self.units for axis, n in self.sizes[id(u)].items()]
        self.numel = sum(n for n, _ in every)
        self.at_rest = sum(n / self.links[axis].size for n, axis in every)

    def time(self) -> StepTime:
        units, tp, cp = self.units, self.layout.tp, self.layout.cp
        kernels = [kernels_of(u, self.local) for u in units]
        times = [self.unit_times(u, k) for u, k in zip(units, kernels, strict=True)]
        tp_total = sum(t.count * (t.tp_forward + t.tp_backward) for t in times)
        waits = {name: self.stack.constant(name) for name in ("tp_exposed", "tp_wait")}
        lost = self.exposed(times)
        terms = [
            *self.compute_terms(kernels),
            self.repeated(
                "tensor parallel",
                tp_total,
                "tp_exposed * tp_wait * sum of the units' collectives over tp",
                {"tp": tp, "of a micro-batch": tp_total, **waits, "tokens": self.local.tokens},
            ),
            *self.experts_terms(times),
            *self.context_terms(times, *lost),
            *self.engine_terms(*lost),
            self.optimizer(),
        ]
        terms.append(self.stragglers(sum(term.value for term in terms)))
        flops = [u.count * sum(k.flops) for u, k in zip(units, kernels, strict=True)]
        whole = self.local._replace(tp=1, cp=1, ep=1)
        plain = [kernels_of(u, whole).flops for u in units]
        useful = sum(u.count * (f[0] + f[1]) for u, f in zip(units, plain, strict=True))
        return StepTime(
            {term.name: term for term in terms},
            useful * self.accumulation / tp / cp,
            sum(flops) * self.accumulation,
            list(zip(units, times, strict=True)),
            self.rules(),
        )

    def collective(self, kind: str, nbytes: float, axis: str) -> float:
        seconds = collective_time(kind, nbytes, self.links[axis], self.step.cluster)
        return seconds * self.stack.value("collective_time")

    def tp_time(self, unit: UnitSpec) -> tuple[float, float]:
        """(forward, backward) seconds of the collectives over ``tp`` of one unit."""
        total = {"forward": 0.0, "backward": 0.0}
        micro_batch = self.step.micro_batch
        wait = self.stack.value("tp_wait") * self.stack.value("tp_exposed")
        beside = self.weight_gradients(unit) * self.stack.value("tp_beside")
        # Of several sequences the parts that ranks have don't follow one another.
        packed = {"forward": ("all_gather",), "backward": ("all_gather", "reduce_scatter")}
        last = 0.0  # of forward: what the block's last matmul is followed by
        for way, kind, nbytes in tp_collectives(unit, self.local):
            seconds = self.collective(kind, nbytes, "tp") * wait
            if micro_batch > 1 and self.work.sequence_parallel and kind in packed.get(way, ()):
                seconds += self.stack.value("tp_packed") * nbytes / self.rate
            if way == "backward" and kind in ("reduce_scatter", "all_reduce"):
                seconds = max(seconds - beside, 0.0)
            total[way] += seconds
            last = seconds if way == "forward" else last
        return self.with_repeated(unit, total, last)

    def weight_gradients(self, unit: UnitSpec) -> float:
        """Seconds of the weight gradients of the colwise layers of one shared input."""
        colwise = {matmul.name for matmul in unit.matmuls if matmul.split == "n"}
        gemms = gemms_of(unit, self.local)
        found = (s for name, way, _, s in gemms if name in colwise and way == "weight gradient")
        return sum(found) / max(len(unit.tp_inputs), 1)

    def with_repeated(
        self, unit: UnitSpec, total: dict[str, float], last: float = 0.0
    ) -> tuple[float, float]:
        """Returns (forward, backward) seconds of collectives, with those that recomputation repeats.

        Args:
            total: seconds of the unit's collectives without recomputation, by "forward" and "backward".
            last: seconds of a collective that is repeated only if the block's last matmul is.
        """
        again = KINDS[self.work.checkpointing].collectives if unit.kind == "block" else 0.0
        repeated = total["forward"] - last * (1 - self.stack.value("last_matmul_again"))
        return total["forward"], total["backward"] + again * repeated

    def cp_time(self, unit: UnitSpec) -> tuple[float, float]:
        """Returns (forward, backward) seconds by which communication over ``cp`` lengthens attention.

        Attention overlaps the sends of a ring. It waits for an all-to-all and an all-gather, with their
        packing and unpacking.
        """
        total = {"forward": 0.0, "backward": 0.0}
        for a in unit.attention if self.layout.cp > 1 else ():
            whole = attention_time(a, self.local)
            own = dict(zip(total, whole, strict=True))
            for each in exchanges(a, self.local):
                seconds = self.collective(each.operation, each.nbytes, "cp")
                step = own[each.way] / (each.count + 1) if each.beside else 0.0
                slowed = constant("overlap_slowdown").value * min(seconds, step)
                waited = max(0.0, seconds - step - slowed) + each.copied / self.rate
                total[each.way] += each.count * (slowed + waited)
        return self.with_repeated(unit, total)

    def ep_time(self, unit: UnitSpec) -> tuple[float, float]:
        """(forward, backward) seconds that one unit's experts wait for, over ``ep``: all-to-alls with their
        packing, and the host, which has to know how long the messages are before it can start what follows.
        """
        total = {"forward": 0.0, "backward": 0.0}
        for each in mixture.exchanges(unit, self.local):
            seconds = self.collective("all_to_all", each.nbytes, "ep")
            total[each.way] += seconds + each.copied / self.rate
        forward, backward = self.with_repeated(unit, total)
        if forward:
            kind, sync = KINDS[self.work.checkpointing], self.stack.value("host_sync")
            forward += sync
            backward += sync * max(kind.blocks, kind.elementwise)
        return forward, backward

    def unit_times(self, unit: UnitSpec, kernels: Kernels) -> UnitTimes:
        tp_forward, tp_backward = self.tp_time(unit)
        cp_forward, cp_backward = self.cp_time(unit)
        ep_forward, ep_backward = self.ep_time(unit)
        forward = kernels.forward + tp_forward + cp_forward + ep_forward
        backward = kernels.backward + tp_backward + cp_backward + ep_backward
        moved = offloaded(unit, self.local) * self.local.tokens
        gather = reduce = summed = again = 0.0
        for axis, numel in self.sizes[id(unit)].items():
            if calls := engine_collectives(numel, self.step, axis):
                own = [self.collective(*call) for call in calls.values()]
                gather, reduce, summed = gather + own[0], reduce + own[1], summed + own[2]
        if self.work.sharding == "fsdp" and any(self.sizes[id(unit)].values()):
            again = gather if self.is_gathered_again(unit) else 0.0
            copy, copied = (each / self.rate for each in self.copied(unit))
            forward += copy
            backward += copied + (copy if self.is_gathered_again(unit) else 0.0)
        return UnitTimes(
            *(unit.count, forward, backward, gather, again, reduce, summed),
            *(tp_forward, tp_backward, cp_forward, cp_backward, ep_forward, ep_backward),
            offload=moved / host_rate(self.gpu),
            parts=(max(len(unit.tp_inputs), len(unit.tp_outputs), 1), self.work.sequence_parallel),
        )

    def is_gathered_again(self, unit: UnitSpec) -> bool:
        """Whether the parameters of ``unit`` are gathered, or cast, in backward too."""
        return unit.kind == "block" and self.work.reshard_after_forward

    def copied(self, unit: UnitSpec) -> tuple[float, float]:
        """Returns the bytes that the computation's stream moves for an all-gather of ``unit``, and for a
        reduction.

        With several shards these are copies out of the gathered buffer, and into the buffer of gradients;
        twice as many if shards are padded because rows don't divide evenly. With one shard they are casts, if
        the compute dtype or the reduce dtype differs.
        """
        parts = [self.copied_of(unit, axis) for axis in ("shard", "efsdp")]
        dense = self.dense_gradient(unit)
        return sum(each for each, _ in parts), sum(each for _, each in parts) + dense

    def copied_of(self, unit: UnitSpec, axis: str) -> tuple[float, float]:
        """``copied`` of the parameters that ``axis`` shards."""
        work, ranks, numel = self.work, self.links[axis].size, self.sizes[id(unit)][axis]
        if ranks == 1:
            sizes = work.param_itemsize, work.compute_itemsize, work.reduce_itemsize
            cast, reduced = ((a + b) * numel if a != b else 0 for a, b in pairwise(sizes))
            return cast, reduced
        gather, reduce = (self.stack.value(name) for name in ("gather_copy", "reduce_copy"))
        parts = [shape for _, shape in self.parts[id(unit)][axis]]
        padded = sum(prod(part) for part in parts if part and part[0] % ranks)
        copied = max(
            gather, 2 * work.compute_itemsize
        )  # out of the buffer: padded, and all of HFSDP
        out = numel if self.hybrid else padded
        return copied * out + gather * (numel - out), reduce * (numel + padded)

    def dense_gradient(self, unit: UnitSpec) -> float:
        """Bytes moved for the gradient of an embedding's whole table: zeros, and with a tied head the sum."""
        is_tied = unit.kind == "root" and self.step.model.tied
        if unit.kind != "embedding" and not is_tied:
            return 0.0
        table = max((prod(tp_cut(p, self.layout.tp)[1]) for p in unit.parameters), default=0)
        return table * self.work.compute_itemsize * (4 if is_tied else 1)

    def rules(self) -> PlayRules:
        """How the engine communicates."""
        slowdown = constant("overlap_slowdown").value
        if self.work.sharding != "fsdp":
            return PlayRules(slowdown, waits=False)
        freed, apart = self.stack.value("freed_after"), self.links["shard"].nodes == 1
        return PlayRules(slowdown, freed, apart, later=self.layout.tp > 1)

    def exposed(self, times: list[UnitTimes]) -> tuple[Exposed, Exposed]:
        """(of every micro-batch but the last, of the last one)."""
        work, numel, rules = self.work, self.numel, self.rules()
        if work.sharding == "fsdp":
            each = last = exposed_of(times, rules, all_reduce=True)
            if self.accumulation > 1 and self.layout.replicate > 1:
                each = exposed_of(times, rules, all_reduce=False)
            if self.hybrid:  # the copy is renewed before each forward
                renewed = self.at_rest * work.compute_itemsize
                renewal = self.collective("all_gather", renewed, "replicate")
                each, last = (e._replace(gather=e.gather + renewal) for e in (each, last))
            return each, last
        # Parameters are unsharded. Gradients are reduced in the last backward, updated parameters gathered
        # (ZeRO-1) in the next forward, in many equal buckets.
        kind, gathered = "all_reduce", 0
        if work.sharding == "zero1":
            kind, gathered = "reduce_scatter", numel * work.compute_itemsize
        reduce = self.collective(kind, numel * work.reduce_itemsize, "replicate")
        gather = self.collective("all_gather", gathered, "replicate")
        count = sum(unit.count for unit in times)
        times = [replace(t, gather=gather / count, reduce=reduce / count) for t in times]
        return Exposed(), exposed_of(times, rules, all_reduce=False)

    def repeated(
        self, name: str, seconds: float, what: str, inputs: Mapping[str, float | str | Constant]
    ) -> Term:
        """What each micro-batch takes."""
        n = self.accumulation
        return Term(name, seconds * n, f"accumulation * {what}", {"accumulation": n, **inputs})

    def waited(
        self, name: str, each: float, last: float, what: str, inputs: Mapping[str, float | Constant]
    ) -> Term:
        """What all micro-batches but the last take, and the last."""
        n, formula = self.accumulation, f"(accumulation - 1) * each + last: {what}"
        inputs = {"accumulation": n, "each": each, "last": last, **inputs}
        return Term(name, each * (n - 1) + last, formula, inputs)

    def compute_terms(self, kernels: list[Kernels]) -> Iterator[Term]:
        """Kernels, recomputation, and host time beyond them."""
        each = list(zip(self.units, kernels, strict=True))
        host = sum(u.count * (k.forward + k.backward) for u, k in each)
        found = {}
        for part in ("matmul", "attention", "elementwise"):
            for index, way in enumerate(("forward", "backward")):
                seconds = sum(u.count * getattr(k, part)[index] for u, k in each)
                found[f"{part} {way}"] = seconds, f"sum over units of their {part} kernels"
        again = sum(u.count * k.again for u, k in each)
        found["recompute"] = again, "what checkpointing and a chunked loss compute again"
        host = max(0.0, host - sum(seconds for seconds, _ in found.values()))
        found["launch"] = host, "host time beyond that of the kernels it starts"
        for name, (seconds, what) in found.items():
            yield self.repeated(name, seconds, what, {"micro-batch": seconds})

    def experts_terms(self, times: list[UnitTimes]) -> Iterator[Term]:
        """What experts wait for over ``ep``."""
        if self.layout.ep == 1:
            return
        waited = sum(t.count * (t.ep_forward + t.ep_backward) for t in times)
        yield self.repeated(
            "expert parallel",
            waited,
            "sum of the units' all-to-alls over ep, of the fullest rank, their packing and host_sync",
            {
                "ep": self.layout.ep,
                "routing": self.work.routing,
                "of a micro-batch": waited,
                "host_sync": self.stack.constant("host_sync"),
            },
        )

    def context_terms(
        self, times: list[UnitTimes], exposed: Exposed, last: Exposed
    ) -> Iterator[Term]:
        """What attention waits for over ``cp``, and blocks for the host."""
        waited = sum(t.count * (t.cp_forward + t.cp_backward) for t in times)
        about: _Inputs = {"cp": self.layout.cp, "kind": self.work.cp_attention}
        yield self.repeated(
            "context parallel",
            waited,
            "sum of what the units' attention waits for over cp",
            {
                **about,
                "of a micro-batch": waited,
                "overlap_slowdown": constant("overlap_slowdown"),
            },
        )
        # What the last block keeps stays.
        copied = sum(max(t.count - 1, 0) * t.offload for t in times)
        yield self.waited(
            "exposed offload",
            exposed.offload,
            last.offload,
            "copies of blocks but the last that nothing hides",
            {
                "copies of a micro-batch, each way": copied,
                "host": Constant("host", self.gpu.host, "GB/s", self.gpu.source),
                "host_efficiency": constant("host_efficiency"),
            },
        )

    def engine_terms(self, exposed: Exposed, last: Exposed) -> Iterator[Term]:
        """Copies in and out of buffers, exposed communication, accumulation."""
        is_fsdp, rate = self.work.sharding == "fsdp", {"memory rate": self.rate}
        copied = 0.0
        for unit in self.units if is_fsdp else ():
            gathered, reduced = self.copied(unit)
            copied += unit.count * (gathered * (1 + self.is_gathered_again(unit)) + reduced)
        moved = {name: self.stack.constant(name) for name in ("gather_copy", "reduce_copy")}
        inputs: _Inputs = {"bytes": copied, **moved, **rate}
        yield self.repeated("copies", copied / self.rate, "bytes / memory rate", inputs)
        slowdown = {"overlap_slowdown": constant("overlap_slowdown")}
        for name, what in _EXPOSED.items():
            both = getattr(exposed, name), getattr(last, name)
            title = name if name == "slowdown" else f"exposed {name}"
            yield self.waited(title, *both, what, slowdown)
        add = self.stack.constant("accumulate")
        added = (self.at_rest if is_fsdp else self.numel) if self.accumulation > 1 else 0
        inputs = {"gradients": added, "accumulate": add, **rate}
        what = "accumulate * gradients / memory rate"
        yield self.repeated("accumulate", add.value * added / self.rate, what, inputs)

    def optimizer(self) -> Term:
        """Parameters, gradients and state are read, parameters and state written."""
        work, numel, rate, replicate = self.work, self.numel, self.rate, self.layout.replicate
        hybrid = numel / self.at_rest * (replicate if self.hybrid else 1)
        ranks = {"fsdp": hybrid, "zero1": replicate, "ddp": 1}[work.sharding]
        per = 3 * work.param_itemsize + 2 * work.optimizer_bytes
        return Term(
            "optimizer",
            per * numel / ranks / rate,
            "(3 parameter itemsize + 2 state bytes) * parameters / ranks / memory rate",
            {"parameter itemsize": work.param_itemsize, "state bytes": work.optimizer_bytes}
            | {"parameters": numel, "ranks": ranks, "memory rate": rate},
        )

    def stragglers(self, others: float) -> Term:
        straggler, nodes = self.stack.constant("straggler"), self.step.cluster.nodes
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
