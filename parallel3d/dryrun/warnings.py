"""What is likely to be wrong, slow or dangerous in a dry run, each with its numbers and what to do."""

from __future__ import annotations

from parallel3d.dryrun.calls import calls_of
from parallel3d.dryrun.compare import Divergence
from parallel3d.dryrun.result import DryRun, DryRunWarning
from parallel3d.dryrun.timeline import Timeline, timeline
from parallel3d.dryrun.warnings_axes import axis_warnings
from parallel3d.dryrun.warnings_memory import memory_warnings
from parallel3d.dryrun.warnings_overlap import overlap_warnings
from parallel3d.dryrun.warnings_program import program_warnings
from parallel3d.dryrun.wording import some

__all__ = ["all_warnings", "warnings_of"]


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
