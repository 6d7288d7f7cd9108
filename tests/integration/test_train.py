"""examples/train.py as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
TRAIN = Path(__file__).parents[2] / "examples" / "train.py"
pytestmark = pytest.mark.xdist_group("gloo")  # not beside the pool


def train(ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the script on ``ranks`` processes, by torchrun if there are several."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(launch if ranks > 1 else []), str(TRAIN), *options]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def result(run: subprocess.CompletedProcess[str]) -> dict[str, float]:
    """The last line: ``result name=value ...``."""
    assert run.returncode == 0, run.stdout + run.stderr
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("result ")]
    return {k: float(v) for k, v in (pair.split("=") for pair in line.split()[1:])}


def test_four_ranks_follow_the_plain_model_and_one_rank() -> None:
    options = ("--steps", "6", "--check", "--batch", "4")
    four = train(4, "--replicate", "1", "--shard", "2", "--tp", "2", *options)
    one = train(1, *options)
    assert "replicate 1 x shard 2 x tp 2 = 4 ranks" in four.stdout
    assert "layers.*.attention.wq" in four.stdout and "a rank holds at most" in four.stdout
    a, b = result(four), result(one)
    assert a["check_loss"] < 1e-4 and a["check_weights"] < 1e-4 and b["check_loss"] < 1e-4
    assert abs(a["loss"] - b["loss"]) < 1e-4


def test_bad_arguments() -> None:
    run = train(1, "--batch", "3", "--tp", "2")
    assert run.returncode != 0 and "tp" in run.stderr and "Traceback" not in run.stderr
