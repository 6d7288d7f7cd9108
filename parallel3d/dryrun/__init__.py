"""The real program as one rank of any world, in one process, without its hardware.

``record(fn, world_size, rank)`` runs ``fn`` on fake tensors and says what that rank would do: every
collective, memory over time, parameters with their placements, and what is likely to be wrong.
"""

from typing import TYPE_CHECKING

from parallel3d._lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d._dry_run import active
    from parallel3d.dryrun.record import real, record
    from parallel3d.dryrun.result import DryRun
    from parallel3d.dryrun.unknown import Unknown, assume

__all__ = ["DryRun", "Unknown", "active", "assume", "real", "record"]

export_lazily(
    __name__,
    {
        "dryrun.record": "real record",
        "dryrun.result": "DryRun",
        "dryrun.unknown": "Unknown assume",
        "_dry_run": "active",
    },
)
