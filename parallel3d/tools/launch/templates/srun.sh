# --kill-on-bad-exit: when one node fails, the others don't wait for it until a timeout.
# --wait: nor when one has succeeded and others hang.
# --cpu-bind=none: the node's one task, and its workers, are not bound to one core.
srun --kill-on-bad-exit=1 --wait={{wait}} --cpu-bind=none --label bash -c run_node &
srun=$!
attend "$srun" || status=$?
