"""The seconds of an optimizer step: kernels, communication of tp, cp, ep and the engine, the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import ceil, log2, prod

from parallel3d._play import Exposed, PlayRules, UnitTimes, exposed_of
from parallel3d.fsdp.layout import ACCELERATOR_BYTES
from parallel3d.planner import mixture
from parallel3d.planner.cluster import Cluster, HostTimes, collective_time
from parallel3d.planner.constants import Constant, Term, constant
from parallel3d.planner.context import exchanges
from parallel3d.planner.engine import (
    UnitLayout,
    local_numels,
    local_parts,
    partial_numel,
    segment_of,
    tp_cut,
    unit_layout,
)
from parallel3d.planner.kernels import (
    Kernels,
    attention_time,
    chunks_of,
    elements,
    gathered_logits,
    gemms_of,
    host_time,
    kernels_of,
    memory_rate,
    offloaded,
    share,
)
from parallel3d.planner.model_spec import Matmul, UnitSpec
from parallel3d.planner.recompute import KINDS
from parallel3d.planner.workload import Local, Step


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, and its FLOPs.

    Attributes:
        terms: seconds by component; they add up to ``total``.
        model_flops: FLOPs a GPU of the plain model's matmuls and attention in a step, none repeated or
            redundant.
        hardware_flops: FLOPs that one GPU executes, with those that other GPUs execute too and those that
            checkpointing repeats.
        units, rules: each unit with its times in one micro-batch, and the rules by which they overlap; for
            the timeline.
        host: "forward", "backward", "optimizer" -> seconds of a step in which the GPU waits for launches.
    """

    terms: dict[str, Term]
    model_flops: float
    hardware_flops: float
    units: list[tuple[UnitSpec, UnitTimes]]
    rules: PlayRules
    host: dict[str, float]

    @property
    def total(self) -> float:
        return sum(term.value for term in self.terms.values())


def step_time(step: Step) -> StepTime:
    """Returns the predicted time of ``step``, without pipeline stages."""
    return _Timing(step).time()


def tp_collectives(unit: UnitSpec, local: Local) -> list[tuple[str, str, float]]:
    """Returns ("forward" or "backward", operation, bytes) for each collective over ``tp`` of one unit."""
    if local.tp == 1:
        return []
    work, size = local.work, float(local.tokens * local.work.compute_itemsize)
    inputs, outputs = ([size * n for n in each] for each in (unit.tp_inputs, unit.tp_outputs))
    summed = [*inputs]
    for layers in layers_of_inputs(unit):  # those of the first block with adapters need no gradient
        if not any(m.input_gradient for m in layers) and size * layers[0].k in summed:
            summed.remove(size * layers[0].k)
    # What float8 matmuls take is gathered in float8, with sequence parallelism.
    part = 1 / work.compute_itemsize if work.float8 and unit.kind == "block" else 1
    calls = _loss_collectives(unit, local)
    if logits := gathered_logits(unit, local):
        calls.append(("forward", "all_gather", logits))
    if not work.sequence_parallel:
        calls += [("forward", "all_reduce", n) for n in outputs]
        return calls + [("backward", "all_reduce", n) for n in summed]
    calls += [("forward", "all_gather", n * part) for n in inputs]
    calls += [("forward", "reduce_scatter", n) for n in outputs]
    calls += [("backward", "reduce_scatter", n) for n in summed]
    calls += [("backward", "all_gather", n * part) for n in outputs]
    if share("gathered", local) > 1:
        calls += [("backward", "all_gather", n * part) for n in inputs]
    return calls


def layers_of_inputs(unit: UnitSpec) -> list[list[Matmul]]:
    """The colwise layers that share an input, for each of them: a rowwise layer follows."""
    found: list[list[Matmul]] = [[]]
    for matmul in unit.matmuls:
        if matmul.split == "n" and not matmul.is_adapter:
            found[-1].append(matmul)
        elif matmul.split == "k":
            found.append([])
    return [layers for layers in found if layers]


def _loss_collectives(unit: UnitSpec, local: Local) -> list[tuple[str, str, float]]:
    """Returns the all-reduces of a loss whose logits tp divides, as ``tp_collectives``: of the largest logit,
    and of the sum of exponentials and the target's logit, in fp32, for each chunk."""
    if not local.work.loss_parallel or not any(each.split == "loss" for each in unit.elementwise):
        return []
    chunks = chunks_of(unit, local)
    sizes = (4.0 * local.tokens / chunks, 8.0 * local.tokens / chunks)
    return [("forward", "all_reduce", size) for size in sizes] * chunks


def engine_collectives(
    numel: int, trained: int, step: Step, axis: str = "shard"
) -> dict[str, tuple[str, float, str]]:
    """Returns the all-gather and the reductions of one unit: name -> (operation, bytes, axis).

    Args:
        numel: elements of the unit's parameters on one rank of ``tp``, or of ``ep``.
        trained: how many of them are trainable; 0: nothing is reduced.
        axis: the axis that shards them: "shard", or "efsdp" for experts that ep divides.
    """
    work = step.workload
    if work.sharding != "fsdp" or not numel:
        return {}
    size = float(numel * work.compute_itemsize)
    calls = {"gather": ("all_gather", size, axis)}
    if not trained:
        return calls
    sent = trained * work.sent_itemsize
    is_hybrid, is_wired = work.is_hybrid(step.layout.replicate), work.wire_dtype is not None
    name = "reduce over replicate" if is_hybrid else "all-reduce"
    scatter = "all_to_all" if is_wired else "reduce_scatter"
    over_replicate = scatter if is_hybrid or is_wired else "all_reduce"
    part = sent / step.links[axis].size
    calls |= {"reduce": (scatter, sent, axis), name: (over_replicate, part, "replicate")}
    if is_wired and not is_hybrid:
        calls["gather of the sums"] = ("all_gather", part, "replicate")
    return calls


def host_rate(cluster: Cluster) -> float:
    """Returns the bytes a second of a GPU's pinned copies to the host, while all GPUs of its node copy.

    They share PCIe switches and the bandwidth of the host's memory. In a node with fewer GPUs than usual each
    GPU has a larger part, up to a whole link.
    """
    gpu = cluster.gpu
    part = min(gpu.host_shared * max(gpu.node / cluster.gpus_per_node, 1.0), 1.0)
    return gpu.host * part * 1e9 * constant("host_efficiency").value


# GB/s of PCIe 6 x16: a link to the host that is faster isn't also that to the network card.
_PCIE = 121
_Inputs = dict[str, float | str | Constant]


class _Timing:
    def __init__(self, step: Step) -> None:
        self.step, self.work, self.layout = step, step.workload, step.layout
        self.gpu, self.accumulation = step.cluster.gpu, step.accumulation
        self.stack = step.workload.profile
        self.units, self.rate = step.model.units, memory_rate(self.gpu)
        self.local = step.local
        self.hybrid = step.workload.is_hybrid(step.layout.replicate)
        self.links = step.links
        # Elements of one rank of tp, or of ep, before they are sharded, by unit and axis: see
        # ``local_numels``. Of trained ones by axis, in all, and of a shard.
        self.numels = {id(u): local_numels(u, self.layout) for u in self.units}
        self.by_axis = {
            axis: sum(u.count * self.numels[id(u)][axis][1] for u in self.units)
            for axis in ("shard", "efsdp")
        }
        self.numel = sum(self.by_axis.values())
        self.at_rest = sum(n / self.links[axis].size for axis, n in self.by_axis.items())

    def time(self) -> StepTime:
        units, tp, cp = self.units, self.layout.tp, self.layout.cp
        kernels = [kernels_of(u, self.local) for u in units]
        after = [u if u.count > 1 else then for u, then in zip_longest(units, units[1:])]
        times = [self.unit_times(*each) for each in zip(units, kernels, after, strict=True)]
        optimizer = self.optimizer()
        tp_total = sum(t.count * (t.tp_forward + t.tp_backward) for t in times)
        waits = {name: self.stack.constant(name) for name in ("tp_exposed", "tp_wait")}
        # The host goes from parameter to parameter.
        parameters = sum(unit.count * len(unit.parameters) for unit in units)
        issued = parameters * host_time("optimizer", self.gpu, self.stack)
        each, last = lost = self.exposed(times, (optimizer.value, issued))
        host = {
            way: getattr(each, f"host_{way}") * (self.accumulation - 1)
            + getattr(last, f"host_{way}")
            for way in ("forward", "backward", "optimizer")
        }
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
            optimizer,
            self.host(host),
        ]
        terms.append(stragglers(self.step, sum(term.value for term in terms)))
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
            host,
        )

    @property
    def unsharded(self) -> dict[str, int]:
        """For ZeRO-1 and DDP: the elements of trainable parameters, by the axis that reduces gradients."""
        return {"replicate": self.by_axis["shard"], "efsdp": self.by_axis["efsdp"]}

    def collective(self, kind: str, nbytes: float, axis: str) -> float:
        seconds = collective_time(kind, nbytes, self.links[axis], self.step.cluster)
        return seconds * self.stack.value("collective_time")

    def beside(self, seconds: float, kernels: float) -> float:
        """Returns by how many seconds ``kernels`` seconds of compute take longer beside a collective of
        ``seconds``: it slows them down, and what is left of it after them is waited for."""
        slowdown = self.stack.value("overlap_slowdown")
        slowed = slowdown * min(seconds / (1 + slowdown), kernels)
        return slowed + max(0.0, seconds - kernels - slowed)

    def tp_time(self, unit: UnitSpec, after: UnitSpec | None) -> tuple[float, float]:
        """Returns the (forward, backward) seconds of one unit's collectives over ``tp``.

        Where nothing is sharded the sum of gradients that are partial of the unit ``after`` it, whose
        backward comes before, runs beside what is cast first; other reductions hide it.
        """
        if self.layout.tp == 1:
            return 0.0, 0.0
        total = {"forward": 0.0, "backward": 0.0}
        micro_batch = self.step.micro_batch
        wait = self.stack.value("tp_wait") * self.stack.value("tp_exposed")
        hidden = (s * self.stack.value("tp_beside") for s in self.weight_gradients(unit))
        # Of several sequences the parts that ranks have don't follow one another; gradients are copied.
        packed = {"forward": ("all_gather",), "backward": ("all_gather", "reduce_scatter")}
        if micro_batch == 1 or not self.work.sequence_parallel:
            packed = {"backward": ("all_reduce",)}
        if after is not None and self.work.sharding == "fsdp" and self.links["shard"].size == 1:
            numel = partial_numel(after, self.layout, self.work.sequence_parallel)
            summed = self.collective("all_reduce", numel * self.work.reduce_itemsize, "tp") * wait
            cast = self.copied(unit)[0] * self.is_gathered_again(unit)
            total["backward"] += self.beside(summed, cast / self.rate) if numel else 0.0
        last = 0.0  # of forward: what the block's last matmul is followed by
        for way, kind, nbytes in tp_collectives(unit, self.local):
            seconds = self.collective(kind, nbytes, "tp") * wait
            if kind in packed.get(way, ()):
                seconds += self.stack.value("tp_packed") * nbytes / self.rate
            if way == "backward" and kind in ("reduce_scatter", "all_reduce"):
                seconds = self.beside(seconds, next(hidden))
            total[way] += seconds
            last = seconds if way == "forward" else last
        return self.with_repeated(unit, total, last)

    def weight_gradients(self, unit: UnitSpec) -> list[float]:
        """Returns the seconds of weight gradients that run while tp reduces the gradient of an input, for
        each input that colwise layers share: those of these layers."""
        gemms, inputs = gemms_of(unit, self.local), max(len(unit.tp_inputs), 1)
        seconds = {name: s for name, way, _, s in gemms if way == "weight gradient"}
        sums = (sum(seconds.get(m.name, 0.0) for m in each) for each in layers_of_inputs(unit))
        found = [each for each in sums if each]
        return found if len(found) == inputs else [sum(found) / inputs] * inputs

    def with_repeated(
        self, unit: UnitSpec, total: dict[str, float], last: float = 0.0
    ) -> tuple[float, float]:
        """Returns the (forward, backward) seconds ``total`` of collectives plus those that checkpointing
        repeats. ``last``: of the one after the block's last matmul, repeated only if this is."""
        again = KINDS[self.work.checkpointing].collectives if unit.kind == "block" else 0.0
        repeated = total["forward"] - last * (1 - self.stack.value("last_matmul_again"))
        return total["forward"], total["backward"] + again * repeated

    def cp_time(self, unit: UnitSpec) -> tuple[float, float]:
        """Returns the (forward, backward) seconds by which communication over ``cp`` lengthens attention.
        Sends of a ring overlap with it; it waits for all-to-alls, all-gathers and their packing."""
        total = {"forward": 0.0, "backward": 0.0}
        for a in unit.attention if self.layout.cp > 1 else ():
            whole = attention_time(a, self.local)
            own = dict(zip(total, whole, strict=True))
            for each in exchanges(a, self.local):
                seconds = self.collective(each.operation, each.nbytes, "cp")
                step = own[each.way] / (each.count + 1) if each.operation == "send" else 0.0
                waited = self.beside(seconds, step) + each.copied / self.rate
                total[each.way] += each.count * waited
        return self.with_repeated(unit, total)

    def ep_time(self, unit: UnitSpec) -> tuple[float, float]:
        """Returns the (forward, backward) seconds that one unit's experts wait over ``ep``: for all-to-alls,
        their packing, and the host, which must know the messages' lengths before it can launch what follows.
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

    def unit_times(self, unit: UnitSpec, kernels: Kernels, after: UnitSpec | None) -> UnitTimes:
        tp_forward, tp_backward = self.tp_time(unit, after)
        cp_forward, cp_backward = self.cp_time(unit)
        ep_forward, ep_backward = self.ep_time(unit)
        forward = kernels.forward + tp_forward + cp_forward + ep_forward
        backward = kernels.backward + tp_backward + cp_backward + ep_backward
        moved = offloaded(unit, self.local) * self.local.tokens
        gather = reduce = summed = again = crossing = packing = freed = 0.0
        numels = self.numels[id(unit)]
        for axis, (numel, trained) in numels.items():
            if calls := engine_collectives(numel, trained, self.step, axis):
                own = [self.collective(*call) for call in calls.values()]
                own += [0.0] * (3 - len(own))  # of frozen parameters nothing is reduced
                gather, reduce, summed = gather + own[0], reduce + own[1], summed + sum(own[2:])
                here = self.summed_here(trained, axis)
                reduce, summed = reduce + here[0], summed + here[1]
                if (ranks := self.links[axis].size) > 1 and not self.hybrid:
                    gather += self.cast_of(unit, axis) / ranks / self.rate
                crossing += own[0] if self.links[axis].nodes > 1 else 0.0
        if self.work.sharding == "fsdp" and any(numel for numel, _ in numels.values()):
            again = gather if self.is_gathered_again(unit) else 0.0
            copy, copied = (each / self.rate for each in self.copied(unit))
            forward += copy
            copy *= self.is_gathered_again(unit)
            backward += copied + copy
            packing = copied - self.dense_gradient(unit) / self.rate
            if self.stack.frees_first and (half := self.half_of_gradients(unit, kernels)):
                half += copied - packing + copy + kernels.again
                freed = (half + tp_backward / (2 * len(layers_of_inputs(unit)) or 1)) / backward
        crossing += cp_forward if self.links["cp"].nodes > 1 else 0.0
        crossing += ep_forward if self.links["ep"].nodes > 1 else 0.0
        has_replicas = self.work.sharding == "fsdp" and self.layout.replicate > 1
        replicate = 2 * host_time("replicate", self.gpu, self.stack) if has_replicas else 0.0
        return UnitTimes(
            *(unit.count, forward, backward, gather, again, reduce, summed),
            *(tp_forward, tp_backward, cp_forward, cp_backward, ep_forward, ep_backward),
            offload=self.offload(moved, crossing),
            packing=packing,
            freed=freed,
            parts=(max(len(layers_of_inputs(unit)), 1), self.work.sequence_parallel),
            host_forward=kernels.host[0],
            host_backward=kernels.host[1] + replicate,
        )

    def offload(self, moved: float, crossing: float) -> float:
        """Returns the seconds to copy ``moved`` bytes to or from the host, while collectives between nodes
        run for ``crossing`` seconds: these use the GPU's PCIe link too."""
        rate = constant("host_efficiency").value * self.gpu.host
        network = crossing * self.step.cluster.nic / rate if self.gpu.host <= _PCIE else 0.0
        return moved / host_rate(self.step.cluster) + network if moved else 0.0

    def is_gathered_again(self, unit: UnitSpec) -> bool:
        """Whether the parameters of ``unit`` are gathered (or cast) again for backward."""
        return unit.kind == "block" and self.work.reshard_after_forward

    def copied(self, unit: UnitSpec) -> tuple[float, float]:
        """Returns the bytes that copies on the compute stream move for (a unit's all-gather, its reduction).

        With several shards these are copies out of the gathered buffer, and into the gradients' buffer, more
        with padding. With one shard they are casts, if the dtypes differ.
        """
        parts = [self.copied_of(unit, axis) for axis in ("shard", "efsdp")]
        dense = self.dense_gradient(unit)
        return sum(each for each, _ in parts), sum(each for _, each in parts) + dense

    def summed_here(self, numel: int, axis: str) -> tuple[float, float]:
        """Returns the seconds of kernels beside the reduction of ``numel`` (over ``axis``, replicate).

        Without shards, a kernel scales the sum instead of the reduce-scatter. With a ``wire_dtype`` a rank
        sums what it receives, and casts before and after the reduction over replicate.
        """
        work, ranks, copies = self.work, self.links[axis].size, self.layout.replicate
        scaled = 2 * work.reduce_itemsize * numel * (ranks == 1 < copies) / self.rate
        if work.wire_dtype is None:
            return scaled, 0.0
        sent, reduced = work.sent_itemsize, work.reduce_itemsize
        over_replicate = (2 + 1 / copies) * (sent + reduced) + sent + reduced / copies
        return (
            numel * (sent + reduced / ranks) * (ranks > 1) / self.rate + scaled,
            numel / ranks * over_replicate * (copies > 1) / self.rate,
        )

    def cast_of(self, unit: UnitSpec, axis: str) -> int:
        """Returns the bytes that casts of a unit's parameters to the compute dtype move, for those parameters
        that ``axis`` shards, on one rank of tp before sharding; 0 if no cast is needed."""
        compute, cast = self.work.compute_itemsize, 0
        for p, shape in local_parts(unit, self.layout)[axis]:
            rest = self.work.rest_itemsize(p)
            cast += (rest + compute) * prod(shape) if rest != compute else 0
        return cast

    def copied_of(self, unit: UnitSpec, axis: str) -> tuple[float, float]:
        """As ``copied``, for the parameters that ``axis`` shards."""
        work, ranks, parts = self.work, self.links[axis].size, local_parts(unit, self.layout)[axis]
        numel, trained = self.numels[id(unit)][axis]
        if ranks == 1:
            compute, summed = work.compute_itemsize, work.reduce_itemsize
            cast = self.cast_of(unit, axis)
            return cast, (compute + summed) * trained if compute != summed else 0
        gather, reduce = (self.stack.value(name) for name in ("gather_copy", "reduce_copy"))
        even = {p: segment_of(p, ranks, self.layout, axis).even for p, _ in parts if p.trainable}
        again = sum(prod(shape) for p, shape in parts if not even.get(p, True))
        # Out of the buffer: what is not zero-copy, and all of HFSDP.
        copied = max(gather, 2 * work.compute_itemsize)
        out = numel if self.hybrid else self.packed(unit, axis)
        if work.sent_itemsize == work.compute_itemsize != work.reduce_itemsize:  # no cast
            reduce *= 2 * work.compute_itemsize / (work.compute_itemsize + work.reduce_itemsize)
        return copied * out + gather * (numel - out), reduce * (trained + again)

    def packed(self, unit: UnitSpec, axis: str) -> int:
        """Unsharded elements of what ``axis`` shards that the engine packs for its all-gather."""
        dense = self.buckets_of(unit)
        own = dense.experts if axis == "efsdp" else dense
        return sum(b.num_shards * b.packed for b in own.buckets) if own is not None else 0

    def buckets_of(self, unit: UnitSpec) -> UnitLayout:
        work, layout = self.work, self.layout
        sizes = layout.shard * layout.cp, layout.tp, work.param_itemsize, work.sequence_parallel
        return unit_layout(unit, *sizes, ACCELERATOR_BYTES, layout.ep)

    def half_of_gradients(self, unit: UnitSpec, kernels: Kernels) -> float:
        """Returns the seconds of a backward's kernels, but recomputation, until half of ``unit``'s large
        gradients have arrived; 0 if it has none."""
        own = self.buckets_of(unit)
        grads = [own.buckets[number].grads[index] for number, index in own.arrivals]
        every = [
            p for p in unit.parameters if p.trainable and not (p.experts and self.layout.ep > 1)
        ]
        large = [
            (p.name, g.numel) for p, g in zip(reversed(every), grads, strict=True) if g.zero_copy
        ]
        if not large:
            return 0.0
        left = sum(numel for _, numel in large) / 2
        last = next(name for name, numel in large if (left := left - numel) <= 0)
        seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, way, _, each in gemms_of(unit, self.local):
            seconds[name][way] = each
        ways, whole = ("input gradient", "weight gradient"), kernels.backward - kernels.again
        names = [m.name for m in reversed(unit.matmuls)]
        at = next((i for i, name in enumerate(names) if last.startswith(f"{name}.")), None)
        if at is None:
            return whole
        found = sum(seconds[name][way] for name in names[: at + 1] for way in ways)
        groups = layers_of_inputs(unit)
        together = [m.name for m in reversed(groups[-1])] if groups else []
        if names[at] not in together:
            share = found / kernels.matmul[1]
            done = names[at] in (m.name for m in groups[0]) if groups else False
            return found + kernels.elementwise[1] * share + kernels.attention[1] * done
        # Of the kernels between a gated MLP's matrices two in three come before the second one's gradient.
        count = together.index(names[at]) + 1
        part = (count + 1) / (len(together) + 1)
        if self.layout.tp > 1 and self.stack.value("tp_beside"):  # weights' gradients come last
            found += sum(seconds[name]["input gradient"] for name in together[count:])
            part = 1.0
        counted = [elements(e, unit, self.local)[1] for e in unit.elementwise if e.split == "tp"]
        size = self.local.tokens * self.work.compute_itemsize / self.rate
        return found + part * sum(counted) * size * self.stack.value("elementwise_time")

    def dense_gradient(self, unit: UnitSpec) -> float:
        """Returns the bytes moved because an embedding's gradient is a whole table: it is filled with zeros
        and, if the head's weight is tied, added to the head's gradient."""
        is_tied = unit.kind == "root" and self.step.model.tied
        if unit.kind != "embedding" and not is_tied:
            return 0.0
        trained = [p for p in unit.parameters if p.trainable]
        table = max((prod(tp_cut(p, self.layout.tp)[1]) for p in trained), default=0)
        return table * self.work.compute_itemsize * (4 if is_tied else 1)

    def rules(self) -> PlayRules:
        """Returns the rules by which the engine's communication overlaps with compute."""
        slowdown = self.stack.value("overlap_slowdown")
        if self.work.sharding != "fsdp":
            return PlayRules(slowdown, waits=False)
        return PlayRules(slowdown, self.links["shard"].nodes == 1, later=self.layout.tp > 1)

    def exposed(
        self, times: list[UnitTimes], optimizer: tuple[float, float]
    ) -> tuple[Exposed, Exposed]:
        """Returns what is waited for (in each micro-batch but the last, in the last one). ``optimizer``:
        seconds of its step on the GPU and on the host."""
        work, rules = self.work, self.rules()
        if work.sharding == "fsdp":
            each = last = exposed_of(times, rules, all_reduce=True, optimizer=optimizer)
            if self.accumulation > 1:
                kept = [replace(t, reduce=0.0) for t in times] if work.no_sync else times
                each = exposed_of(kept, rules, all_reduce=False)
            if self.hybrid:  # the copy is renewed before each forward
                renewed = self.at_rest * work.compute_itemsize
                renewal = self.collective("all_gather", renewed, "replicate")
                each, last = (e._replace(gather=e.gather + renewal) for e in (each, last))
            return each, last
        # Parameters are unsharded. Gradients are reduced in the last backward, updated parameters gathered
        # (ZeRO-1) before or in the next forward, in equal buckets.
        each = exposed_of(times, rules, all_reduce=False) if self.accumulation > 1 else Exposed()
        is_zero1 = work.sharding == "zero1"
        kind, gather, reduce = "reduce_scatter" if is_zero1 else "all_reduce", 0.0, 0.0
        for axis, numel in self.unsharded.items():
            largest = self.stack.value("bucket_of_a_rank") * self.links[axis].size
            buckets = max(ceil(numel / max(self.stack.value("bucket"), largest)), 1)
            size = numel / buckets
            reduce += buckets * self.collective(kind, size * work.reduce_itemsize, axis)
            if is_zero1:
                size *= work.compute_itemsize
                gather += buckets * self.collective("all_gather", size, axis)
        hidden = gather * self.stack.value("gather_hidden")
        count = sum(unit.count for unit in times)
        times = [replace(t, gather=hidden / count, reduce=reduce / count) for t in times]
        last = exposed_of(times, rules, all_reduce=False, optimizer=optimizer)
        return each, last._replace(gather=last.gather + gather - hidden)

    def repeated(
        self, name: str, seconds: float, what: str, inputs: Mapping[str, float | str | Constant]
    ) -> Term:
        """Returns the term ``name`` of ``seconds`` in every micro-batch; ``what`` is their formula."""
        n = self.accumulation
        return Term(name, seconds * n, f"accumulation * {what}", {"accumulation": n, **inputs})

    def waited(
        self, name: str, each: float, last: float, what: str, inputs: Mapping[str, float | Constant]
    ) -> Term:
        """Returns the term ``name``: ``each`` seconds in every micro-batch but the last, ``last`` in that."""
        n, formula = self.accumulation, f"(accumulation - 1) * each + last: {what}"
        inputs = {"accumulation": n, "each": each, "last": last, **inputs}
        return Term(name, each * (n - 1) + last, formula, inputs)

    def compute_terms(self, kernels: list[Kernels]) -> Iterator[Term]:
        """Yields the terms of matmuls, attention and elementwise kernels, and of recomputation."""
        each = list(zip(self.units, kernels, strict=True))
        found = {}
        for part in ("matmul", "attention", "elementwise"):
            for index, way in enumerate(("forward", "backward")):
                seconds = sum(u.count * getattr(k, part)[index] for u, k in each)
                found[f"{part} {way}"] = seconds, f"sum over units of their {part} kernels"
        again = sum(u.count * k.again for u, k in each)
        found["recompute"] = again, "what checkpointing and a chunked loss compute again"
        for name, (seconds, what) in found.items():
            yield self.repeated(name, seconds, what, {"micro-batch": seconds})

    def experts_terms(self, times: list[UnitTimes]) -> Iterator[Term]:
        """Yields one term, the exposed time of the experts' all-to-alls over ep; none with one rank of ep."""
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
        """Yields the terms of attention's waits over ``cp``, and of waits for offloaded activations."""
        waited = sum(t.count * (t.cp_forward + t.cp_backward) for t in times)
        about: _Inputs = {"cp": self.layout.cp, "kind": self.work.cp_attention}
        yield self.repeated(
            "context parallel",
            waited,
            "sum of what the units' attention waits for over cp",
            {
                **about,
                "of a micro-batch": waited,
                "overlap_slowdown": self.stack.constant("overlap_slowdown"),
            },
        )
        # What the last block keeps stays.
        moved = [t for t in times if t.offload]
        copied = sum(t.count * t.offload for t in moved) - (moved[-1].offload if moved else 0.0)
        yield self.waited(
            "exposed offload",
            exposed.offload,
            last.offload,
            "copies of blocks but the last that nothing hides, while all GPUs of the node copy",
            {
                "copies of a micro-batch, each way": copied,
                "host": Constant("host", self.gpu.host, "GB/s", self.gpu.source),
                "of a GPU": host_rate(self.step.cluster) / 1e9,
                "host_efficiency": constant("host_efficiency"),
            },
        )

    def engine_terms(self, exposed: Exposed, last: Exposed) -> Iterator[Term]:
        """Yields the terms of copies in and out of buffers, exposed communication and accumulation."""
        is_fsdp, rate = self.work.sharding == "fsdp", {"memory rate": self.rate}
        copied = 0.0
        for unit in self.units if is_fsdp else ():
            gathered, reduced = self.copied(unit)
            copied += unit.count * (gathered * (1 + self.is_gathered_again(unit)) + reduced)
        moved = {name: self.stack.constant(name) for name in ("gather_copy", "reduce_copy")}
        inputs: _Inputs = {"bytes": copied, **moved, **rate}
        yield self.repeated("copies", copied / self.rate, "bytes / memory rate", inputs)
        slowdown = {"overlap_slowdown": self.stack.constant("overlap_slowdown")}
        for name, what in _EXPOSED.items():
            both = getattr(exposed, name), getattr(last, name)
            title = name if name == "slowdown" else f"exposed {name}"
            yield self.waited(title, *both, what, slowdown)
        add = self.stack.constant("accumulate")
        is_shard = is_fsdp and not self.work.no_sync
        added = (self.at_rest if is_shard else self.numel) if self.accumulation > 1 else 0
        inputs = {"gradients": added, "accumulate": add, **rate}
        what = "accumulate * gradients / memory rate"
        yield self.repeated("accumulate", add.value * added / self.rate, what, inputs)

    def optimizer(self) -> Term:
        """Returns the term of the optimizer's step: parameters, gradients and state are read, parameters and
        state written."""
        work, numel, rate, replicate = self.work, self.numel, self.rate, self.layout.replicate
        hybrid = numel / (self.at_rest or 1) * (replicate if self.hybrid else 1)
        # Parameters of which a rank of ZeRO-1 has the optimizer's state.
        part = sum(n / self.links[axis].size for axis, n in self.unsharded.items())
        ranks = {"fsdp": hybrid, "zero1": numel / (part or 1), "ddp": 1}[work.sharding]
        per = 3 * work.param_itemsize + 2 * work.optimizer_bytes
        return Term(
            "optimizer",
            self.stack.value("optimizer_traffic") * per * numel / ranks / rate,
            "optimizer_traffic * (3 parameter itemsize + 2 state bytes) * parameters / ranks / memory rate",
            {"optimizer_traffic": self.stack.constant("optimizer_traffic")}
            | {"parameter itemsize": work.param_itemsize, "state bytes": work.optimizer_bytes}
            | {"parameters": numel, "ranks": ranks, "memory rate": rate},
        )

    def host(self, parts: dict[str, float]) -> Term:
        what = "seconds in which the GPU has nothing left to do that the host has started"
        inputs: dict[str, float | str | Constant] = dict(parts)
        for name in HostTimes.__dataclass_fields__:
            inputs[f"host, {name}"] = host_time(name, self.gpu, self.stack)
        return Term("host", sum(parts.values()), what, inputs)


def stragglers(step: Step, others: float) -> Term:
    """Returns the term of waits for the slowest rank; ``others``: seconds of all other terms."""
    straggler, nodes = step.workload.profile.constant("straggler"), step.cluster.nodes
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
