"""Doctor: finds what is wrong with a machine, or with the nodes of a job, before training starts.

::

    parallel3d doctor                                                          # this machine
    torchrun ... --no-python parallel3d doctor --replicate 2 --shard -1 --tp 8 # all nodes

``docs/doctor.md`` lists its checks.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.tools.doctor.doctor import Diagnosis as Diagnosis
    from parallel3d.tools.doctor.doctor import Options as Options
    from parallel3d.tools.doctor.doctor import doctor as doctor
    from parallel3d.tools.doctor.finding import Finding as Finding
    from parallel3d.tools.doctor.finding import Severity as Severity
else:
    export_lazily(__name__, {".doctor": "Diagnosis Options doctor", ".finding": "Finding Severity"})
