"""SLURM: a script for sbatch that saves and requeues itself before the time limit."""

from textwrap import indent

from parallel3d.tools.launch.job import LaunchError, LaunchJob
from parallel3d.tools.launch.shell import LIMITS, exports, grace_option, setup_lines, training_words


def slurm_file(job: LaunchJob) -> str:
    """Directives, what runs on each node, and a loop that starts it, handles signals and requeues."""
    if job.seconds and job.seconds <= job.grace:
        raise LaunchError(
            f"time is {job.time!r} and grace {job.grace} seconds: the job would be asked to stop as it "
            f"starts, and be requeued forever; give a time of {job.grace // 60 + 2} minutes or more, or "
            "--grace 0"
        )
    return f"""\
{_directives(job)}

# shellcheck disable=SC1003,SC2016,SC2317  # quotes and dollars in arguments; what only nodes call
{setup_lines(job)}set -euo pipefail

{exports(job)}

# The first node's name. With many nodes "| head -n 1" would end scontrol by a broken pipe.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${{hosts[0]}}"

{_on_each_node(job)}

{_attempts(job)}

{_REQUEUE if job.grace else ""}exit "$status"
"""


def _directives(job: LaunchJob) -> str:
    gres = f"#SBATCH --gres=gpu:{job.gpu + ':' if job.gpu else ''}{job.gpus_per_node}\n"
    given = {"time": job.time, "partition": job.partition, "account": job.account}
    ours = "".join(f"#SBATCH --{name}={value}\n" for name, value in given.items() if value)
    requeue = f"""\
## Sent {job.grace} s before the time limit to this script (B:), which asks for a checkpoint.
#SBATCH --signal=B:USR1@{job.grace}
## After a node's failure or preemption the job is put back into the queue.
#SBATCH --requeue"""
    return f"""\
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
## One task on each node, torchrun, which starts the processes.
#SBATCH --ntasks-per-node=1
{gres if job.device == "cuda" else ""}\
## The whole node with all its cores and memory; the default is those of one small task.
#SBATCH --exclusive
#SBATCH --mem=0
{ours}\
## One file for all starts of the job.
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
{requeue if job.grace else "#SBATCH --no-requeue"}"""


def _on_each_node(job: LaunchJob) -> str:
    limits = LIMITS.replace("\n", "\n    ")
    command = training_words(job).replace("\n    ", "\n            ")
    return f"""\
{_ATTEND}

# What each node runs. It is an exported function, not a string, so that $SLURM_NODEID is expanded on the
# node, where it is the node's number; in this script it would be 0 for all, and they would wait forever.
run_node() {{
    {limits}

    # Static rendezvous: ranks in SLURM's order of nodes, which follows the network's topology.
    # torchrun itself ignores USR1: it would end with an error and give its workers 30 s. They inherit that,
    # and so are not killed by a signal that comes before they handle it.
    (
        trap '' USR1
        exec torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={job.gpus_per_node} \\
            --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
            --max-restarts=0 {grace_option(job)}--tee=3 --log-dir="logs/$SLURM_JOB_ID" \\
            {command}
    ) &
    torchrun=$!
    # SLURM may signal only this shell, or all processes: asking twice does no harm.
    trap 'pkill -USR1 -P "$torchrun" || true' USR1
    trap 'kill -TERM "$torchrun" || true' TERM
    attend "$torchrun"
}}
export -f run_node"""


_ATTEND = """\
# Returns the exit status of a child. A handled signal ends "wait" early, so it is repeated.
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
# The time is nearly over: ask for a last checkpoint, repeatedly, as a process may not yet handle signals.
asked=""
ask() {
    while kill -USR1 "$srun" 2> /dev/null; do sleep 10; done
}
trap 'asked=yes; ask &' USR1
srun=""
"""
    head = f"{asking if job.grace else ''}status=0\n"
    if not job.max_restarts:
        return head + _run(job, "SLURM_JOB_ID * 7", "A different port for each job")
    unasked = '[ -z "$asked" ] && ' if job.grace else ""
    return f"""\
{head}for attempt in {{0..{job.max_restarts}}}; do
{indent(_run(job, "(SLURM_JOB_ID * 7 + attempt)", "A different port for each job and attempt"), "    ")}
    if {unasked}[ "$status" -ne 0 ] && [ "$attempt" -lt {job.max_restarts} ]; then
        echo "attempt $attempt of {job.max_restarts} failed with $status: once more"
        status=0
    else
        break
    fi
done"""


def _run(job: LaunchJob, port: str, why: str) -> str:
    return f"""\
# {why}: no process left from another one listens there.
export MASTER_PORT="$((15000 + {port} % 15000))"
# --kill-on-bad-exit: when one node fails, the others don't wait for it until a timeout.
# --wait: nor when one has succeeded and others hang.
# --cpu-bind=none: the node's one task, and its workers, are not bound to one core.
srun --kill-on-bad-exit=1 --wait={max(60, job.grace)} --cpu-bind=none --label bash -c run_node &
srun=$!
attend "$srun" || status=$?"""


_REQUEUE = """\
# It was asked to stop and has saved: requeue it, to continue from the checkpoint.
if [ -n "$asked" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60  # SLURM ends this script now
fi
"""
