"""The real program as one rank of any world, in one process, without its hardware.

``record(fn, world_size, rank)`` runs ``fn`` on fake tensors and says what that rank would do: every
collective, memory over time, parameters with their placements, and what is likely to be wrong.
"""

from typing import TYPE_CHECKING

from parallel3d._lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d._dry_run import active
    from parallel3d.dryrun.as_json import from_json, to_json
    from parallel3d.dryrun.compare import Divergence, compare
    from parallel3d.dryrun.program import script
    from parallel3d.dryrun.record import real, record
    from parallel3d.dryrun.report import write_report
    from parallel3d.dryrun.result import DryRun
    from parallel3d.dryrun.summary import print_summary
    from parallel3d.dryrun.timeline import Timeline, timeline
    from parallel3d.dryrun.trace import write_trace
    from parallel3d.dryrun.unknown import Unknown, assume
    from parallel3d.dryrun.warnings import warnings_of

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
        "_dry_run": "active",
        "dryrun.as_json": "from_json to_json",
        "dryrun.compare": "Divergence compare",
        "dryrun.program": "script",
        "dryrun.record": "real record",
        "dryrun.report": "write_report",
        "dryrun.result": "DryRun",
        "dryrun.summary": "print_summary",
        "dryrun.timeline": "Timeline timeline",
        "dryrun.trace": "write_trace",
        "dryrun.unknown": "Unknown assume",
        "dryrun.warnings": "warnings_of",
    },
)
