"""Measures what one GPU can show: ours and torch's FSDP2 in turns, one JSON and one Markdown page.

    python benchmarks/gpu/bench.py --out gpu_bench [--device cuda|cpu] [--only a,b] [--small]

At most ten minutes on one H200, without a network. benchmarks/gpu/README.md has the parts. The exit code is
1 if a part failed.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
MINUTES = 9  # for the shares; the rest is for imports and what a minimum takes beyond a share

# Part -> (its file, its part of the time), in the order of the run.
PARTS: dict[str, tuple[str, int]] = {
    "host_time": ("step_times", 60),
    "small_step": ("step_times", 110),
    "allocator": ("device_memory", 70),
    "largest_batch": ("device_memory", 90),
    "copies": ("copy_kernels", 40),
    "overlap": ("link_overlap", 60),
    "optimizer": ("optimizers", 25),
    "clip": ("optimizers", 25),
    "compile": ("compiled", 70),
    "planner": ("predicted", 45),
}


def part_of(name: str, seconds: float, device: str, small: bool) -> Callable[[], object]:
    """A part with its share of the time, imported when it runs: an error in one leaves the others."""

    def run() -> object:
        importlib.import_module("share").begin(seconds)
        module = importlib.import_module(PARTS[name][0])
        return getattr(module, name)(device, small)

    return run


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="path without a suffix")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda if there is one")
    parser.add_argument("--only", default="", help=f"parts, by commas: {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="tiny models and few rounds")
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: {', '.join(PARTS)}")
    # Streams that share one of the 8 default queues would wait for each other's sleeping links.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()
    else:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "examples" / "llama")]
    sys.path.append(str(HERE.parent.parent))  # the package, where it is not installed
    weight = sum(PARTS[name][1] for name in names)
    share = partial(_share, weight=weight)
    parts = {name: part_of(name, share(name), device, given.small) for name in names}
    return importlib.import_module("page").run_parts(parts, given.out, device)


def _share(name: str, weight: int) -> float:
    """Seconds; a part that runs without the others gets no more than four times its own."""
    return min(MINUTES * 60 * PARTS[name][1] / weight, 4.0 * PARTS[name][1])


if __name__ == "__main__":
    sys.exit(main())
