"""Tests on one GPU: is what the engine computes right, and does it stay right whatever streams do?

    python tests/gpu/check.py --out gpu_tests [--device cuda|cpu] [--minutes M] [--only a,b] [--small]
    python tests/gpu/check.py --resume gpu_tests [--minutes M]

It takes M minutes at most (7) and no network, and writes page.md and page.json into the folder. With
``--device cpu --small`` the same runs on a CPU, to try the script. tests/gpu/README.md has the parts.
The exit code is 1 if something is wrong, else 3 if a part had not time enough: --resume runs it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# For the processes that this one starts, too: they get its sys.path.
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks" / "gpu"), str(ROOT / "tests")]
sys.path[:0] = [str(ROOT)]

from runner import Task, command_line  # noqa: E402

# The most valuable first. Weights are the seconds that a part took on an H200, or may take.
PARTS = (
    Task("truth2", "truth", "truth2", 60),
    Task("races", "races", "races", 80),
    Task("truth4", "truth", "truth4", 60),
    Task("races_offload", "races", "races_offload", 45),
    Task("libraries", "truth", "libraries", 40),
    Task("races_ranks", "races", "races_ranks", 45),
    Task("truth1", "truth", "truth1", 20),
    Task("graph1", "graph", "graph1", 30),
    Task("graph2", "graph", "graph2", 60),
)
if __name__ == "__main__":
    sys.exit(command_line(__doc__, PARTS, minutes=7, preload=["ranks"]))
