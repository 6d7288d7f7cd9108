"""torchrun on machines that a person can log in to, and the lines that other targets share with it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from parallel3d.tools.launch.job import LaunchJob

# Any text as one word of a shell command, one value of a YAML file, one argument of a launcher.

_BASH = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


def shell_word(text: str) -> str:
    """``text`` as one word of bash, on one line: nothing in it is expanded or ends it."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_bash_escape, text)) + "'"


def _bash_escape(letter: str) -> str:
    if letter in _BASH:
        return _BASH[letter]
    if letter.isprintable():
        return letter
    # bytes: what bash makes of \u depends on the locale, and in C that is the six letters again
    return "".join(f"\\x{byte:02x}" for byte in letter.encode())


def shell_command(words: Sequence[str], indent: str) -> str:
    """Words of a command, each quoted, an option with its value on a line, lines joined by ``\\``."""
    lines: list[list[str]] = []
    for word in words:
        value = lines and lines[-1][-1].startswith("--") and len(lines[-1]) == 1
        if value and "=" not in lines[-1][-1] and not word.startswith("--"):
            lines[-1].append(word)
        else:
            lines.append([word])
    return f" \\\n{indent}".join(" ".join(map(shell_word, line)) for line in lines)


def yaml_text(text: str) -> str:
    """``text`` as a double-quoted YAML scalar on one line, whatever it holds (YAML 1.1 and 1.2)."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda m: f"\\u{ord(m[0]):04x}", quoted
    )


def for_kubernetes(text: str) -> str:
    """``text`` so that Kubernetes gives the container just that.

    It replaces ``$(NAME)`` in command, args and env by a variable's value, and ``$$`` by ``$``.
    """
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def for_torchrun(text: str) -> str:
    """``text`` so that torchrun gives the script just that.

    It replaces ``${local_rank}`` in arguments by the number, and, as ``string.Template`` does, ``$$`` by
    ``$``.
    """
    return text.replace("$", "$$") if "$$" in text or "local_rank" in text else text


# The variables that every launch file sets, each with its reason.

Variable = tuple[str, str, str]
"""Name, value, why."""


def variables(job: LaunchJob) -> list[Variable]:
    """What the training processes get: our settings, then ``job.env``, which wins."""
    threads = "8" if job.device == "cuda" else "1"
    found = [
        ("PYTHONUNBUFFERED", "1", "a killed process's last lines are in the log too"),
        ("PYTHONFAULTHANDLER", "1", "a crash in C code prints Python's stack"),
        (
            "OMP_NUM_THREADS",
            threads,
            "torchrun would say 1, and all cores are too many for each process",
        ),
    ]
    if job.device == "cuda":
        found += [
            (
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "32",
                "1, a habit from Megatron, would keep FSDP's collectives from overlapping with tp",
            ),
            (
                "PYTORCH_ALLOC_CONF",
                "expandable_segments:True",
                "gathered parameters of many sizes leave less memory in holes",
            ),
            ("NCCL_DEBUG", "WARN", "NCCL says why a connection failed; INFO for a first run"),
            (
                "TORCH_NCCL_DUMP_ON_TIMEOUT",
                "1",
                "a collective that hangs leaves a record of what each rank waited for",
            ),
            ("TORCH_FR_BUFFER_SIZE", "2000", "of so many collectives"),
        ]
    if job.nodes > 1 and job.max_restarts > 0:
        found.append(
            (
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
                "1",
                "a torchrun that is started again while another survives would wait for ever (torch 2.13)",
            )
        )
    own = [(name, value, "") for name, value in job.env.items()]
    return [each for each in found if each[0] not in job.env] + own


def exports(job: LaunchJob, indent: str = "") -> str:
    """Lines of bash that export them; what the node's shell has set already is overwritten.

    NCCL's interface is the exception: a cluster's own setting stays, as only its administrator knows it.
    """
    lines = []
    for name, value, why in variables(job):
        if why:
            lines.append(f"{indent}# {why}")
        lines.append(f"{indent}export {name}={shell_word(value)}")
    if job.device == "cuda" and job.nodes > 1 and "NCCL_SOCKET_IFNAME" not in job.env:
        lines += [
            f"{indent}# not over interfaces that lead nowhere; a name here would differ between nodes",
            f'{indent}export NCCL_SOCKET_IFNAME="${{NCCL_SOCKET_IFNAME:-^lo,docker,veth,virbr}}"',
        ]
    return "\n".join(lines)


LIMITS = """\
# Each worker keeps many files and sockets open, and RDMA locks memory: as much as this node allows.
ulimit -S -n hard
ulimit -S -l hard"""

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def grace_option(job: LaunchJob) -> str:
    """The seconds that workers have for a last checkpoint, as an option of torchrun and the space after it.

    None where the torch that is installed has no such option, as 2.11: there they have 30 seconds.
    """
    return f"--shutdown-timeout={job.grace or 30} " if _has_grace() else ""


@cache
def _has_grace() -> bool:
    torch = find_spec("torch")  # which takes seconds to import
    if torch is None or torch.origin is None:
        return True
    return (
        "shutdown-timeout"
        in Path(torch.origin).with_name("distributed").joinpath("run.py").read_text()
    )


def training_words(job: LaunchJob) -> str:
    """The training command's words, quoted for bash: the last lines of a torchrun command."""
    return shell_command([for_torchrun(word) for word in job.command], "    ")


def torchrun_file(job: LaunchJob) -> str:
    """A script to start on every node."""
    body = _one_node(job) if job.nodes == 1 else _many_nodes(job)
    return f"{body}\n"


def _one_node(job: LaunchJob) -> str:
    return f"""\
#   bash FILE
# shellcheck disable=SC1003,SC2016  # quotes and dollars in the script's arguments
set -euo pipefail

{exports(job)}

{LIMITS}

# --standalone: a rendezvous of its own on a free port, so that two jobs on this machine don't meet.
# exec: signals reach torchrun itself, which passes them on to its workers and then waits for their last
# checkpoint before it kills them.
exec torchrun --standalone --nproc-per-node={job.gpus_per_node} --max-restarts={job.max_restarts} \\
    {SIGNALS} \\
    {grace_option(job)}--tee=3 --log-dir="${{LOGS:-logs}}" \\
    {training_words(job)}"""


def _many_nodes(job: LaunchJob) -> str:
    return f"""\
# On each of the {job.nodes} nodes the same line, with one node's address and a name new for each run:
#   HEAD=node-1 RUN=second-try bash FILE
# shellcheck disable=SC1003,SC2016  # quotes and dollars in the script's arguments
set -euo pipefail

: "${{HEAD:?the host name or address of one of the nodes, the same on all}}"
: "${{RUN:?a name for this run, the same on all nodes and not used before}}"

{exports(job)}

{LIMITS}

# c10d: the nodes meet at HEAD in any order and need no numbers; after a failure they meet again there.
# A node's ranks are consecutive, so tp groups stay within it; the order of the nodes is their names'.
# --max-restarts: of each node; one failure may count twice, as other nodes' workers fail by it, also anew.
# --rdzv-id: what is left of an earlier run can't join this one.
# read_timeout: nodes may start ten minutes before HEAD does; 60 seconds would be the default.
# --local-addr, if LOCAL is set: the address others reach this node by, where its name doesn't resolve.
# exec: signals reach torchrun itself, which passes them on to its workers and then waits for their last
# checkpoint before it kills them.
exec torchrun --nnodes={job.nodes} --nproc-per-node={job.gpus_per_node} --max-restarts={job.max_restarts} \\
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${{PORT:-29500}}" --rdzv-id="$RUN" \\
    --rdzv-conf=read_timeout=600,join_timeout=900 ${{LOCAL:+--local-addr="$LOCAL"}} \\
    {SIGNALS} \\
    {grace_option(job)}--tee=3 --log-dir="${{LOGS:-logs}}" \\
    {training_words(job)}"""
