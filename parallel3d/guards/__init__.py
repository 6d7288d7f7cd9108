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
    from parallel3d.guards.debugging import Diagnosis as Diagnosis
    from parallel3d.guards.debugging import debug as debug
    from parallel3d.guards.debugging import diagnose as diagnose
    from parallel3d.guards.debugging import watch as watch
    from parallel3d.guards.timeouts import Timeouts as Timeouts
    from parallel3d.guards.timeouts import phase as phase
else:
    export_lazily(
        __name__, {".debugging": "Diagnosis debug diagnose watch", ".timeouts": "Timeouts phase"}
    )
