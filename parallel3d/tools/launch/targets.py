"""Where a job can be launched, and the file for each place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from parallel3d.tools.launch.clouds import ray_file, skypilot_file
from parallel3d.tools.launch.job import LaunchError, LaunchJob
from parallel3d.tools.launch.kubernetes import jobset_file, kubeflow_file
from parallel3d.tools.launch.shell import torchrun_file
from parallel3d.tools.launch.slurm import slurm_file

MARK = "# Written by parallel3d launch"
"""How each file begins, after the line that names its interpreter."""


@dataclass(frozen=True)
class Target:
    """A place to launch at.

    Attributes:
        write: a job -> the file's text, without its head.
        suffix: of the file's name.
        start: the command that starts it; ``{file}`` is the file.
        takes: which of ``_SOME`` it has a place for.
        head: the first line where it names an interpreter.
    """

    write: Callable[[LaunchJob], str]
    suffix: str
    start: str
    takes: tuple[str, ...] = ()
    head: str = ""


_SOME = ("image", "gpu", "partition", "account", "time")
_BASH, _PYTHON = "#!/bin/bash\n", "#!/usr/bin/env python3\n"

TARGETS = {
    "torchrun": Target(torchrun_file, ".sh", "bash {file}", head=_BASH),
    "slurm": Target(
        slurm_file, ".sbatch", "sbatch {file}", ("gpu", "partition", "account", "time"), _BASH
    ),
    "kubeflow": Target(
        kubeflow_file, ".trainjob.yaml", "kubectl create -f {file}", ("image", "time")
    ),
    "jobset": Target(jobset_file, ".jobset.yaml", "kubectl create -f {file}", ("image", "time")),
    "skypilot": Target(skypilot_file, ".sky.yaml", "sky jobs launch {file}", ("image", "gpu")),
    "ray": Target(
        ray_file, "_ray.py", "ray job submit --working-dir . -- python {file}", head=_PYTHON
    ),
}
"""By name."""


def launch_file(target: str, job: LaunchJob) -> str:
    """The text of the file that launches ``job`` at ``target``; the same for the same job.

    Args:
        target: one of ``TARGETS``: torchrun, slurm, kubeflow, jobset, skypilot, ray.
        job: what is to be launched.

    Returns:
        Bash, YAML or Python, with comments that say why each line is there.

    Raises:
        LaunchError: an unknown target, or one that lacks or can't take something of the job.
    """
    found = target_named(target)
    for name in _SOME:
        value = getattr(job, name)
        if value is not None and name not in found.takes:
            able = ", ".join(n for n, each in TARGETS.items() if name in each.takes)
            raise LaunchError(
                f"{name} is {value!r}, for which {target} has no place; leave it out ({able} take it)"
            )
    mesh = f", mesh {job.layout}" if job.layout is not None else ""
    head = f"{MARK}: {job.nodes} nodes x {job.gpus_per_node} processes{mesh}.\n"
    return found.head + head + found.write(job)


def target_named(name: str) -> Target:
    """The target of this name.

    Raises:
        LaunchError: there is none, with the nearest.
    """
    if name in TARGETS:
        return TARGETS[name]
    near = get_close_matches(str(name).lower(), TARGETS, n=1, cutoff=0.4)
    other = {"k8s": "jobset", "kubernetes": "jobset", "sbatch": "slurm", "pytorchjob": "kubeflow"}
    near = [other[str(name).lower()]] if str(name).lower() in other else near
    hint = f"; did you mean {near[0]}?" if near else ""
    raise LaunchError(f"--to {name!r} is none of {', '.join(TARGETS)}{hint}")
