"""Runs the real program as one rank of any world, in one process, without its hardware.

``record(fn, world_size, rank)`` runs ``fn`` on fake tensors and returns what that rank would do: every
collective, memory over time, parameters with their placements, and what is likely to be wrong.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d._util.dry_run import active, real
    from parallel3d.tools.dryrun.as_json import from_json, to_json
    from parallel3d.tools.dryrun.compare import Divergence, compare
    from parallel3d.tools.dryrun.record import record
    from parallel3d.tools.dryrun.report import write_report
    from parallel3d.tools.dryrun.result import DryRun
    from parallel3d.tools.dryrun.summary import print_summary
    from parallel3d.tools.dryrun.timeline import Timeline, timeline
    from parallel3d.tools.dryrun.trace import write_trace
    from parallel3d.tools.dryrun.unknown import Unknown, assume
    from parallel3d.tools.dryrun.warnings import warnings_of
    from parallel3d.tools.dryrun.world import script

__all__ = [
    "Divergence",
    "DryRun",
    "Timeline",
    "Unknown",
    "active",
    "assume",
    "compare",
    "from_json",
    "print_summary",
    "real",
    "record",
    "script",
    "timeline",
    "to_json",
    "warnings_of",
    "write_report",
    "write_trace",
]

export_lazily(
    __name__,
    {
        "_util.dry_run": "active real",
        "tools.dryrun.as_json": "from_json to_json",
        "tools.dryrun.compare": "Divergence compare",
        "tools.dryrun.record": "record",
        "tools.dryrun.report": "write_report",
        "tools.dryrun.result": "DryRun",
        "tools.dryrun.summary": "print_summary",
        "tools.dryrun.timeline": "Timeline timeline",
        "tools.dryrun.trace": "write_trace",
        "tools.dryrun.unknown": "Unknown assume",
        "tools.dryrun.warnings": "warnings_of",
        "tools.dryrun.world": "script",
    },
)
