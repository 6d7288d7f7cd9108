"""Warnings on what is likely to be wrong, slow or dangerous in a dry run, with numbers and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from statistics import median

from torch import nn

from parallel3d.activations.offload import counts_of
from parallel3d.fsdp.inspect import units_of
from parallel3d.mesh.axes import Role, axis_named, moves_activations
from parallel3d.planner.constants import constant
from parallel3d.tools.dryrun.compare import Divergence
from parallel3d.tools.dryrun.result import DryRun, DryRunWarning
from parallel3d.tools.dryrun.timeline import TimedCollective, Timeline, calls_of, timeline
from parallel3d.tools.dryrun.wording import (
    counted,
    grouped,
    in_bytes,
    in_seconds,
    pattern_of,
    share,
    some,
    total_bytes,
)

Warnings = Iterator[DryRunWarning]


def _seconds(calls: Iterable[TimedCollective]) -> float:
    return sum(call.seconds for call in calls)


def _exposed(calls: Iterable[TimedCollective]) -> float:
    return sum(call.exposed for call in calls)


# Mesh axes: how groups lie on nodes, and what is communicated on them.

_LOW_PRECISION = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Relative rounding error of one addition."""
_MANY_RANKS = 16
_FEW_CALLS, _LITTLE_TIME = 4, 0.01


def _tp_across_nodes(run: DryRun, times: Timeline, calls: Sequence[TimedCollective]) -> Warnings:
    ranks, near = run.axis_ranks.get("tp", ()), times.cluster.domain
    nodes = {rank // near for rank in ranks}
    if len(nodes) < 2:
        return
    tp_calls = [call for call in calls if call.axis == "tp"]
    seconds = _seconds(tp_calls)
    fits = max(n for n in range(1, near + 1) if near % n == 0 and len(ranks) % n == 0)
    yield DryRunWarning(
        "tp across nodes",
        f"the tp group of rank {run.rank} ({len(ranks)} ranks) lies on {len(nodes)} nodes of {near} GPUs: "
        f"its {len(tp_calls):,} collectives ({total_bytes(tp_calls)} a step) use the network at "
        f"{times.cluster.nic:g} GB/s a GPU, and nothing hides them: {in_seconds(seconds)} a step, "
        f"{share(seconds, times.step_seconds)}. Make tp {fits} or a divisor of it, so that groups stay "
        "within nodes; give the ranks to shard.",
    )


def _no_axis(run: DryRun, calls: Sequence[TimedCollective]) -> Warnings:
    odd = [
        call
        for call in calls
        if call.axis is None
        and call.group_size > 1
        and call.op not in ("barrier", "send", "recv")
        # A sum of a few numbers over all ranks is usual: a loss, a norm.
        and not (call.group_size == run.world_size and call.bytes < 2**20)
    ]
    if not odd:
        return
    kinds = Counter(f"{call.op} of {call.group_size} ranks" for call in odd)
    named = some(f"{count} {kind}" for kind, count in kinds.most_common())
    where = some(call.module or call.unit or call.phase for call in odd)
    yield DryRunWarning(
        "no known axis",
        f"{len(odd)} collectives ({total_bytes(odd)}) run on groups that are no axis of the mesh {run.mesh}: "
        f"{named}; in {where}. Use a mesh axis's group (mesh.get_group(name)), so that ranks can be "
        "compared; other groups must be made on all ranks in the same order.",
    )


def _tiny_messages(times: Timeline, calls: Sequence[TimedCollective]) -> Warnings:
    tiny = [call for call in calls if call.bytes and call.latency > 0.5 * call.seconds]
    for axis, group in grouped(tiny, lambda call: call.axis).items():
        lost = sum(call.latency for call in group)
        if len(group) < _FEW_CALLS or lost < _LITTLE_TIME * times.step_seconds:
            continue
        if group[0].on_data_axis:
            todo = "Make larger units: several layers in one fully_shard."
        elif moves_activations(axis):
            todo = (
                f"Give {axis} fewer ranks, or each rank more tokens (a larger micro-batch or longer "
                "sequences)."
            )
        else:
            todo = "Join them: one collective of a list of tensors, or fewer of them."
        yield DryRunWarning(
            "tiny messages",
            f"{len(group):,} collectives a step on {axis or 'no axis'} carry so little (median "
            f"{in_bytes(median(call.bytes for call in group))}, {total_bytes(group)} in all) that most of "
            f"their time is latency: {in_seconds(lost)} of {in_seconds(_seconds(group))}, in a step of "
            f"{in_seconds(times.step_seconds)}; {some(call.where for call in group)}. {todo}",
        )


def _low_precision(calls: Sequence[TimedCollective]) -> Warnings:
    sums = [
        call
        for call in calls
        if call.op in ("reduce_scatter", "all_reduce", "reduce")
        and call.group_size >= _MANY_RANKS
        and call.on_data_axis
        and call.dtype in _LOW_PRECISION
    ]
    groups = grouped(sums, lambda call: (call.dtype, call.axis, call.group_size))
    for (dtype, axis, ranks), group in groups.items():
        error = _LOW_PRECISION[dtype] * ranks**0.5
        overflow = " and may overflow" if dtype == "float16" else ""
        yield DryRunWarning(
            "reduction of low precision",
            f"{len(group):,} gradients' sums over {ranks} ranks of {axis} are computed in {dtype}: "
            f"rounding adds up to about {error:.1%} of a gradient{overflow}. Set "
            f"MixedPrecisionPolicy(reduce_dtype=torch.float32): {total_bytes(group)} a step more on the "
            "network, or none with wire_dtype=torch.bfloat16 too.",
        )


# Memory: what doesn't fit, what is not sharded, what checkpointing would save.

_LARGE = 16 * 2**20
_AGAIN = 2.3  # ratio of backward's matmul FLOPs to forward's above which some are recomputed
_CHANGES = {
    "activations": "checkpoint activations, use a smaller micro-batch, or shard them over tp",
    "inputs": "use a smaller micro-batch",
    "parameters": "shard over more ranks, or over tp",
    "gradients": "shard over more ranks, or over tp",
    "optimizer state": "shard over more ranks, or keep its state in bfloat16",
    "unsharded parameters": "make smaller units, or reshard after forward",
    "communication": "make smaller units, or limit prefetching",
    "buffers": "don't register large tables as buffers",
    "temporaries": "shard the largest tensors (the logits: loss parallel), or compute them in pieces",
}


def needed_bytes(run: DryRun) -> float:
    """Returns the peak's bytes plus fragmentation, workspaces and context, which a dry run lacks."""
    beside = constant("workspace").value + constant("context").value
    return run.peak.bytes * (1 + constant("fragmentation_least").value) + beside


def not_simulated(models: Iterable[nn.Module]) -> Warnings:
    """Yields warnings on what the models do and a dry run doesn't simulate: activation and CPU offload."""
    models = list(models)
    for counts in filter(None, map(counts_of, models)):
        yield DryRunWarning(
            "activation offload",
            f"{in_bytes(counts.copied_out)} were copied to the CPU's memory and "
            f"{in_bytes(counts.copied_back)} back. Of the pool of {in_bytes(counts.pool)}, "
            f"{in_bytes(counts.pool_used)} were used; {in_bytes(counts.no_room)} found no room and stayed.",
        )
    units = [unit for model in models for unit in units_of(model, recurse=True)]
    if any(bucket.offload is not None for unit in units for bucket in unit.group.buckets):
        yield DryRunWarning(
            "optimizer not timed",
            "the model offloads to the CPU: the optimizer is timed as if it ran on the GPU. Memory is the "
            "GPU's alone.",
        )


def _above_capacity(run: DryRun, times: Timeline) -> Warnings:
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
        f"{gpu.name}: with fragmentation, workspaces and context about {in_bytes(needed)} are needed, "
        f"{in_bytes(needed - capacity)} too much. Most of it is {kind} ({in_bytes(size)}): "
        f"{_CHANGES.get(kind, 'look at the largest tensors')}.",
    )


def _no_checkpointing(run: DryRun, times: Timeline) -> Warnings:
    """Yields a warning if activations take much of a scarce memory and nothing is checkpointed."""
    peak = run.step_peak or run.peak
    kept, capacity = peak.by_kind.get("activations", 0), times.cluster.gpu.capacity_gib * 2**30
    matmuls = [operation for operation in run.operations if operation.kind == "matmul"]
    forward, backward = (
        sum(each.flops for each in matmuls if each.phase == phase)
        for phase in ("forward", "backward")
    )
    scarce = peak.bytes >= capacity / 2 and kept > peak.bytes / 2
    if scarce and 0 < backward <= _AGAIN * forward:
        yield DryRunWarning(
            "no checkpointing",
            f"{in_bytes(kept)} of the peak's {in_bytes(peak.bytes)} ({share(kept, peak.bytes)}) are "
            "activations, and nothing is recomputed in backward. "
            "parallelize(..., activation_checkpointing=True) keeps only a block's inputs, for about a third "
            "more computation; or use a smaller micro-batch.",
        )


def _not_sharded(run: DryRun) -> Warnings:
    for axis, size in run.mesh.items():
        known = axis_named(axis)
        if size < 2 or known is None or known.role not in (Role.SHARDED, Role.TENSOR_PARALLEL):
            continue
        # Placements that shard: S(0), _S(0, 2), Shard(dim=0), PackedShard(dim=0). Shard's is also shard_cp's.
        whole = [
            p
            for p in run.parameters
            if not any(
                "S" in how for name, how in p.placements.items() if axis_named(name) is known
            )
        ]
        large = [p for p in whole if p.bytes >= _LARGE]
        if not large:
            continue
        more = sum(p.bytes for p in large) * (size - 1) / size
        named = some(f"{p.name} {tuple(p.shape)}" for p in sorted(large, key=lambda p: -p.bytes))
        todo = "give their modules to fully_shard, or to parallelize, which takes all"
        if axis == "tp":
            todo = "add rules for their modules to the tp plan (colwise, rowwise, embedding)"
        yield DryRunWarning(
            f"whole on {axis}",
            f"{len(large)} large parameters are not sharded over {axis} ({size} ranks): every rank holds "
            f"{total_bytes(large)} of them, {in_bytes(more)} more than its part, and as much of gradients "
            f"and optimizer state: {named}. To shard them, {todo}.",
        )


# Overlap: communication that computation doesn't hide.

_NOTHING, _LITTLE, _MUCH = 0.05, 0.01, 0.10
_SMALL = 64 * 2**10


def _overlap(run: DryRun, times: Timeline, calls: Sequence[TimedCollective]) -> Warnings:
    on_data = [call for call in calls if call.on_data_axis]
    gathers = [call for call in on_data if call.op == "all_gather" and call.asynchronous]
    bare = [  # waited for with almost no computation since they were issued; the first can't be hidden
        call
        for call in gathers[1:]
        if call.waited is not None
        and call.beside < _NOTHING * call.seconds
        and call.exposed > 0.5 * call.seconds
    ]
    yield from _exposed_gathers(times, bare)
    yield from _blocking(times, on_data)
    yield from _gathered_twice(run, on_data)
    yield from _reduced_twice(on_data)
    yield from _too_slow(times, on_data, bare)


def _exposed_gathers(times: Timeline, calls: Sequence[TimedCollective]) -> Warnings:
    lost = _exposed(calls)
    if lost < _LITTLE * times.step_seconds or not calls:
        return
    phases = Counter(call.phase for call in calls)
    where = ", ".join(f"{count} in {phase}" for phase, count in phases.items())
    yield DryRunWarning(
        "exposed gather",
        f"{counted(len(calls), 'gather')} a step ({where}; {some(pattern_of(c.unit) for c in calls)}) are "
        f"waited for at once, with no computation in between: {in_seconds(lost)} of a step of "
        f"{in_seconds(times.step_seconds)} ({share(lost, times.step_seconds)}). Prefetch units "
        "(set_modules_to_forward_prefetch, set_modules_to_backward_prefetch), or keep small ones unsharded "
        "(reshard_after_forward=False).",
    )


def _blocking(times: Timeline, calls: Sequence[TimedCollective]) -> Warnings:
    slow = [
        call
        for call in calls
        if not call.asynchronous and call.bytes >= _SMALL and call.phase in ("forward", "backward")
    ]
    if not slow:
        return
    kinds = Counter(f"{call.op} on {call.axis}" for call in slow)
    lost = _exposed(slow)
    yield DryRunWarning(
        "blocking collective",
        f"{counted(len(slow), 'collective')} a step block the computation until they end "
        f"({some(f'{n} {kind}' for kind, n in kinds.items())}, {total_bytes(slow)}; "
        f"{some(call.module or call.unit for call in slow)}): {in_seconds(lost)} a step "
        f"({share(lost, times.step_seconds)}). Issue them with async_op=True and wait where the result is "
        "used.",
    )


def _gathered_twice(run: DryRun, calls: Sequence[TimedCollective]) -> Warnings:
    again: list[TimedCollective] = []
    seen: set[tuple[str, int]] = set()
    backward = list(accumulate(operation.phase == "backward" for operation in run.operations))
    last = 0
    for call in calls:
        if backward[call.issued] > backward[last]:  # the backward between two micro-batches
            seen.clear()
        last = call.issued
        if call.op == "all_gather" and call.phase == "forward" and call.unit:
            key = call.unit, call.bytes  # a unit may have buckets of other sizes
            again += [call] if key in seen else []
            seen.add(key)
    if again:
        yield DryRunWarning(
            "gathered twice",
            f"{counted(len(again), 'gather')} a step ({total_bytes(again)}) gather parameters that the same "
            f"forward has gathered before ({some(call.unit for call in again)}): these units run several "
            "times in it. Use reshard_after_forward=False for them, or make the module that calls them the "
            "unit.",
        )


def _reduced_twice(calls: Sequence[TimedCollective]) -> Warnings:
    sums = [call for call in calls if call.op == "all_reduce" and call.phase == "backward"]
    counts = Counter((call.unit, call.bytes) for call in sums if call.unit)
    more = {key: count - 1 for key, count in counts.items() if count > 1}
    if more:
        size = sum(nbytes * count for (_, nbytes), count in more.items())
        yield DryRunWarning(
            "reduced in every micro-batch",
            f"gradients of the same unit are summed over replicate up to {max(more.values()) + 1} times a "
            f"step ({some(unit for unit, _ in more)}): {counted(sum(more.values()), 'collective')} and "
            f"{in_bytes(size)} a step too many. Call set_requires_all_reduce(False) for all micro-batches "
            "but the last.",
        )


def _too_slow(
    times: Timeline, calls: Sequence[TimedCollective], bare: Sequence[TimedCollective]
) -> Warnings:
    """Yields warnings on asynchronous communication that takes longer than the computation beside it."""
    known = {id(call) for call in bare}
    for axis, group in grouped(calls, lambda call: call.axis or "").items():
        lost = _exposed(c for c in group if c.asynchronous and id(c) not in known)
        if lost < _MUCH * times.step_seconds or not lost:
            continue
        todo = (
            "Give each rank more to compute (a larger micro-batch), accumulate gradients without gathering "
            "(reshard_after_forward=False), or shard over fewer ranks and replicate over the rest (HSDP)."
        )
        if axis.endswith("replicate"):
            todo = "Accumulate more micro-batches for each sum, or replicate over fewer ranks."
        yield DryRunWarning(
            "communication longer than computation",
            f"on {axis} {in_seconds(_seconds(group))} of collectives a step run beside computation that is "
            f"shorter: {in_seconds(lost)} is waited for ({share(lost, times.step_seconds)} of "
            f"{in_seconds(times.step_seconds)}). {todo}",
        )


# The program: values that it reads, kernels that the host is too slow for, barriers.

_MANY_READS = 0.2


def _reads(run: DryRun) -> Warnings:
    steps = max(run.steps, 1)
    counts = [read.count // steps if read.last is None else read.last for read in run.unknown]
    often = [read for read, count in zip(run.unknown, counts, strict=True) if run.steps and count]
    if often:
        total = sum(counts)
        times = "once" if total == 1 else f"{total:,} times"
        ordered = sorted(often, key=lambda read: -read.count)
        yield DryRunWarning(
            "values read every step",
            f"the host reads tensors' values {times} a step, and each time waits until the GPU has finished "
            f"everything queued: {some(f'{read.what} in {read.where}' for read in ordered)}. Read them only "
            "where they are logged, or log the previous step's.",
        )


def _host(times: Timeline) -> Warnings:
    late, step = times.host[times.step], times.step_seconds
    if step and late >= _MANY_READS * step:
        kernels = sum(1 for span in times.of_step() if span.collective is None)
        yield DryRunWarning(
            "host too slow",
            f"the GPU waits {in_seconds(late)} of a step of {in_seconds(step)} ({share(late, step)}) for the "
            f"host, which launches {kernels:,} kernels. Compile the blocks (parallelize(..., compile=True)), "
            "or make kernels larger: a larger micro-batch, less tp.",
        )


def _barriers(calls: Sequence[TimedCollective]) -> Warnings:
    in_passes = [c for c in calls if c.op == "barrier" and c.phase in ("forward", "backward")]
    if in_passes:
        yield DryRunWarning(
            "barrier in a step",
            f"{len(in_passes)} barriers a step in {some(c.module or c.phase for c in in_passes)}: all ranks "
            "wait for the slowest. Collectives already synchronize ranks; leave it out.",
        )


def warnings_of(
    run: DryRun, predicted: Timeline | None = None, divergence: Divergence | None = None
) -> tuple[DryRunWarning, ...]:
    """Returns the warnings of ``run``, the most serious kinds first.

    Args:
        predicted: the predicted times; by default ``timeline(run)``.
        divergence: the result of ``compare`` with another rank.
    """
    times = predicted or timeline(run)
    calls = calls_of(run, times)
    of_step = [call for call in calls if call.step == times.step]
    return (
        *(() if divergence is None else (_diverged(divergence),)),
        *_above_capacity(run, times),
        *_no_checkpointing(run, times),
        *_not_sharded(run),
        *_tp_across_nodes(run, times, of_step),
        *_no_axis(run, calls),
        *_tiny_messages(times, of_step),
        *_low_precision(of_step),
        *_overlap(run, times, of_step),
        *_reads(run),
        *_host(times),
        *_barriers(of_step),
    )


def all_warnings(
    run: DryRun, predicted: Timeline | None = None, divergence: Divergence | None = None
) -> tuple[DryRunWarning, ...]:
    """Returns what ``warnings_of`` finds, given the same arguments, then those of ``run.warnings`` of other
    kinds."""
    found = warnings_of(run, predicted, divergence)
    kinds = {warning.kind for warning in found}
    return (*found, *(warning for warning in run.warnings if warning.kind not in kinds))


def _diverged(found: Divergence) -> DryRunWarning:
    both = (found.first, found.second)
    first, second = (issued.short if issued is not None else "nothing more" for issued in both)
    modules = some(issued.module for issued in both if issued is not None and issued.module)
    return DryRunWarning(
        "rank-dependent order",
        f"ranks {found.ranks[0]} and {found.ranks[1]} communicate differently from collective "
        f"{found.position} on ({found.kind}): {first} and {second}. Consequence: {found.consequence}. "
        f"{found.detail}. Look for a branch on the rank or on data{f' in {modules}' if modules else ''}; "
        "every rank of a group must issue the same collectives in the same order.",
    )
