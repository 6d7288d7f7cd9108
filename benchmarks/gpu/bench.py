"""Measures what one GPU can show: ours and torch's FSDP2 in turns, one JSON and one Markdown page.

    python benchmarks/gpu/bench.py --out gpu_bench [--device cuda|cpu] [--minutes M] [--only a,b] [--small]
    python benchmarks/gpu/bench.py --resume gpu_bench [--minutes M]

It takes M minutes at most (8) and no network, and writes page.md and page.json into the folder.
benchmarks/gpu/README.md has the parts. The exit code is 1 if something is wrong, else 3 if a part had not
time enough: --resume runs it again.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# For the processes that this one starts, too: they get its sys.path.
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT / "examples" / "llama"), str(ROOT)]

from runner import Task, command_line  # noqa: E402

# The most valuable first. Weights are the seconds that a part took on an H200, or may take.
PARTS = (
    Task("host_time", "step_times", "host_time", 40),
    Task("host_profile", "host_profile", "host_profile", 20),
    Task("host_nccl", "host_nccl", "host_nccl", 30),
    Task("overlap_hsdp", "link_overlap", "overlap_hsdp", 40),
    Task("captured", "captured", "captured", 40),
    Task("compile", "compiled", "compile", 80),
    Task("wrapped_alone", "alone", "wrapped_alone", 15),
    Task("small_step", "step_times", "small_step", 70),
    Task("clip", "optimizers", "clip", 15),
    Task("optimizer", "optimizers", "optimizer", 15),
    Task("copies", "copy_kernels", "copies", 25),
    Task("allocator", "device_memory", "allocator", 30),
    Task("overlap", "link_overlap", "overlap", 40),
    Task("planner", "predicted", "planner", 40),
    Task("largest_batch", "device_memory", "largest_batch", 60),
)
if __name__ == "__main__":
    sys.exit(command_line(__doc__, PARTS, minutes=8, preload=["sides"]))
