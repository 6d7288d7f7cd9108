"""Guards: ranks that diverge, fail or hang end with an error that names the cause, on every rank.

| name | effect |
| --- | --- |
| (always on) | before a model's first collective, ranks compare a digest of the model |
| ``watch()`` | around a job: tells the other ranks that a rank has failed |
| ``Timeouts``, ``phase("save")`` | set how long a collective may take, by phase |
| ``debug(model)`` | compares each collective before it is issued |
| ``diagnose()`` | reports each rank's last events, and where they differ |
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.guards.debugging import Diagnosis, debug, diagnose, watch
    from parallel3d.guards.timeouts import Timeouts, phase

__all__ = ["Diagnosis", "Timeouts", "debug", "diagnose", "phase", "watch"]

export_lazily(
    __name__,
    {"guards.debugging": "Diagnosis debug diagnose watch", "guards.timeouts": "Timeouts phase"},
)
