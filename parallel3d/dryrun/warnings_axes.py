"""Warnings on where groups lie and what travels on them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from parallel3d.dryrun.calls import Call
from parallel3d.dryrun.result import DryRun, DryRunWarning
from parallel3d.dryrun.timeline import Timeline
from parallel3d.dryrun.wording import in_bytes, in_seconds, some

__all__ = ["axis_warnings"]

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
