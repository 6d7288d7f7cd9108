"""What Kubeflow and JobSet share: a container that runs torchrun, as lines of YAML."""

from __future__ import annotations

from textwrap import indent

from parallel3d.launch.environment import variables
from parallel3d.launch.job import LaunchJob
from parallel3d.launch.quoting import for_kubernetes, for_torchrun, yaml_text
from parallel3d.launch.torchrun import grace_option

__all__ = ["arguments", "environment", "mounts", "resources", "script", "volumes"]


def script(torchrun: str, job: LaunchJob, before: str = "") -> str:
    """``command``: bash with our lines of shell, to which Kubernetes appends ``args`` as ``"$@"``.

    ``torchrun`` are its options, a line each; ``before`` lines of shell that they
    need. No user's text is in here, so nothing is to be escaped.
    """
    common = f"--nproc-per-node={job.gpus_per_node} {grace_option(job)}--tee=3"
    options = " \\\n      ".join([*torchrun.split("\n"), common])
    return f"""\
command:
  - bash
  - -c
  # exec: as process 1 bash would not pass SIGTERM on, and torchrun could not save a last checkpoint.
  - |
    set -eu
{nested(before, 4)}    ulimit -S -n hard
    ulimit -S -l hard
    exec torchrun {options} "$@"
  - {yaml_text(job.name)}"""


def arguments(job: LaunchJob) -> str:
    """``args``: the training command's words, each just what it is; Kubernetes would expand ``$(...)``."""
    lines = [f"  - {yaml_text(for_kubernetes(for_torchrun(word)))}" for word in job.command]
    return "\n".join(["args:", *lines])


def environment(job: LaunchJob) -> str:
    """``env`` with a comment before each variable that is ours."""
    lines = ["env:"]
    for name, value, why in variables(job):
        if why:
            lines.append(f"  # {why}")
        lines += [f"  - name: {name}", f"    value: {yaml_text(for_kubernetes(value))}"]
    return "\n".join(lines)


def resources(job: LaunchJob, key: str) -> str:
    """The GPUs; nothing for a job on CPUs."""
    if job.device == "cpu":
        return ""
    return f"""\
# For RDMA add its resource here, as your cluster names it, and IPC_LOCK to the container's capabilities.
{key}:
  limits:
    nvidia.com/gpu: {job.gpus_per_node}
"""


def mounts() -> str:
    """Of the container."""
    return """\
volumeMounts:
  - name: shm
    mountPath: /dev/shm"""


def volumes() -> str:
    """Of the pod."""
    return """\
# Data loaders and NCCL hand tensors over in /dev/shm; a container's own has 64 MiB.
volumes:
  - name: shm
    emptyDir:
      medium: Memory"""


def nested(text: str, depth: int) -> str:
    """``text`` ``depth`` spaces to the right."""
    return indent(text, " " * depth)
