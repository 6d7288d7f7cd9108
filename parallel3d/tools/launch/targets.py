"""The places where a job can be launched, and the file for each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from pprint import pformat
from textwrap import indent
from typing import Any

from parallel3d._util.arguments import counted
from parallel3d.tools.launch import shell
from parallel3d.tools.launch.job import LaunchError, LaunchJob, missing_from

MARK = "# Written by parallel3d launch"
"""The beginning of each file, after the line that names its interpreter."""


@dataclass(frozen=True)
class Target:
    """A place where a job can be launched.

    Attributes:
        template: the file's text without its head, in the folder ``templates``.
        suffix: suffix of the file's name.
        start: the command that starts the job; ``{file}`` stands for the file.
        takes: the optional values of a job (``_OPTIONAL``) that the file can contain.
        head: the file's first line, if it names an interpreter.
    """

    template: str
    suffix: str
    start: str
    takes: tuple[str, ...] = ()
    head: str = ""


_OPTIONAL = ("image", "gpu", "partition", "account", "time", "setup")
_BASH, _PYTHON = "#!/bin/bash\n", "#!/usr/bin/env python3\n"
_KUBECTL, _RAY = "kubectl create -f {file}", "ray job submit --working-dir . -- python {file}"

TARGETS = {
    "torchrun": Target("torchrun.sh", ".sh", "bash {file}", ("setup",), _BASH),
    "slurm": Target("slurm.sh", ".sbatch", "sbatch {file}", _OPTIONAL[1:], _BASH),
    # Kubeflow Trainer 2: a TrainJob on the runtime torch-distributed (PyTorchJob is its predecessor's).
    "kubeflow": Target("kubeflow.yaml", ".trainjob.yaml", _KUBECTL, ("image", "time")),
    # An indexed Job, whose pods find each other by name and are restarted together.
    "jobset": Target("jobset.yaml", ".jobset.yaml", _KUBECTL, ("image", "time")),
    "skypilot": Target(
        "skypilot.yaml", ".sky.yaml", "sky jobs launch {file}", ("image", "gpu", "setup")
    ),
    # A Python script for a cluster with ray[train], whose workers each run the training script.
    "ray": Target("ray.py.txt", "_ray.py", _RAY, head=_PYTHON),
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
    _check(found, job)
    return found.head + head + fill(found.template, _values(found, job))


def _check(target: Target, job: LaunchJob) -> None:
    """Raises LaunchError for a job that ``target`` can't launch."""
    if target is TARGETS["jobset"] and job.image is None:
        raise LaunchError(
            "jobset needs --image, a container image with torch, parallel3d and the script, such as "
            "registry/name:tag"
        )
    if target is TARGETS["skypilot"] and job.device == "cuda" and job.gpu is None:
        raise LaunchError("skypilot needs --gpu, the GPU's name as SkyPilot has it, such as H100")
    if target is TARGETS["slurm"] and job.seconds and job.seconds <= job.grace:
        raise LaunchError(
            f"time is {job.time!r} and grace {job.grace} seconds: the job would be asked to stop as it "
            f"starts, and be requeued forever; give a time of {job.grace // 60 + 2} minutes or more, or "
            "--grace 0"
        )


def _values(target: Target, job: LaunchJob) -> dict[str, Any]:
    """Returns what the templates name: the job's fields, and what follows from them."""
    several, jobset = job.nodes > 1, target is TARGETS["jobset"]
    literal = partial(pformat, width=100, sort_dicts=False)
    escaped = shell.for_kubernetes
    return vars(job) | {
        "several": several,
        "cuda": job.device == "cuda",
        "seconds": job.seconds,
        "world_size": job.world_size,
        "shutdown": shell.grace_option(job),
        "limits": shell.LIMITS,
        "signals": shell.SIGNALS,
        "exports": shell.exports(job),
        "words": shell.shell_command([shell.for_torchrun(word) for word in job.command]),
        # SLURM
        "gpu_kind": f"{job.gpu}:" if job.gpu else "",
        "wait": max(60, job.grace),
        # Kubernetes
        "jobset": jobset,
        "finds_head": not jobset and several and job.max_restarts,
        "termination": max(30, job.grace + 10),
        "resources": "resources" if jobset else "resourcesPerNode",
        "arguments": "\n".join(
            f"- {shell.yaml_text(escaped(shell.for_torchrun(word)))}" for word in job.command
        ),
        "environment": shell.commented(
            job, lambda name, value: f"- name: {name}\n  value: {shell.yaml_text(escaped(value))}"
        ),
        # SkyPilot and Ray
        "envs": shell.commented(job, lambda name, value: f"{name}: {shell.yaml_text(value)}"),
        "command": literal(list(job.command)),
        "variables": literal({name: value for name, value, _ in shell.variables(job)}),
    }


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


_VALUE = re.compile(r"\{\{([\w.]+)\}\}")


def fill(name: str, values: Mapping[str, object]) -> str:
    """Returns the template of this name with ``values`` in place of ``{{...}}``.

    A name with a dot is another template, filled in with the same values. Further lines of a value are
    indented as the line that it is in. Lines between ``%if value`` and ``%else`` or ``%end`` stay where the
    value is true; lines that begin with ``%#`` never do.

    Args:
        name: name of a file in the folder ``templates``.
        values: name -> value, for all names in it.
    """
    text = files("parallel3d.tools.launch").joinpath("templates", name).read_text(encoding="utf-8")

    def value(found: re.Match[str]) -> str:
        name = found[1]
        return fill(name, values).rstrip("\n") if "." in name else str(values[name])

    lines: list[str] = []
    kept = [True]
    for line in text.splitlines():
        word, _, condition = line.partition(" ")
        if word == "%if":
            kept.append(kept[-1] and bool(values[condition]))
        elif word == "%else":
            kept[-1] = kept[-2] and not kept[-1]
        elif word == "%end":
            kept.pop()
        elif word != "%#" and kept[-1]:
            inner = line.lstrip()
            lines.append(indent(_VALUE.sub(value, inner), line.removesuffix(inner)))
    return "\n".join(lines) + "\n"
