#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
## One task on each node, torchrun, which starts the processes.
#SBATCH --ntasks-per-node=1
%if cuda
#SBATCH --gres=gpu:{{gpu_kind}}{{gpus_per_node}}
%end
## The whole node with all its cores and memory; the default is those of one small task.
#SBATCH --exclusive
#SBATCH --mem=0
%if time
#SBATCH --time={{time}}
%end
%if partition
#SBATCH --partition={{partition}}
%end
%if account
#SBATCH --account={{account}}
%end
## One file for all starts of the job.
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
%if grace
## Sent {{grace}} s before the time limit to this script (B:), which asks for a checkpoint.
#SBATCH --signal=B:USR1@{{grace}}
## After a node's failure or preemption the job is put back into the queue.
#SBATCH --requeue
%else
#SBATCH --no-requeue
%end

# shellcheck disable=SC1003,SC2016,SC2317  # quotes and dollars in arguments; what only nodes call
%if setup
# The environment: before set -u, under which some such scripts fail.
{{setup}}

%end
set -euo pipefail

{{exports}}

# The first node's name. With many nodes "| head -n 1" would end scontrol by a broken pipe.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${hosts[0]}"

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
export -f attend

# What each node runs. It is an exported function, not a string, so that $SLURM_NODEID is expanded on the
# node, where it is the node's number; in this script it would be 0 for all, and they would wait forever.
run_node() {
    {{limits}}

    # Static rendezvous: ranks in SLURM's order of nodes, which follows the network's topology.
    # torchrun itself ignores USR1: it would end with an error and give its workers 30 s. They inherit that,
    # and so are not killed by a signal that comes before they handle it.
    (
        trap '' USR1
        exec torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={{gpus_per_node}} \
            --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
            --max-restarts=0 {{shutdown}}--tee=3 --log-dir="logs/$SLURM_JOB_ID" \
            {{words}}
    ) &
    torchrun=$!
    # SLURM may signal only this shell, or all processes: asking twice does no harm.
    trap 'pkill -USR1 -P "$torchrun" || true' USR1
    trap 'kill -TERM "$torchrun" || true' TERM
    attend "$torchrun"
}
export -f run_node

%if grace
# The time is nearly over: ask for a last checkpoint, repeatedly, as a process may not yet handle signals.
asked=""
ask() {
    while kill -USR1 "$srun" 2> /dev/null; do sleep 10; done
}
trap 'asked=yes; ask &' USR1
srun=""
%end
status=0
%if max_restarts
for attempt in {0..{{max_restarts}}}; do
    # A different port for each job and attempt: no process left from another one listens there.
    export MASTER_PORT="$((15000 + (SLURM_JOB_ID * 7 + attempt) % 15000))"
    {{srun.sh}}
%if grace
    if [ -z "$asked" ] && [ "$status" -ne 0 ] && [ "$attempt" -lt {{max_restarts}} ]; then
%else
    if [ "$status" -ne 0 ] && [ "$attempt" -lt {{max_restarts}} ]; then
%end
        echo "attempt $attempt of {{max_restarts}} failed with $status: once more"
        status=0
    else
        break
    fi
done
%else
# A different port for each job: no process left from another one listens there.
export MASTER_PORT="$((15000 + SLURM_JOB_ID * 7 % 15000))"
{{srun.sh}}
%end

%if grace
# It was asked to stop and has saved: requeue it, to continue from the checkpoint.
if [ -n "$asked" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60  # SLURM ends this script now
fi
%end
exit "$status"
