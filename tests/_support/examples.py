"""The programs in examples/: the command and the output that each shows at its top, and what it prints."""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MOST_LINES = 120


def shown(path: Path) -> tuple[list[str], list[str]]:
    """The words of the ``torchrun`` command in the docstring, and the lines that it says are printed."""
    parts = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
    command = next(part for part in parts if part.startswith("    torchrun "))
    output = parts[parts.index("prints:") + 1] if "prints:" in parts else ""
    return command.split(), [line.removeprefix("    ") for line in output.splitlines()]


def printed(words: list[str], folder: Path) -> list[str]:
    """The lines that a command such as ``shown`` returns prints in ``folder``; AssertionError if it fails."""
    assert words[0] == "torchrun"
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words[1:]]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
