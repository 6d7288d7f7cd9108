"""Runs the real program as one rank of any world, in one process, without its hardware.

``record(fn, world_size, rank)`` runs ``fn`` on fake tensors and returns what that rank would do: every
collective, memory over time, parameters with their placements, and what is likely to be wrong.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d._util.dry_run import active as active
    from parallel3d._util.dry_run import real as real
    from parallel3d.tools.dryrun.compare import Divergence as Divergence
    from parallel3d.tools.dryrun.compare import compare as compare
    from parallel3d.tools.dryrun.record import record as record
    from parallel3d.tools.dryrun.report import write_report as write_report
    from parallel3d.tools.dryrun.result import DryRun as DryRun
    from parallel3d.tools.dryrun.result import Race as Race
    from parallel3d.tools.dryrun.result import from_json as from_json
    from parallel3d.tools.dryrun.result import to_json as to_json
    from parallel3d.tools.dryrun.summary import print_summary as print_summary
    from parallel3d.tools.dryrun.timeline import Timeline as Timeline
    from parallel3d.tools.dryrun.timeline import timeline as timeline
    from parallel3d.tools.dryrun.trace import write_trace as write_trace
    from parallel3d.tools.dryrun.unknown import Unknown as Unknown
    from parallel3d.tools.dryrun.unknown import assume as assume
    from parallel3d.tools.dryrun.warnings import warnings_of as warnings_of
    from parallel3d.tools.dryrun.world import script as script
else:
    export_lazily(
        __name__,
        {
            "parallel3d._util.dry_run": "active real",
            ".compare": "Divergence compare",
            ".record": "record",
            ".report": "write_report",
            ".result": "DryRun Race from_json to_json",
            ".summary": "print_summary",
            ".timeline": "Timeline timeline",
            ".trace": "write_trace",
            ".unknown": "Unknown assume",
            ".warnings": "warnings_of",
            ".world": "script",
        },
    )
