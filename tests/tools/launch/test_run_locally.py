"""``parallel3d run`` and ``parallel3d demo``: real processes, and a line where torchrun has a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("gloo")  # not beside the pool


def parallel3d(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "parallel3d", *words],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
    )


@pytest.mark.parametrize(
    ("code", "line"),
    [
        pytest.param(0, "", marks=pytest.mark.slow),
        pytest.param(2, "", marks=pytest.mark.slow),
        pytest.param(7, "rank 0 ended first, with exit code 7\n", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_run_ends_in_a_line(code: int, line: str, tmp_path: Path) -> None:
    """A mistake in an option, exit code 2, has been said by the program."""
    program = "import os, sys\nprint('rank', os.environ['RANK'])\nsys.exit(int(sys.argv[1]))\n"
    (tmp_path / "program.py").write_text(program)
    done = parallel3d("run", "--nproc-per-node", "1", "program.py", str(code), folder=tmp_path)
    assert (done.returncode, done.stdout) == (code, "rank 0\n")
    assert done.stderr == (line and f"parallel3d run: {line}")


@pytest.mark.slow
def test_demo_trains_and_compares(tmp_path: Path) -> None:
    """On two ranks and few steps here; eight and 60 steps without options."""
    words = ("--shard", "2", "--size", "nano", "--steps", "2", "--batch", "4", "--check")
    done = parallel3d("demo", *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("starting 2 processes")
    assert "equal to the plain model" in done.stdout
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_demo_refuses_a_mesh_that_is_none(tmp_path: Path) -> None:
    done = parallel3d("demo", "--tp", "two", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "parallel3d demo: --tp two: give a number from 1 on\n"
