"""Doctor: finds what is wrong with a machine, or with the nodes of a job, before training starts.

::

    parallel3d doctor                                                          # this machine
    torchrun ... --no-python parallel3d doctor --replicate 2 --shard -1 --tp 8 # all nodes

``docs/doctor.md`` lists its checks.
"""

from parallel3d.tools.doctor.doctor import Diagnosis, Options, doctor
from parallel3d.tools.doctor.finding import Finding, Severity

__all__ = ["Diagnosis", "Finding", "Options", "Severity", "doctor"]
