"""examples/train.py as a user starts it."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from launch import launch

pytest.importorskip("typer")
pytest.importorskip("rich")
TRAIN = Path(__file__).parents[2] / "examples" / "train.py"
pytestmark = pytest.mark.xdist_group("gloo")  # not beside the pool


def train(*options: str, torchrun: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the script, by torchrun on so many processes."""
    by_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)]
    command = [sys.executable, *(by_torchrun if torchrun else []), str(TRAIN), *options]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def as_rank(options: tuple[str, ...]) -> None:
    """Runs the script in a process that has torchrun's variables."""
    sys.argv[:] = [str(TRAIN), *options]
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code


def result(text: str) -> dict[str, float]:
    """The last line: ``result name=value ...``."""
    (line,) = [line for line in text.splitlines() if line.startswith("result ")]
    return {k: float(v) for k, v in (pair.split("=") for pair in line.split()[1:])}


def check_four(text: str) -> dict[str, float]:
    assert "replicate 1 x shard 2 x tp 2 = 4 ranks" in text
    assert "layers.*.attention.wq" in text and "a rank holds at most" in text
    values = result(text)
    assert values["check_loss"] < 1e-4 and values["check_weights"] < 1e-4
    return values


OPTIONS = ("--steps", "3", "--check", "--batch", "4")
MESH = ("--replicate", "1", "--shard", "2", "--tp", "2")


def test_four_ranks_follow_the_plain_model_and_one_rank() -> None:
    """One rank by torchrun itself, four as it starts them but without four imports of torch."""
    outputs = [text for _, text in launch(as_rank, (*OPTIONS, *MESH), ranks=4)]
    a = check_four(outputs[0])
    assert not any(outputs[1:])  # only rank 0 prints
    run = train(*OPTIONS, torchrun=1)
    assert run.returncode == 0, run.stdout + run.stderr
    b = result(run.stdout)
    assert b["check_loss"] < 1e-4
    assert abs(a["loss"] - b["loss"]) < 1e-4


def test_what_recipes_ask_for() -> None:
    """Micro-batches, sequence and loss parallel, checkpointing, another length: the plain model's numbers."""
    sizes = ("--size", "nano", "--seq-len", "30", "--batch", "8", "--micro-batch", "1")
    plans = ("--sequence-parallel", "--loss-parallel", "chunked", "--no-reshard")
    more = ("--activation-checkpointing", "full", "--dtype", "float64", "--warmup-steps", "1")
    (_, text), *_ = launch(as_rank, (*OPTIONS[:3], *sizes, *plans, *more, *MESH), ranks=4)
    values = result(text)
    assert values["check_loss"] < 1e-13 and values["check_weights"] < 1e-12


@pytest.mark.full
def test_four_ranks_by_torchrun() -> None:
    run = train(*OPTIONS, *MESH, torchrun=4)
    assert run.returncode == 0, run.stdout + run.stderr
    check_four(run.stdout)


def test_bad_arguments() -> None:
    run = train("--batch", "3", "--tp", "2")
    assert run.returncode != 0 and "tp" in run.stderr and "Traceback" not in run.stderr
    run = train("--batch", "6", "--micro-batch", "4")
    assert run.returncode != 0 and "the next below that does: 3" in run.stderr
