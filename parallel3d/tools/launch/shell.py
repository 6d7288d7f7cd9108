"""The parts of launch files that depend on a job's words: quoted text, variables, torchrun's options."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from parallel3d.tools.launch.job import LaunchJob

# Quoting: any text as one word of a shell command, a value of a YAML file, an argument of a launcher.


def shell_word(text: str) -> str:
    """Quotes ``text`` as one word of bash on one line: nothing in it is expanded or ends the word."""
    if text.isprintable():
        return shlex.quote(text)
    # bytes, as in the locale C bash would not expand \u; the first letter makes Python escape each '
    return "$'" + repr(b'"' + text.encode())[3:]


def shell_command(words: Sequence[str]) -> str:
    """Quotes the words of a command, with an option and its value on each line."""
    lines: list[list[str]] = []
    for word in words:
        value = lines and lines[-1][-1].startswith("--") and len(lines[-1]) == 1
        if value and "=" not in lines[-1][-1] and not word.startswith("--"):
            lines[-1].append(word)
        else:
            lines.append([word])
    return " \\\n".join(" ".join(map(shell_word, line)) for line in lines)


def yaml_text(text: str) -> str:
    """Returns any ``text`` as a double-quoted YAML scalar on one line (YAML 1.1 and 1.2)."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda m: f"\\u{ord(m[0]):04x}", quoted
    )


def for_kubernetes(text: str) -> str:
    """Escapes what Kubernetes replaces in command, args and env: ``$(NAME)``, and ``$$`` by ``$``."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def for_torchrun(text: str) -> str:
    """Escapes what torchrun replaces in arguments: ``${local_rank}``, and ``$$`` as ``string.Template``."""
    return text.replace("$", "$$") if "$$" in text or "local_rank" in text else text


# The variables that every launch file sets.

Variable = tuple[str, str, str]
"""Name, value, reason."""

_ON_GPUS: list[Variable] = [
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "with 1, as for Megatron, FSDP and tp could not overlap"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "unsharded parameters fragment memory less"),
    ("NCCL_DEBUG", "WARN", "NCCL logs why a connection failed; use INFO for a first run"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "a hang leaves a record of what each rank waited for"),
    ("TORCH_FR_BUFFER_SIZE", "2000", "number of collectives in that record"),
]


def variables(job: LaunchJob) -> list[Variable]:
    """Returns the training processes' variables: our settings, then ``job.env``, which overrides them."""
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


def commented(job: LaunchJob, write: Callable[[str, str], str]) -> str:
    """Returns ``write(name, value)`` for each variable, on the lines after its reason as a comment."""
    return "\n".join(
        f"# {why}\n{write(name, value)}" if why else write(name, value)
        for name, value, why in variables(job)
    )


def exports(job: LaunchJob) -> str:
    """Returns lines of bash that export the variables; they override those of the node's shell.

    NCCL's interface is the exception: a setting of the cluster is kept, as only its administrator knows it.
    """
    lines = commented(job, lambda name, value: f"export {name}={shell_word(value)}")
    if job.device == "cuda" and job.nodes > 1 and "NCCL_SOCKET_IFNAME" not in job.env:
        lines += """
# excludes interfaces that lead to no other node; nodes may have different names for others
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker,veth,virbr}\""""
    return lines


LIMITS = """\
# Each worker opens many files and sockets, and RDMA locks memory: as much as this node allows.
ulimit -S -n hard
ulimit -S -l hard"""

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def grace_option(job: LaunchJob) -> str:
    """Returns torchrun's option for the seconds that workers have for a last checkpoint, and a space.

    It is "" if the installed torch has no such option, as 2.11, where workers have 30 seconds.
    """
    return f"--shutdown-timeout={job.grace or 30} " if _has_grace() else ""


@cache
def _has_grace() -> bool:
    torch = find_spec("torch")  # reads the source, as importing torch takes seconds
    if torch is None or torch.origin is None:
        return True
    run = Path(torch.origin).with_name("distributed") / "run.py"
    return "shutdown-timeout" in run.read_text()
