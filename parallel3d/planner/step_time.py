"""Seconds of an optimizer step: kernels, tensor parallelism, the engine's communication, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from parallel3d.mesh import MeshLayout
from parallel3d.mesh.axes import AXES
from parallel3d.planner.cluster import AxisLink, Cluster, collective_time, link_of
from parallel3d.planner.constants import Term, constant
from parallel3d.planner.engine import rank_rows
from parallel3d.planner.kernels import Kernels, kernels_of, memory_rate, share
from parallel3d.planner.model_spec import ModelSpec, Unit
from parallel3d.planner.workload import Workload

# What of the engine's communication compute doesn't hide, unit by unit.
#
# While unit i computes, the gather of the next unit runs; in backward also the reduction of the
# one before, and HSDP's all-reduce. What is longer is exposed; compute under communication is
# slower (``overlap_slowdown``).


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of one of ``count`` equal units.

    Attributes:
        forward, backward: with tensor parallelism's communication.
        gather, reduce, all_reduce: of one unit.
        gather_again: in backward; 0 if the unit was kept.
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
        gather, reduce, all_reduce: waited for.
        slowdown: compute is longer by this much. hidden: communication beside compute.
    """

    gather: float = 0.0
    reduce: float = 0.0
    all_reduce: float = 0.0
    slowdown: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        return self.gather + self.reduce + self.all_reduce + self.slowdown

    def wait(self, times: int, compute: float, gather: float, reduce: float, extra: float) -> None:
        """``times`` times: compute with these three beside it."""
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
    """Of one forward and backward; ``all_reduce``: whether this is the micro-batch with HSDP's."""
    found = Exposed()
    if not units:
        return found
    found.gather += units[0].gather  # nothing runs before it
    for i, unit in enumerate(units):
        after = units[i + 1].gather if i + 1 < len(units) else 0.0
        found.wait(unit.count - 1, unit.forward, unit.gather, 0.0, 0.0)
        found.wait(1, unit.forward, after, 0.0, 0.0)
    for i in range(len(units) - 1, -1, -1):
        unit = units[i]
        before = units[i - 1].gather_again if i else 0.0
        later = units[i + 1] if i + 1 < len(units) else None
        extra = unit.all_reduce if all_reduce else 0.0
        found.wait(unit.count - 1, unit.backward, unit.gather_again, unit.reduce, extra)
        reduce = later.reduce if later else 0.0
        late = later.all_reduce if later and all_reduce else 0.0
        found.wait(1, unit.backward, before, reduce, late)
    found.reduce += units[0].reduce  # after the last backward
    if all_reduce:
        found.all_reduce += units[0].all_reduce
    return found


def once_exposed(units: Sequence[UnitTimes], *, reduce: float, gather: float) -> Exposed:
    """Of one step where parameters are whole: gradients are reduced (``reduce`` seconds in all) in the last
    backward, updated parameters gathered (ZeRO-1) in the next forward. One bucket of many is last."""
    found = Exposed()
    count = max(sum(unit.count for unit in units), 1)
    forward = sum(unit.count * unit.forward for unit in units)
    backward = sum(unit.count * unit.backward for unit in units)
    found.wait(1, backward, 0.0, reduce * (1 - 1 / count), 0.0)
    found.wait(1, forward, gather * (1 - 1 / count), 0.0, 0.0)
    found.reduce += reduce / count
    found.gather += gather / count
    return found


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, and its FLOPs.

    Attributes:
        terms: by component; they add up to ``total``.
        model_flops: of the plain model's matmuls and attention, forward and backward, a step, over tp.
        hardware_flops: what one GPU computes, also what several do and what checkpointing repeats.
        units: of one micro-batch, for the timeline.
    """

    terms: dict[str, Term]
    model_flops: float
    hardware_flops: float
    units: list[tuple[Unit, UnitTimes]]

    @property
    def total(self) -> float:
        return sum(term.value for term in self.terms.values())


def step_time(
    model: ModelSpec,
    layout: MeshLayout,
    cluster: Cluster,
    work: Workload,
    micro_batch: int,
    accumulation: int,
) -> StepTime:
    """Of ``accumulation`` micro-batches of ``micro_batch`` sequences on each data rank."""
    tp = layout.tp
    links = {axis: link_of(layout, axis, cluster) for axis in AXES}
    kernels = [(u, kernels_of(u, cluster.gpu, work, tp, micro_batch)) for u in model.units]
    comms = [_tp_time(u, work, micro_batch, links["tp"], cluster) for u in model.units]
    times = [
        _unit_times(u, k, comm, work, tp, links, cluster)
        for (u, k), comm in zip(kernels, comms, strict=True)
    ]
    each = list(zip(model.units, times, strict=True))
    exposed, once = _exposed(each, work, tp, links, cluster, accumulation)
    terms = _compute_terms(kernels, accumulation)
    tp_total = sum(u.count * (f + b) for u, (f, b) in zip(model.units, comms, strict=True))
    terms["tensor parallel"] = Term(
        "tensor parallel",
        tp_total * accumulation,
        "s",
        "accumulation * sum of the units' collectives over tp, none of them hidden",
        (
            ("accumulation", accumulation),
            ("tp", tp),
            ("collectives of a micro-batch", tp_total),
            ("tokens", micro_batch * work.seq_len),
        ),
    )
    terms |= _engine_terms(model, work, tp, cluster, exposed, once, accumulation, links)
    terms["optimizer"] = _optimizer(model, layout, cluster, work)
    terms["stragglers"] = _stragglers(sum(term.value for term in terms.values()), cluster)
    flops = [sum(u.count * k.flops[i] for u, k in kernels) * accumulation for i in range(3)]
    whole = [kernels_of(u, cluster.gpu, work, 1, micro_batch).flops for u in model.units]
    useful = sum(u.count * (f[0] + f[1]) for u, f in zip(model.units, whole, strict=True))
    return StepTime(terms, useful * accumulation / tp, sum(flops), each)


def _tp_time(
    unit: Unit, work: Workload, micro_batch: int, link: AxisLink, cluster: Cluster
) -> tuple[float, float]:
    """(forward, backward) seconds of the collectives over ``tp`` of one unit."""
    total = {"forward": 0.0, "backward": 0.0}
    for way, kind, nbytes in tp_collectives(unit, work, micro_batch, link):
        total[way] += collective_time(kind, nbytes, link, cluster)
    forward, backward = total["forward"], total["backward"]
    if unit.kind == "block":
        again = {"full": 1.0, "selective_layer": 0.5, "selective_op": 0.5}
        backward += forward * again.get(work.checkpointing, 0.0)
    return forward, backward


def tp_collectives(
    unit: Unit, work: Workload, micro_batch: int, link: AxisLink
) -> list[tuple[str, str, int]]:
    """("forward" or "backward", operation, bytes) of the collectives over ``tp`` of one unit."""
    if link.size == 1:
        return []
    size = micro_batch * work.seq_len * work.compute_itemsize
    inputs, outputs = ([size * n for n in each] for each in (unit.tp_inputs, unit.tp_outputs))
    if not work.sequence_parallel:
        found = [("forward", "all_reduce", n) for n in outputs]
        return found + [("backward", "all_reduce", n) for n in inputs]
    found = [("forward", "all_gather", n) for n in inputs]
    found += [("forward", "reduce_scatter", n) for n in outputs]
    found += [("backward", "reduce_scatter", n) for n in inputs]
    found += [("backward", "all_gather", n) for n in outputs]
    if share("gathered", work, link.size) > 1:
        found += [("backward", "all_gather", n) for n in inputs]
    return found


def local_numel(unit: Unit, tp: int) -> int:
    """Elements of a unit's parameters on the fullest rank of ``tp``."""
    return sum(
        p.numel if p.tp_dim is None else p.numel // p.shape[p.tp_dim] * rank_rows(p, tp)
        for p in unit.parameters
    )


def _unit_times(
    unit: Unit,
    kernels: Kernels,
    comm: tuple[float, float],
    work: Workload,
    tp: int,
    links: dict[str, AxisLink],
    cluster: Cluster,
) -> UnitTimes:
    forward, backward = kernels.forward + comm[0], kernels.backward + comm[1]
    shard, replicate = links["shard"], links["replicate"]
    numel = local_numel(unit, tp)
    if work.sharding != "fsdp" or not numel:
        return UnitTimes(unit.count, forward, backward, 0.0, 0.0, 0.0, 0.0, *comm)
    rate = memory_rate(cluster.gpu)
    gather = collective_time("all_gather", numel * work.compute_itemsize, shard, cluster)
    reduce = collective_time("reduce_scatter", numel * work.reduce_itemsize, shard, cluster)
    part = numel * work.reduce_itemsize / shard.size
    summed = collective_time("all_reduce", part, replicate, cluster)
    again = gather if unit.kind == "block" and work.reshard_after_forward else 0.0
    if shard.size > 1:
        copy = constant("gather_copy").value * numel / rate
        forward += copy
        backward += constant("reduce_copy").value * numel / rate + (copy if again else 0.0)
    return UnitTimes(unit.count, forward, backward, gather, again, reduce, summed, *comm)


def _exposed(
    each: list[tuple[Unit, UnitTimes]],
    work: Workload,
    tp: int,
    links: dict[str, AxisLink],
    cluster: Cluster,
    accumulation: int,
) -> tuple[Exposed, Exposed]:
    """(of every micro-batch but the last, of the last one)."""
    times = [t for _, t in each]
    if work.sharding == "fsdp":
        return fsdp_exposed(times, all_reduce=False), fsdp_exposed(times, all_reduce=True)
    link = links["replicate"]
    numel = sum(u.count * local_numel(u, tp) for u, _ in each)
    reduced, gathered = numel * work.reduce_itemsize, numel * work.compute_itemsize
    if work.sharding == "ddp":
        reduce = collective_time("all_reduce", reduced, link, cluster)
        return Exposed(), once_exposed(times, reduce=reduce, gather=0.0)
    reduce = collective_time("reduce_scatter", reduced, link, cluster)
    gather = collective_time("all_gather", gathered, link, cluster)
    return Exposed(), once_exposed(times, reduce=reduce, gather=gather)


def _compute_terms(kernels: list[tuple[Unit, Kernels]], accumulation: int) -> dict[str, Term]:
    def total(name: str, value: float, what: str) -> Term:
        inputs = (("accumulation", accumulation), ("micro-batch", value))
        return Term(name, value * accumulation, "s", f"accumulation * {what}", inputs)

    def over(part: str, which: int) -> float:
        return sum(u.count * getattr(k, part)[which] for u, k in kernels)

    terms = {}
    for part, name in (
        ("matmul", "matmul"),
        ("attention", "attention"),
        ("elementwise", "elementwise"),
    ):
        for which, way in enumerate(("forward", "backward")):
            terms[f"{name} {way}"] = total(
                f"{name} {way}", over(part, which), f"sum over units of their {name} kernels"
            )
    again = sum(u.count * k.again for u, k in kernels)
    terms["recompute"] = total("recompute", again, "what checkpointing computes again")
    busy = sum(over(part, w) for part in ("matmul", "attention", "elementwise") for w in (0, 1))
    whole = sum(u.count * (k.forward + k.backward) for u, k in kernels)
    terms["launch"] = total(
        "launch", max(0.0, whole - again - busy), "host time beyond that of the kernels it starts"
    )
    return terms


def _engine_terms(
    model: ModelSpec,
    work: Workload,
    tp: int,
    cluster: Cluster,
    exposed: Exposed,
    last: Exposed,
    accumulation: int,
    links: dict[str, AxisLink],
) -> dict[str, Term]:
    rest = accumulation - 1
    numel = sum(u.count * local_numel(u, tp) for u in model.units)
    rate = memory_rate(cluster.gpu)
    copies = 0.0
    if work.sharding == "fsdp" and links["shard"].size > 1:
        blocks = sum(u.count * local_numel(u, tp) for u in model.units if u.kind == "block")
        again = blocks if work.reshard_after_forward else 0
        gather, reduce = constant("gather_copy"), constant("reduce_copy")
        copies = (gather.value * (numel + again) + reduce.value * numel) / rate * accumulation
    terms = {
        "copies": Term(
            "copies",
            copies,
            "s",
            "accumulation * (gather_copy * gathered + reduce_copy * parameters) / memory rate",
            (
                ("accumulation", accumulation),
                ("parameters", numel),
                ("gather_copy", constant("gather_copy")),
                ("reduce_copy", constant("reduce_copy")),
                ("memory rate", rate),
            ),
        )
    }
    for name, what in (
        ("gather", "all-gather over shard that compute doesn't hide"),
        ("reduce", "reduce-scatter that compute doesn't hide"),
        ("all_reduce", "HSDP's all-reduce over replicate that compute doesn't hide"),
        ("slowdown", "compute that is slower while collectives run"),
    ):
        each, final = getattr(exposed, name), getattr(last, name)
        label = name if name == "slowdown" else f"exposed {name}"
        terms[label] = Term(
            label,
            each * rest + final,
            "s",
            f"(accumulation - 1) * each + last: {what}",
            (
                ("accumulation", accumulation),
                ("each", each),
                ("last", final),
                ("overlap_slowdown", constant("overlap_slowdown")),
            ),
        )
    added = numel if accumulation > 1 else 0
    if work.sharding == "fsdp":
        added //= links["shard"].size
    terms["accumulate"] = Term(
        "accumulate",
        constant("accumulate").value * added * accumulation / rate,
        "s",
        "accumulation * accumulate * gradients / memory rate",
        (
            ("accumulation", accumulation),
            ("gradients", added),
            ("accumulate", constant("accumulate")),
            ("memory rate", rate),
        ),
    )
    return terms


def _stragglers(rest: float, cluster: Cluster) -> Term:
    doublings = log2(cluster.nodes)
    return Term(
        "stragglers",
        constant("straggler").value * doublings * rest,
        "s",
        "straggler * log2(nodes) * all else",
        (("straggler", constant("straggler")), ("nodes", cluster.nodes), ("all else", rest)),
    )


def _optimizer(model: ModelSpec, layout: MeshLayout, cluster: Cluster, work: Workload) -> Term:
    numel = sum(u.count * local_numel(u, layout.tp) for u in model.units)
    over = {"fsdp": layout.shard, "zero1": layout.replicate, "ddp": 1}[work.sharding]
    per = 3 * work.param_itemsize + 2 * work.optimizer_bytes
    rate = memory_rate(cluster.gpu)
    return Term(
        "optimizer",
        per * numel / over / rate,
        "s",
        "(3 parameter itemsize + 2 state bytes) * parameters / ranks / memory rate",
        (
            ("parameter itemsize", work.param_itemsize),
            ("state bytes", work.optimizer_bytes),
            ("parameters", numel),
            ("ranks", over),
            ("memory rate", rate),
        ),
    )
