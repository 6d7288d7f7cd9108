"""A dry run of Llama-3 70B as one of 4,096 ranks: seconds, host memory, and its state beside the planner's.

    python benchmarks/dry_run.py

One step of examples/llama/train.py on (replicate 16, shard 32, tp 8), sequences of 8,192, in this process.
"""

import resource
import shlex
import time
from contextlib import redirect_stdout
from pathlib import Path

from parallel3d.mesh import MeshLayout
from parallel3d.planner import Workload, spec_from_hf_config
from parallel3d.planner.memory import state_memory
from parallel3d.tools.dryrun import record, script

LAYOUT = MeshLayout(16, 32, 8)
TRAIN = Path(__file__).parents[1] / "examples" / "llama" / "train.py"
ARGUMENTS = shlex.split(
    "--size 70b --seq-len 8192 --batch 512 --mixed-precision --sequence-parallel --loss-parallel split "
    "--activation-checkpointing full --replicate 16 --shard 32 --tp 8"
)


def main() -> None:
    """Prints a line each."""
    start, computed = time.perf_counter(), time.process_time()
    with redirect_stdout(None):
        run = record(script(TRAIN, ARGUMENTS), LAYOUT.world_size, 0, steps=1)
    seconds = time.perf_counter() - start
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    computed = time.process_time() - computed
    print(f"{seconds:.1f} s, at most 60, {computed:.1f} of them on a core")
    print(f"{gib:.2f} GiB of host memory, at most 4")
    print(f"{len(run.operations):,} operations, {len(run.collectives):,} collectives")
    work = Workload(
        8192, 1, 512, checkpointing="full", sequence_parallel=True, loss_parallel=True
    )  # fmt: skip
    planned = state_memory(spec_from_hf_config("llama-3.1-70b"), LAYOUT, work)
    # After the last step, before the trainer lets go of its gradients.
    held = max(reversed(run.memory), key=lambda each: each.by_kind.get("gradients", 0)).by_kind
    print(f"parameters {held['parameters']:,} bytes, planner {planned.parameters:,}")
    print(f"gradients {held['gradients']:,} bytes, planner {planned.gradients:,}")
    steps = 4 * len(run.parameters)  # a number for each parameter
    state = held["optimizer state"] - steps
    print(f"AdamW's moments {state:,} bytes, planner {planned.optimizer:,}")


if __name__ == "__main__":
    main()
