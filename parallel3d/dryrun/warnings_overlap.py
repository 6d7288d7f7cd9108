"""Warnings on communication that computation doesn't hide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from parallel3d.dryrun.calls import Call
from parallel3d.dryrun.result import DryRun, DryRunWarning
from parallel3d.dryrun.timeline import Timeline
from parallel3d.dryrun.wording import counted, in_bytes, in_seconds, pattern_of, some

__all__ = ["overlap_warnings"]

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
