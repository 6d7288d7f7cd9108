"""The targets: the places where a job can be launched, and how the file for each is written."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from pprint import pformat
from textwrap import indent
from typing import Any

from parallel3d._util.arguments import counted
from parallel3d.tools.launch.job import LaunchError, LaunchJob

MARK = "# Written by parallel3d launch"
"""The beginning of each file, after the line that names its interpreter."""


@dataclass(frozen=True)
class Target:
    """A place where a job can be launched.

    Attributes:
        template: name of the template, in the folder ``templates``, of the file without its head.
        suffix: suffix of the file's name.
        start: the command that starts the job; ``{file}`` stands for the file.
        takes: names of the optional fields of a job (``_OPTIONAL``) that its file can contain.
        head: first line of the file, such as "#!/bin/bash"; "" for none.
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
    """Returns the text of the file that launches ``job`` on ``target``.

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


# Quoting: any text as one word of a shell command, a value of a YAML file, an argument of a launcher.


def _shell_word(text: str) -> str:
    """Quotes ``text`` as one word of bash on one line: nothing in it is expanded or ends the word."""
    if text.isprintable():
        return shlex.quote(text)
    # bytes, as in the locale C bash would not expand \u; the first letter makes Python escape each '
    return "$'" + repr(b'"' + text.encode())[3:]


def _shell_command(words: Sequence[str]) -> str:
    """Quotes the words of a command, with an option and its value on each line."""
    lines: list[list[str]] = []
    for word in words:
        value = lines and lines[-1][-1].startswith("--") and len(lines[-1]) == 1
        if value and "=" not in lines[-1][-1] and not word.startswith("--"):
            lines[-1].append(word)
        else:
            lines.append([word])
    return " \\\n".join(" ".join(map(_shell_word, line)) for line in lines)


def _yaml_text(text: str) -> str:
    """Returns any ``text`` as a double-quoted YAML scalar on one line (YAML 1.1 and 1.2)."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda m: f"\\u{ord(m[0]):04x}", quoted
    )


def _for_kubernetes(text: str) -> str:
    """Escapes "$(NAME)" and "$$", which Kubernetes replaces in command, args and env."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _for_torchrun(text: str) -> str:
    """Escapes "${local_rank}" and "$$", which torchrun replaces in arguments as ``string.Template``."""
    return text.replace("$", "$$") if "$$" in text or "local_rank" in text else text


# The variables that every launch file sets.

_Variable = tuple[str, str, str]
"""Name, value, reason."""

_ON_GPUS: list[_Variable] = [
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "with 1, as for Megatron, FSDP and tp could not overlap"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "unsharded parameters fragment memory less"),
    ("NCCL_DEBUG", "WARN", "NCCL logs why a connection failed; use INFO for a first run"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "a hang leaves a record of what each rank waited for"),
    ("TORCH_FR_BUFFER_SIZE", "2000", "number of collectives in that record"),
]


def _variables(job: LaunchJob) -> list[_Variable]:
    """Returns (name, value, reason) of the training processes' variables: our own, then ``job.env``, which
    overrides."""
    cuda = job.device == "cuda"
    threads = "torchrun would set 1, and all cores are too many for each process"
    ours = [
        ("PYTHONUNBUFFERED", "1", "a killed process's last lines are in the log too"),
        ("PYTHONFAULTHANDLER", "1", "a crash in C code prints Python's stack"),
        ("OMP_NUM_THREADS", "8" if cuda else "1", threads),
    ]
    if cuda:
        ours += _ON_GPUS
    if job.nodes > 1 and job.max_restarts > 0:
        why = "a torchrun that is restarted while another continues would wait forever (torch 2.13)"
        ours.append(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", why))
    own = [(name, value, "") for name, value in job.env.items()]
    return [variable for variable in ours if variable[0] not in job.env] + own


def _commented(job: LaunchJob, write: Callable[[str, str], str]) -> str:
    """Returns the lines ``write(name, value)`` of all variables, each after its reason as a comment."""
    return "\n".join(
        f"# {why}\n{write(name, value)}" if why else write(name, value)
        for name, value, why in _variables(job)
    )


def _exports(job: LaunchJob) -> str:
    """Returns lines of bash that export the variables; they override those of the node's shell.

    Only for NCCL's network interface a setting of the node is kept, because its administrator knows it.
    """
    lines = _commented(job, lambda name, value: f"export {name}={_shell_word(value)}")
    if job.device == "cuda" and job.nodes > 1 and "NCCL_SOCKET_IFNAME" not in job.env:
        lines += """
# excludes interfaces that lead to no other node; nodes may have different names for others
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker,veth,virbr}\""""
    return lines


_LIMITS = """\
# Each worker opens many files and sockets, and RDMA locks memory: as much as this node allows.
ulimit -S -n hard
ulimit -S -l hard"""

_SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def _grace_option(job: LaunchJob) -> str:
    """Returns torchrun's option for the seconds of a last checkpoint, and a space after it.

    It is "" if the installed torch has no such option, as torch 2.11; workers then have 30 seconds.
    """
    return f"--shutdown-timeout={job.grace or 30} " if _has_grace() else ""


@cache
def _has_grace() -> bool:
    torch = find_spec("torch")  # reads the source, as importing torch takes seconds
    if torch is None or torch.origin is None:
        return True
    run = Path(torch.origin).with_name("distributed") / "run.py"
    return "shutdown-timeout" in run.read_text()


# The files.


def _values(target: Target, job: LaunchJob) -> dict[str, Any]:
    """Returns the values that the templates use: the job's fields, and what is derived from them."""
    several, jobset = job.nodes > 1, target is TARGETS["jobset"]
    literal = partial(pformat, width=100, sort_dicts=False)
    escaped = _for_kubernetes
    return vars(job) | {
        "several": several,
        "cuda": job.device == "cuda",
        "seconds": job.seconds,
        "world_size": job.world_size,
        "shutdown": _grace_option(job),
        "limits": _LIMITS,
        "signals": _SIGNALS,
        "exports": _exports(job),
        "words": _shell_command([_for_torchrun(word) for word in job.command]),
        # SLURM
        "gpu_kind": f"{job.gpu}:" if job.gpu else "",
        "wait": max(60, job.grace),
        # Kubernetes
        "jobset": jobset,
        "finds_head": not jobset and several and job.max_restarts,
        "termination": max(30, job.grace + 10),
        "resources": "resources" if jobset else "resourcesPerNode",
        "arguments": "\n".join(
            f"- {_yaml_text(escaped(_for_torchrun(word)))}" for word in job.command
        ),
        "environment": _commented(
            job, lambda name, value: f"- name: {name}\n  value: {_yaml_text(escaped(value))}"
        ),
        # SkyPilot and Ray
        "envs": _commented(job, lambda name, value: f"{name}: {_yaml_text(value)}"),
        "command": literal(list(job.command)),
        "variables": literal({name: value for name, value, _ in _variables(job)}),
    }


_SAVES = re.compile(r"--.*(checkpoint|ckpt|resume|save|output)")


def missing(target: str, job: LaunchJob) -> list[str]:
    """Returns sentences on what ``job`` doesn't give and the file for ``target`` probably needs."""
    found, told = target_named(target), []
    takes = () if found is TARGETS["torchrun"] else found.takes  # whose shell is ready
    is_requeued = found is TARGETS["slurm"] and job.grace > 0
    if is_requeued and job.time is None:
        told.append(
            "no --time: the job is asked for a last checkpoint only where the partition has a limit itself"
        )
    if (is_requeued or job.max_restarts > 0) and not any(map(_SAVES.match, job.command)):
        told.append(
            "no --checkpoint FOLDER among the script's arguments: started again, it would begin at step 0 "
            "(or give --grace 0 and no --max-restarts)"
        )
    if "setup" in takes and job.setup is None and job.image is None:
        told.append(
            "no --setup: nodes use the environment of the shell that starts the job; else give the line that "
            "enters it, such as --setup 'source venv/bin/activate' or --setup 'module load cuda'"
        )
    if "image" in takes and "setup" not in takes and job.image is None:
        told.append("no --image: the runtime's own must have torch, parallel3d and the script")
    return told


def target_named(name: str) -> Target:
    """Returns the target with this name or synonym; else raises a LaunchError with the nearest."""
    lower = str(name).lower()
    if (own := _SYNONYMS.get(lower, lower)) in TARGETS:
        return TARGETS[own]
    near = get_close_matches(lower, [*TARGETS, *_SYNONYMS], 1, 0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise LaunchError(f"--to {name!r} is none of {', '.join(TARGETS)}{hint}")


_VALUE = re.compile(r"\{\{([\w.]+)\}\}")


def fill(name: str, values: Mapping[str, object]) -> str:
    """Returns the text of the template ``name`` with ``values`` in place of ``{{...}}``.

    A name with a dot, in ``{{...}}``, is another template, filled in with the same values. All lines of a
    value are indented like its first. Lines between ``%if value`` and ``%else`` or ``%end`` stay if the value
    is true; lines that begin with ``%#`` are removed.
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
