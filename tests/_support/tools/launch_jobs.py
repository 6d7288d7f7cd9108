"""Jobs to write launch files for."""

from typing import Any

from _support.tools.launch.odd_words import ODD
from parallel3d.tools.launch import TARGETS, LaunchJob

COMMAND = ("train.py", *ODD)


ENV = {f"ODD_{i}": word for i, word in enumerate(ODD)}


def job_for(target: str, **more: Any) -> LaunchJob:
    """A job that ``target`` takes; ``more`` as it is."""
    takes = TARGETS[target].takes
    given = {"image": "registry/name:1.2", "gpu": "H100", "time": "12:00:00"}
    slurm = {"partition": "main", "account": "lab"}
    chosen = {k: v for k, v in (given | slurm).items() if k in takes}
    return LaunchJob(**{"command": COMMAND, "nodes": 4, "env": ENV, **chosen, **more})
