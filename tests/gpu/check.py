"""Tests on one GPU: is what the engine computes right, and does it stay right whatever streams do?

    python tests/gpu/check.py --out gpu_tests [--device cuda] [--only truth,races]

It takes at most ten minutes on one H200 and no network, and writes gpu_tests.json and gpu_tests.md. With
``--device cpu --small`` the same runs on a CPU in about a minute, to try the script.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# For the processes that this one starts, too: they get its sys.path.
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks" / "gpu")]

WORLDS = (1, 2, 4)


def main() -> int:
    """Runs the parts; returns the exit code: 0 if all holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_tests"), help="files without suffix")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="truth,races", help="parts, separated by commas")
    parser.add_argument("--small", action="store_true", help="small models, three seeds")
    parser.add_argument("--worlds", default="1,2,4", help="numbers of ranks, for truth")
    options = parser.parse_args()
    if options.device == "cuda":
        # All ranks are on one card, which the processes see as the only one.
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[0] or "0"
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --small tries the script")
    import races
    import truth
    from page import run_parts

    wanted = options.only.split(",")
    worlds = tuple(int(world) for world in options.worlds.split(","))
    if unknown := set(wanted) - {"truth", "races"} or set(worlds) - set(WORLDS):
        parser.error(f"unknown: {', '.join(map(str, unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        parts = {
            "truth": functools.partial(
                truth.run, options.device, small=options.small, worlds=worlds, folder=where
            ),
            "races": functools.partial(
                races.run, options.device, small=options.small, folder=where
            ),
        }
        return run_parts({name: parts[name] for name in wanted}, options.out, options.device)


if __name__ == "__main__":
    sys.exit(main())
