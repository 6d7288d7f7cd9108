%if several
# On each of the {{nodes}} nodes the same line, with one node's address and a name new for each run:
#   HEAD=node-1 RUN=second-try bash FILE
%else
#   bash FILE
%end
# shellcheck disable=SC1003,SC2016  # quotes and dollars in the script's arguments
%if setup
# The environment: before set -u, under which some such scripts fail.
{{setup}}

%end
set -euo pipefail

%if several
: "${HEAD:?the host name or address of one of the nodes, the same on all}"
: "${RUN:?a name for this run, the same on all nodes and not used before}"

%end
{{exports}}

{{limits}}

%if several
# c10d: the nodes connect to HEAD in any order and need no numbers; after a failure they connect again.
# A node's ranks are consecutive, so tp groups stay within it; nodes are ordered by their names.
# --max-restarts: of each node; one failure may count twice, as other nodes' workers fail because of it.
# --rdzv-id: processes that are left from an earlier run can't join this one.
# read_timeout: nodes may start ten minutes before HEAD does; the default is 60 seconds.
# --local-addr, if LOCAL is set: the address by which others reach this node, if its name doesn't resolve.
%else
# --standalone: a rendezvous of its own on a free port, so that two jobs on this machine don't interfere.
%end
# exec: signals reach torchrun itself, which passes them on to its workers and then waits for their last
# checkpoint before it kills them.
%if several
exec torchrun --nnodes={{nodes}} --nproc-per-node={{gpus_per_node}} --max-restarts={{max_restarts}} \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${PORT:-29500}" --rdzv-id="$RUN" \
    --rdzv-conf=read_timeout=600,join_timeout=900 ${LOCAL:+--local-addr="$LOCAL"} \
%else
exec torchrun --standalone --nproc-per-node={{gpus_per_node}} --max-restarts={{max_restarts}} \
%end
    {{signals}} \
    {{shutdown}}--tee=3 --log-dir="${LOGS:-logs}" \
    {{words}}
