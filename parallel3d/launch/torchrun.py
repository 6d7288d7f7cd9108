"""torchrun on machines that a person can log in to, and the lines that other targets share with it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from parallel3d.launch.environment import exports
from parallel3d.launch.job import LaunchJob
from parallel3d.launch.quoting import for_torchrun, shell_command

__all__ = ["LIMITS", "grace_option", "torchrun_file", "training_words"]

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
