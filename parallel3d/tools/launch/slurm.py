"""SLURM: a script for sbatch that saves and requeues itself before the time limit."""

from __future__ import annotations

from parallel3d.tools.launch.job import LaunchError, LaunchJob
from parallel3d.tools.launch.shell import LIMITS, exports, grace_option, training_words


def slurm_file(job: LaunchJob) -> str:
    """Directives, what runs on each node, and a loop that starts it, watches for signals and requeues.

    Raises:
        LaunchError: the job would be asked to stop as it starts, and so be requeued for ever.
    """
    if job.seconds is not None and 0 < job.seconds <= job.grace:
        raise LaunchError(
            f"time is {job.time!r} and grace {job.grace} seconds: the job would be asked to stop as it "
            f"starts, and be requeued for ever; give a time of {job.grace // 60 + 2} minutes or more, or "
            "--grace 0"
        )
    return "\n\n".join(
        (
            _directives(job),
            _settings(job),
            _on_each_node(job),
            _attempts(job),
            _END if job.grace else _FAILED,
        )
    )


def _directives(job: LaunchJob) -> str:
    gpu = f"gpu:{job.gpu}" if job.gpu else "gpu"
    lines = [
        ("", f"job-name={job.name}"),
        ("", f"nodes={job.nodes}"),
        ("One task a node, torchrun, which starts the processes.", "ntasks-per-node=1"),
        *([("", f"gres={gpu}:{job.gpus_per_node}")] if job.device == "cuda" else []),
        (
            "The whole node: all its cores and memory, which else are those of one small task.",
            "exclusive",
        ),
        ("", "mem=0"),
        *([("", f"time={job.time}")] if job.time else []),
        *([("", f"partition={job.partition}")] if job.partition else []),
        *([("", f"account={job.account}")] if job.account else []),
        ("One file for all starts of the job.", "output=%x-%j.out"),
        ("", "open-mode=append"),
    ]
    if job.grace:
        lines += [
            (
                f"{job.grace} s before the time limit, to this script (B:), which asks for a checkpoint.",
                f"signal=B:USR1@{job.grace}",
            ),
            ("A node that dies, or preemption, puts the job back into the queue.", "requeue"),
        ]
    else:
        lines += [("", "no-requeue")]
    return "\n".join(
        f"## {why}\n#SBATCH --{what}" if why else f"#SBATCH --{what}" for why, what in lines
    )


def _settings(job: LaunchJob) -> str:
    return f"""\
# shellcheck disable=SC1003,SC2016,SC2317  # quotes and dollars in arguments; what only nodes call
set -euo pipefail

{exports(job)}

# The first node's name. Not by "| head -n 1": with many nodes that ends scontrol by a broken pipe.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${{hosts[0]}}\""""


def _on_each_node(job: LaunchJob) -> str:
    limits = LIMITS.replace("\n", "\n    ")
    command = training_words(job).replace("\n    ", "\n            ")
    return f"""\
{_ATTEND}

# What each node runs. A function that is exported, not text in quotes: $SLURM_NODEID is expanded on the
# node, where it is the node's number; in this script it would be 0 for all, and they would wait forever.
run_node() {{
    {limits}

    # Static rendezvous: ranks in SLURM's order of nodes, which follows the network's topology.
    # torchrun itself ignores USR1, so that it doesn't end when it comes, with an error and 30 s for its
    # workers. They inherit that and so survive one that comes before they handle it.
    (
        trap '' USR1
        exec torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={job.gpus_per_node} \\
            --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
            --max-restarts=0 {grace_option(job)}--tee=3 --log-dir="logs/$SLURM_JOB_ID" \\
            {command}
    ) &
    torchrun=$!
    # SLURM may signal this shell alone, or all processes: asking twice does no harm.
    trap 'pkill -USR1 -P "$torchrun" || true' USR1
    trap 'kill -TERM "$torchrun" || true' TERM
    attend "$torchrun"
}}
export -f run_node"""


_ATTEND = """\
# The exit status of a child. A signal that is handled ends "wait" early: then once more.
attend() {
    local status=0
    wait "$1" || status=$?
    while kill -0 "$1" 2> /dev/null; do
        status=0
        wait "$1" || status=$?
    done
    return "$status"
}
export -f attend"""


def _attempts(job: LaunchJob) -> str:
    asking = """\
# The time is nearly up: ask for a last checkpoint, again and again for a process that wasn't ready to hear.
asked=""
ask() {
    while kill -USR1 "$srun" 2> /dev/null; do sleep 10; done
}
trap 'asked=yes; ask &' USR1
srun=""
"""
    unasked = '[ -z "$asked" ] && ' if job.grace else ""
    return f"""\
{asking if job.grace else ""}status=0
for attempt in {{0..{job.max_restarts}}}; do
    # Another port for each job and attempt: nothing that is left of another one listens there.
    export MASTER_PORT="$((15000 + (SLURM_JOB_ID * 7 + attempt) % 15000))"
    # --kill-on-bad-exit: when one node fails, the others don't wait for it until a timeout.
    # --wait: nor when one has ended well and others hang.
    # --cpu-bind=none: the node's one task is not held to one core, and its workers with it.
    srun --kill-on-bad-exit=1 --wait={max(60, job.grace)} --cpu-bind=none --label bash -c run_node &
    srun=$!
    attend "$srun" || status=$?
    if {unasked}[ "$status" -ne 0 ] && [ "$attempt" -lt {job.max_restarts} ]; then
        echo "attempt $attempt of {job.max_restarts} failed with $status: once more"
        status=0
    else
        break
    fi
done"""


_FAILED = 'exit "$status"\n'

_END = """\
# Asked to stop, and it has saved: back into the queue, to go on from the checkpoint.
if [ -n "$asked" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60  # SLURM ends this script now
fi
exit "$status"
"""
