"""The places where a job can be launched, and the file for each."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from parallel3d._util.arguments import counted
from parallel3d.tools.launch.clouds import ray_file, skypilot_file
from parallel3d.tools.launch.job import LaunchError, LaunchJob, missing_from
from parallel3d.tools.launch.kubernetes import jobset_file, kubeflow_file
from parallel3d.tools.launch.shell import torchrun_file
from parallel3d.tools.launch.slurm import slurm_file

MARK = "# Written by parallel3d launch"
"""The beginning of each file, after the line that names its interpreter."""


@dataclass(frozen=True)
class Target:
    """A place where a job can be launched.

    Attributes:
        write: returns the file's text without its head.
        suffix: suffix of the file's name.
        start: the command that starts the job; ``{file}`` stands for the file.
        takes: the optional values of a job (``_OPTIONAL``) that the file can contain.
        head: the file's first line, if it names an interpreter.
    """

    write: Callable[[LaunchJob], str]
    suffix: str
    start: str
    takes: tuple[str, ...] = ()
    head: str = ""


_OPTIONAL = ("image", "gpu", "partition", "account", "time", "setup")
_BASH, _PYTHON = "#!/bin/bash\n", "#!/usr/bin/env python3\n"
_KUBECTL, _RAY = "kubectl create -f {file}", "ray job submit --working-dir . -- python {file}"

TARGETS = {
    "torchrun": Target(torchrun_file, ".sh", "bash {file}", ("setup",), _BASH),
    "slurm": Target(slurm_file, ".sbatch", "sbatch {file}", _OPTIONAL[1:], _BASH),
    "kubeflow": Target(kubeflow_file, ".trainjob.yaml", _KUBECTL, ("image", "time")),
    "jobset": Target(jobset_file, ".jobset.yaml", _KUBECTL, ("image", "time")),
    "skypilot": Target(
        skypilot_file, ".sky.yaml", "sky jobs launch {file}", ("image", "gpu", "setup")
    ),
    "ray": Target(ray_file, "_ray.py", _RAY, head=_PYTHON),
}
"""Name -> target."""

_SYNONYMS = {"k8s": "jobset", "kubernetes": "jobset", "sbatch": "slurm", "pytorchjob": "kubeflow"}


def launch_file(target: str, job: LaunchJob) -> str:
    """Returns the text of the file that launches ``job`` at ``target``.

    Args:
        target: one of ``TARGETS``: torchrun, slurm, kubeflow, jobset (also kubernetes), skypilot, ray.
        job: what is to be launched.

    Returns:
        Bash, YAML or Python, with comments that give the reason for each setting.

    Raises:
        LaunchError: the target is unknown, or lacks or can't contain a value of the job.
    """
    found = target_named(target)
    for name in _OPTIONAL:
        value = getattr(job, name)
        if value is not None and name not in found.takes:
            able = ", ".join(n for n, other in TARGETS.items() if name in other.takes)
            raise LaunchError(
                f"{name} is {value!r}, for which {target} has no place; leave it out ({able} take it)"
            )
    mesh = f", mesh {job.layout}" if job.layout is not None else ""
    head = f"{MARK}: {counted(job.nodes, 'node')} x {job.gpus_per_node} processes{mesh}.\n"
    return found.head + head + found.write(job)


def missing(target: str, job: LaunchJob) -> list[str]:
    """Returns in words what the file for ``target`` could contain and ``job`` doesn't give."""
    found = target_named(target)
    # torchrun is started in a shell that is ready.
    takes = () if found is TARGETS["torchrun"] else found.takes
    return missing_from(job, takes, is_requeued=found is TARGETS["slurm"] and job.grace > 0)


def target_named(name: str) -> Target:
    """Returns the target with this name, or synonym; a LaunchError names the nearest if there is none."""
    lower = str(name).lower()
    if (own := _SYNONYMS.get(lower, lower)) in TARGETS:
        return TARGETS[own]
    near = get_close_matches(lower, [*TARGETS, *_SYNONYMS], 1, 0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise LaunchError(f"--to {name!r} is none of {', '.join(TARGETS)}{hint}")
