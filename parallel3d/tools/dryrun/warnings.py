"""What is likely to be wrong, slow or dangerous in a dry run, each with its numbers and what to do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from torch import nn

from parallel3d.fsdp.inspect import units_of
from parallel3d.mesh.axes import Role, axis_named
from parallel3d.planner.constants import constant
from parallel3d.tools.dryrun.calls import Call, calls_of
from parallel3d.tools.dryrun.compare import Divergence
from parallel3d.tools.dryrun.result import DryRun, DryRunWarning, ParameterPlacement
from parallel3d.tools.dryrun.timeline import Timeline, timeline
from parallel3d.tools.dryrun.wording import counted, in_bytes, in_seconds, pattern_of, some

# Warnings on where groups lie and what travels on them.

_LOW_PRECISION = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Relative rounding of one addition."""
_MANY_RANKS = 16
_FEW_CALLS, _LITTLE_TIME = 4, 0.01


def axis_warnings(run: DryRun, times: Timeline, calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    """On tensor parallelism across nodes, groups of no axis, tiny messages, sums of low precision."""
    mine = [call for call in calls if call.step == times.step]
    yield from _tp_across_nodes(run, times, mine)
    yield from _no_axis(run, calls)
    yield from _tiny_messages(times, mine)
    yield from _low_precision(mine)


def _tp_across_nodes(
    run: DryRun, times: Timeline, calls: Sequence[Call]
) -> Iterator[DryRunWarning]:
    ranks, near = run.axis_ranks.get("tp", ()), times.cluster.domain
    nodes = {rank // near for rank in ranks}
    if len(nodes) < 2:
        return
    mine = [call for call in calls if call.collective.axis == "tp"]
    seconds, size = sum(c.seconds for c in mine), sum(c.collective.bytes for c in mine)
    share = seconds / times.step_seconds if times.step_seconds else 0.0
    # The largest part of tp whose groups end with nodes.
    fits = max(n for n in range(1, near + 1) if near % n == 0 and len(ranks) % n == 0)
    yield DryRunWarning(
        "tp across nodes",
        f"the tp group of rank {run.rank} ({len(ranks)} ranks) lies on {len(nodes)} nodes of {near} GPUs: "
        f"its {len(mine):,} collectives ({in_bytes(size)} a step) go over the network at "
        f"{times.cluster.nic:g} GB/s a GPU, and nothing hides them: {in_seconds(seconds)} a step, "
        f"{share:.0%}. Make tp {fits} or a divisor of it, so that groups stay within nodes; give the ranks "
        "to shard.",
    )


def _no_axis(run: DryRun, calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    """A sum of a few numbers over all ranks is usual: a loss, a norm."""
    odd = [
        call
        for call in calls
        if call.collective.axis is None
        and call.collective.group_size > 1
        and call.collective.op not in ("barrier", "send", "recv")
        and not (call.collective.group_size == run.world_size and call.collective.bytes < 2**20)
    ]
    if not odd:
        return
    kinds = Counter(f"{c.collective.op} of {c.collective.group_size} ranks" for c in odd)
    named = some(f"{count} {kind}" for kind, count in kinds.most_common())
    where = some(c.module or c.collective.unit or c.phase for c in odd)
    yield DryRunWarning(
        "no known axis",
        f"{len(odd)} collectives ({in_bytes(sum(c.collective.bytes for c in odd))}) run on groups that are "
        f"no axis of the mesh {run.mesh}: {named}; in {where}. Use a mesh axis's group "
        "(mesh.get_group(name)), so that ranks can be checked against each other; other groups must be made "
        "on all ranks in one order.",
    )


def _tiny_messages(times: Timeline, calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    by_axis: dict[tuple[str, bool], list[Call]] = defaultdict(list)
    for call in calls:
        if call.collective.bytes and call.latency > 0.5 * call.seconds:
            by_axis[call.collective.axis or "no axis", call.on_data_axis].append(call)
    for (axis, data), each in by_axis.items():
        lost = sum(call.latency for call in each)
        if len(each) < _FEW_CALLS or lost < _LITTLE_TIME * times.step_seconds:
            continue
        sizes = median(call.collective.bytes for call in each)
        if data:
            todo = "Make larger units: several layers in one fully_shard."
        elif axis == "tp":
            todo = "Give tp fewer ranks, or each rank more tokens (a larger micro-batch or longer sequences)."
        else:
            todo = "Join them: one collective of a list of tensors, or fewer of them."
        yield DryRunWarning(
            "tiny messages",
            f"{len(each):,} collectives a step on {axis} carry so little (median {in_bytes(sizes)}, "
            f"{in_bytes(sum(c.collective.bytes for c in each))} in all) that most of their time is latency: "
            f"{in_seconds(lost)} of {in_seconds(sum(c.seconds for c in each))}, in a step of "
            f"{in_seconds(times.step_seconds)}; {some(c.collective.unit or c.module for c in each)}. {todo}",
        )


def _low_precision(calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    by_kind: dict[tuple[str, str, int], list[Call]] = defaultdict(list)
    for call in calls:
        sums = call.collective.op in ("reduce_scatter", "all_reduce", "reduce")
        wide = call.collective.group_size >= _MANY_RANKS
        if sums and wide and call.on_data_axis and call.dtype in _LOW_PRECISION:
            axis = call.collective.axis or ""
            by_kind[call.dtype, axis, call.collective.group_size].append(call)
    for (dtype, axis, ranks), each in by_kind.items():
        error = _LOW_PRECISION[dtype] * ranks**0.5
        more = in_bytes(sum(call.collective.bytes for call in each))
        beyond = " and may overflow" if dtype == "float16" else ""
        yield DryRunWarning(
            "reduction of low precision",
            f"{len(each):,} gradients' sums over {ranks} ranks of {axis} are made in {dtype}: their rounding "
            f"adds up to about {error:.1%} of a gradient{beyond}. Set "
            f"MixedPrecisionPolicy(reduce_dtype=torch.float32): {more} a step more on the network.",
        )


# Warnings on memory: what doesn't fit, what is held whole, what checkpointing would save.

_LARGE = 16 * 2**20
_AGAIN = 2.3  # matmul FLOPs of backward over those of forward, from which on some of it is computed again
_CHANGES = {
    "activations": "checkpoint activations, take a smaller micro-batch, or divide them by tp",
    "inputs": "take a smaller micro-batch",
    "parameters": "shard over more ranks, or over tp",
    "gradients": "shard over more ranks, or over tp",
    "optimizer state": "shard over more ranks, or keep its state in bfloat16",
    "unsharded parameters": "make smaller units, or reshard after forward",
    "communication": "make smaller units, or limit what is gathered ahead",
    "buffers": "don't register large tables as buffers",
    "temporaries": "divide the largest tensors (the logits: loss parallel), or compute them in pieces",
}


def needed_bytes(run: DryRun) -> float:
    """The peak with what a dry run doesn't see: gaps of the allocator, workspaces, context."""
    beside = constant("workspace").value + constant("context").value
    return run.peak.bytes * (1 + constant("gaps").value) + beside


def memory_warnings(run: DryRun, times: Timeline) -> Iterator[DryRunWarning]:
    """On the peak, checkpointing, parameters that are not divided."""
    yield from _capacity(run, times)
    yield from _checkpointing(run, times)
    yield from _whole(run)


def not_played(models: Iterable[nn.Module]) -> Iterator[DryRunWarning]:
    """On what the models ask for and a dry run does not do, seen when the program is over."""
    units = [unit for model in models for unit in units_of(model, recurse=True)]
    buckets = [bucket for unit in units for bucket in unit.group.buckets]
    if any(bucket.offload is not None for bucket in buckets):
        yield DryRunWarning(
            "offload not played",
            "the model offloads to the CPU, and a dry run has only one memory: the shards, their gradients "
            "and the optimizer's state are counted as if they stayed on the GPU, and the copies between the "
            "two are neither listed nor timed.",
        )


def _capacity(run: DryRun, times: Timeline) -> Iterator[DryRunWarning]:
    gpu, peak = times.cluster.gpu, run.peak
    capacity, needed = gpu.capacity_gib * 2**30, needed_bytes(run)
    if needed <= capacity:
        return
    kind, size = max(peak.by_kind.items(), key=lambda item: item[1], default=("", 0))
    where = f"{peak.name} of {peak.module or 'no module'}, {peak.phase}"
    fits = "does not fit" if peak.bytes > capacity else "fits by itself, but not with the rest"
    yield DryRunWarning(
        "memory above capacity",
        f"the peak of {in_bytes(peak.bytes)} (at {where}) {fits} into the {in_bytes(capacity)} of "
        f"{gpu.name}: with gaps, workspaces and context about {in_bytes(needed)} are needed, "
        f"{in_bytes(needed - capacity)} too much. Most of it is {kind} ({in_bytes(size)}): "
        f"{_CHANGES.get(kind, 'look at the largest tensors')}.",
    )


def _checkpointing(run: DryRun, times: Timeline) -> Iterator[DryRunWarning]:
    """Only where memory is scarce: else it would be slower for nothing."""
    at = run.step_peak or run.peak
    kept, peak = at.by_kind.get("activations", 0), at.bytes
    capacity = times.cluster.gpu.capacity_gib * 2**30
    flops = {
        phase: sum(o.flops for o in run.operations if o.kind == "matmul" and o.phase == phase)
        for phase in ("forward", "backward")
    }
    again = flops["backward"] > _AGAIN * flops["forward"]
    if kept <= peak / 2 or peak < capacity / 2 or again or not flops["backward"]:
        return
    yield DryRunWarning(
        "no checkpointing",
        f"{in_bytes(kept)} of the peak's {in_bytes(peak)} ({kept / peak:.0%}) are activations, and nothing "
        "is computed again in backward. parallelize(..., activation_checkpointing=True) keeps a block's "
        "inputs only, for about a third more computation; or take a smaller micro-batch.",
    )


def _whole(run: DryRun) -> Iterator[DryRunWarning]:
    for axis, size in run.mesh.items():
        known = axis_named(axis)
        if size < 2 or known is None or known.role is Role.REPLICATED:
            continue
        each = [p for p in run.parameters if p.bytes >= _LARGE and not _divided(p, axis)]
        if not each:
            continue
        held = sum(p.bytes for p in each)
        named = some(f"{p.name} {tuple(p.shape)}" for p in sorted(each, key=lambda p: -p.bytes))
        todo = (
            "give their modules to fully_shard, or to parallelize, which takes all"
            if axis != "tp"
            else "add rules for their modules to the tp plan (colwise, rowwise, embedding)"
        )
        yield DryRunWarning(
            f"whole on {axis}",
            f"{len(each)} large parameters are not divided over {axis} ({size} ranks): every rank holds "
            f"{in_bytes(held)} of them, {in_bytes(held * (size - 1) / size)} more than its part, and as much "
            f"of gradients and optimizer state: {named}. To divide them, {todo}.",
        )


def _divided(parameter: ParameterPlacement, axis: str) -> bool:
    return "S" in parameter.placements.get(axis, "") or "Shard" in parameter.placements.get(
        axis, ""
    )


# Warnings on communication that computation doesn't hide.

_NOTHING, _LITTLE, _MUCH = 0.05, 0.01, 0.10
_SMALL = 64 * 2**10


def overlap_warnings(
    run: DryRun, times: Timeline, calls: Sequence[Call]
) -> Iterator[DryRunWarning]:
    """On gathers that nothing hides, blocking ones, parameters gathered or reduced twice, slow networks."""
    mine = [call for call in calls if call.step == times.step and call.on_data_axis]
    bare = _cannot_overlap(mine)
    yield from _exposed_gathers(times, bare)
    yield from _blocking(times, mine)
    yield from _gathered_twice(run, mine)
    yield from _reduced_twice(mine)
    yield from _too_slow(times, mine, bare)


def _cannot_overlap(calls: Sequence[Call]) -> list[Call]:
    """Gathers that are waited for with next to no computation since they were issued, but a step's first."""
    gathers = [c for c in calls if c.collective.op == "all_gather" and not c.waits_at_once]
    return [
        call
        for call in gathers[1:]
        if call.waited is not None
        and call.beside < _NOTHING * call.seconds
        and call.exposed > 0.5 * call.seconds
    ]


def _exposed_gathers(times: Timeline, calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    lost = sum(call.exposed for call in calls)
    if lost < _LITTLE * times.step_seconds or not calls:
        return
    phases = Counter(call.phase for call in calls)
    where = ", ".join(f"{count} in {phase}" for phase, count in phases.items())
    yield DryRunWarning(
        "exposed gather",
        f"{counted(len(calls), 'gather')} a step ({where}; "
        f"{some(pattern_of(c.collective.unit) for c in calls)}) are waited for at once, with nothing "
        f"computed since: {in_seconds(lost)} of a step of {in_seconds(times.step_seconds)} "
        f"({_share(lost, times)}). Let units be gathered ahead (set_modules_to_forward_prefetch, "
        "set_modules_to_backward_prefetch), or keep small ones whole (reshard_after_forward=False).",
    )


def _blocking(times: Timeline, calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    slow = [
        call
        for call in calls
        if call.waits_at_once
        and call.collective.bytes >= _SMALL
        and call.phase in ("forward", "backward")
    ]
    if not slow:
        return
    ops = Counter(f"{c.collective.op} on {c.collective.axis}" for c in slow)
    lost = sum(call.exposed for call in slow)
    yield DryRunWarning(
        "blocking collective",
        f"{counted(len(slow), 'collective')} a step hold the computation until they end "
        f"({some(f'{n} {op}' for op, n in ops.items())}, {in_bytes(sum(c.collective.bytes for c in slow))}; "
        f"{some(c.module or c.collective.unit for c in slow)}): {in_seconds(lost)} a step "
        f"({_share(lost, times)}). Issue them with async_op=True and wait where the result is used.",
    )


def _gathered_twice(run: DryRun, calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    again: list[Call] = []
    seen: set[tuple[str, int]] = set()
    backward = _positions(run, "backward")
    last = 0
    for call in calls:
        begun = backward[call.issued] > backward[last]
        if begun:  # the backward between two micro-batches
            seen.clear()
        last = call.issued
        if (
            call.collective.op != "all_gather"
            or call.phase != "forward"
            or not call.collective.unit
        ):
            continue
        key = call.collective.unit, call.collective.bytes  # a unit may have buckets of other sizes
        if key in seen:
            again.append(call)
        seen.add(key)
    if again:
        size = in_bytes(sum(call.collective.bytes for call in again))
        yield DryRunWarning(
            "gathered twice",
            f"{counted(len(again), 'gather')} a step ({size}) bring parameters that the same forward has "
            f"gathered before ({some(c.collective.unit for c in again)}): these units run several times in "
            "it. Use reshard_after_forward=False for them, or make the module that calls them the unit.",
        )


def _positions(run: DryRun, phase: str) -> list[int]:
    """How many operations of ``phase`` there are up to each one."""
    found, count = [], 0
    for operation in run.operations:
        count += operation.phase == phase
        found.append(count)
    return found


def _reduced_twice(calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    sums = [c for c in calls if c.collective.op == "all_reduce" and c.phase == "backward"]
    seen = Counter((c.collective.unit, c.collective.bytes) for c in sums if c.collective.unit)
    more = {key: count - 1 for key, count in seen.items() if count > 1}
    if not more:
        return
    size = sum(size * count for (_, size), count in more.items())
    yield DryRunWarning(
        "reduced in every micro-batch",
        f"gradients are summed over replicate up to {max(more.values()) + 1} times a step in the same unit "
        f"({some(unit for unit, _ in more)}): {counted(sum(more.values()), 'collective')} and "
        f"{in_bytes(size)} a step too many. Call set_requires_all_reduce(False) for all micro-batches but "
        "the last.",
    )


def _too_slow(
    times: Timeline, calls: Sequence[Call], bare: Sequence[Call]
) -> Iterator[DryRunWarning]:
    """Communication that is overlapped, and longer than what it is overlapped with."""
    known = {id(call) for call in bare}
    by_axis: dict[str, float] = {}
    for call in calls:
        if id(call) not in known and not call.waits_at_once:
            axis = call.collective.axis or ""
            by_axis[axis] = by_axis.get(axis, 0.0) + call.exposed
    for axis, lost in by_axis.items():
        if lost < _MUCH * times.step_seconds:
            continue
        mine = [call for call in calls if call.collective.axis == axis]
        whole = sum(call.seconds for call in mine)
        todo = (
            "Give each rank more to compute (a larger micro-batch), accumulate gradients without gathering "
            "(reshard_after_forward=False), or shard over fewer ranks and replicate over the rest (HSDP)."
        )
        if axis.endswith("replicate"):
            todo = "Accumulate more micro-batches for each sum, or replicate over fewer ranks."
        yield DryRunWarning(
            "communication longer than computation",
            f"on {axis} {in_seconds(whole)} of collectives a step run beside computation that is shorter: "
            f"{in_seconds(lost)} is waited for ({_share(lost, times)} of {in_seconds(times.step_seconds)}). "
            f"{todo}",
        )


def _share(lost: float, times: Timeline) -> str:
    return f"{lost / times.step_seconds:.0%}" if times.step_seconds else "0%"


# Warnings on the program: values that it reads, kernels that the host is too slow for.

_MANY_READS = 0.2


def program_warnings(
    run: DryRun, times: Timeline, calls: Sequence[Call]
) -> Iterator[DryRunWarning]:
    """On values that are read each step, a host that is too slow, barriers."""
    yield from _reads(run)
    yield from _host(run, times)
    yield from _barriers(run, times, calls)


def _reads(run: DryRun) -> Iterator[DryRunWarning]:
    often = [read for read in run.unknown if run.steps and read.count >= run.steps]
    if not often:
        return
    total = sum(read.count for read in often) / run.steps
    named = some(f"{read.what} in {read.where}" for read in sorted(often, key=lambda r: -r.count))
    yield DryRunWarning(
        "values read every step",
        f"the host asks for {total:.3g} values of tensors a step, and for each waits until all is done that "
        f"the GPU has been given: {named}. Read them only where they are logged, or log the step before's.",
    )


def _host(run: DryRun, times: Timeline) -> Iterator[DryRunWarning]:
    late, step = times.host[times.step], times.step_seconds
    if late < _MANY_READS * step or not step:
        return
    kernels = sum(1 for s in times.of_step() if s.collective is None)
    yield DryRunWarning(
        "host too slow",
        f"the GPU waits {in_seconds(late)} of a step of {in_seconds(step)} ({late / step:.0%}) for the host, "
        f"which starts {kernels:,} kernels. Compile the blocks (parallelize(..., compile=True)), or give "
        "each kernel more: a larger micro-batch, less tp.",
    )


def _barriers(run: DryRun, times: Timeline, calls: Sequence[Call]) -> Iterator[DryRunWarning]:
    each = [
        call
        for call in calls
        if call.collective.op == "barrier"
        and call.step == times.step
        and call.phase in ("forward", "backward")
    ]
    if each:
        yield DryRunWarning(
            "barrier in a step",
            f"{len(each)} barriers a step in {some(c.module or c.phase for c in each)}: all ranks wait for "
            "the slowest. Collectives keep ranks together already; leave it out.",
        )


def warnings_of(
    run: DryRun, predicted: Timeline | None = None, divergence: Divergence | None = None
) -> tuple[DryRunWarning, ...]:
    """The warnings of ``run``, the gravest kinds first.

    Args:
        predicted: ``timeline(run)``, or one with other machines.
        divergence: what ``compare`` with another rank has found.
    """
    times = predicted or timeline(run)
    calls = calls_of(run, times)
    found = []
    if divergence is not None:
        found.append(_diverged(divergence))
    found += memory_warnings(run, times)
    found += axis_warnings(run, times, calls)
    found += overlap_warnings(run, times, calls)
    found += program_warnings(run, times, calls)
    return tuple(found)


def all_warnings(
    run: DryRun, predicted: Timeline | None = None, divergence: Divergence | None = None
) -> tuple[DryRunWarning, ...]:
    """Those of ``warnings_of``, and what ``run`` has of other kinds."""
    found = warnings_of(run, predicted, divergence)
    kinds = {each.kind for each in found}
    return (*found, *(each for each in run.warnings if each.kind not in kinds))


def _diverged(found: Divergence) -> DryRunWarning:
    calls = [
        each.short if each is not None else "nothing more" for each in (found.first, found.second)
    ]
    where = [
        each.module for each in (found.first, found.second) if each is not None and each.module
    ]
    return DryRunWarning(
        "rank-dependent order",
        f"ranks {found.ranks[0]} and {found.ranks[1]} communicate differently from collective "
        f"{found.position} on ({found.kind}): {calls[0]} and {calls[1]}. Consequence: {found.consequence}. "
        f"{found.detail}. Look for a branch on the rank or on data{f' in {some(where)}' if where else ''}; "
        "every rank of a group must issue the same collectives in the same order.",
    )
