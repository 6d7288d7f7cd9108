"""Guards: ranks that diverge, fail or hang end with the cause named, on every rank, instead of hanging.

| what | when |
| --- | --- |
| a digest of the model is compared | always, before a model's first collective |
| ``watch()`` | around a job: a rank's failure is told to the others |
| ``Timeouts``, ``phase("save")`` | how long a collective may take, by phase |
| ``debug(model)`` | each collective is compared before it is issued |
| ``diagnose()`` | what each rank did last, and where they part |
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.guards.debugging import debug, watch
    from parallel3d.guards.diagnosis import Diagnosis, diagnose
    from parallel3d.guards.timeouts import Timeouts, phase

__all__ = ["Diagnosis", "Timeouts", "debug", "diagnose", "phase", "watch"]

export_lazily(
    __name__,
    {
        "guards.debugging": "debug watch",
        "guards.diagnosis": "Diagnosis diagnose",
        "guards.timeouts": "Timeouts phase",
    },
)
