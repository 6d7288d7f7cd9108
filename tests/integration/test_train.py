"""examples/llama/train.py as a user starts it."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from _support.launch import launch

from parallel3d.observability import read_json_lines

TRAIN = Path(__file__).parents[2] / "examples" / "llama" / "train.py"
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


RUN = {"steps", "loss", "smoothed_loss", "tokens_per_second", "seconds"}
CHECK = {"check_loss", "check_grad_norm", "check_weights"}


def result(text: str) -> dict[str, float]:
    """What ``--json --check`` prints: one line, and nothing else."""
    (line,) = text.splitlines()
    values = json.loads(line)
    assert set(values) == RUN | CHECK
    return values


def check_screen(text: str, ranks: int) -> None:
    """What a person sees of a run of three steps on (1, 2, 2) with ``--check``."""
    lines = text.splitlines()
    for phase, line in zip((f"rank 0 of {ranks}: importing torch", "mesh: "), lines, strict=False):
        assert re.match(rf" *\d+\.\d s  {phase}", line), line
    assert "mesh: replicate 1 x shard 2 x tp 2 = 4 ranks" in lines[1]
    assert "plan: 1" in text and "layers.*.attention.wq" not in text  # all of it: --show-plan
    assert "a rank holds at most" in text
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/3", "3/3"]
    assert all(len(line) <= 80 and "tokens/s" in line for line in steps)
    (verdict,) = [
        line for line in lines if line.startswith("equal to the plain model over 3 steps")
    ]
    assert verdict.endswith(": OK") and lines[-1].startswith("done: 3 steps, loss ")


NANO = ("--size", "nano")
OPTIONS = ("--steps", "3", "--check", "--batch", "4")
MESH = ("--replicate", "1", "--shard", "2", "--tp", "2")


@pytest.mark.slow
def test_four_ranks_follow_the_plain_model_and_one_rank() -> None:
    """One rank by torchrun itself, four as it starts them but without four imports of torch."""
    outputs = [text for _, text in launch(as_rank, (*OPTIONS, "--json", *MESH), ranks=4)]
    a = result(outputs[0])
    assert a["check_loss"] < 1e-4 and a["check_weights"] < 1e-4
    assert not any(outputs[1:])  # only rank 0 prints
    run = train(*OPTIONS, "--json", torchrun=1)
    assert run.returncode == 0, run.stdout + run.stderr
    b = result(run.stdout)
    assert b["check_loss"] < 1e-4
    assert abs(a["loss"] - b["loss"]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("--cp-attention", "ring", "--activation-checkpointing", "selective"),
        ("--tp", "2", "--loss-parallel", "chunked", "--activation-checkpointing", "offload"),
    ],
    ids=["ring", "tp"],
)
def test_sequences_cut_over_cp_follow_the_plain_model(more: tuple[str, ...]) -> None:
    shard = "1" if "--tp" in more else "2"
    options = (*OPTIONS, *NANO, "--json", "--shard", shard, "--cp", "2", *more)
    outputs = [text for _, text in launch(as_rank, options, ranks=4)]
    found = result(outputs[0])
    assert max(found["check_loss"], found["check_grad_norm"], found["check_weights"]) < 1e-4


def test_the_screen() -> None:
    """Phases with their times, steps that fit, a verdict; with ``--show-plan`` each module of the plan."""
    outputs = [text for _, text in launch(as_rank, (*OPTIONS, *NANO, *MESH), ranks=4)]
    check_screen(outputs[0], 4)
    assert not any(outputs[1:])
    options = ("--steps", "1", *NANO, *MESH, "--show-plan")
    (_, text), *_ = launch(as_rank, options, ranks=4)
    assert "layers.*.attention.wq" in text and text.splitlines()[-1].startswith("done: 1 steps")


def test_it_says_that_it_starts_before_torch_is_imported(tmp_path: Path) -> None:
    """Seconds before the next line: torch is not even found here."""
    (tmp_path / "torch.py").write_text('import sys; sys.exit("torch is imported")')
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-u", str(TRAIN)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert run.stderr == "torch is imported\n"
    assert re.fullmatch(r" *0\.\d s  rank 0 of 1: importing torch\n", run.stdout)


@pytest.mark.slow
def test_what_recipes_ask_for(tmp_path: Path) -> None:
    """Micro-batches, sequence and loss parallel, checkpointing, another length: the plain model's numbers.

    And what is written of it: a line a step, and a trace of the second.
    """
    sizes = ("--size", "nano", "--seq-len", "30", "--batch", "8", "--micro-batch", "1")
    plans = ("--sequence-parallel", "--loss-parallel", "chunked", "--no-reshard")
    more = ("--activation-checkpointing", "full", "--dtype", "float64", "--warmup-steps", "1")
    written = (
        "--metrics",
        str(tmp_path / "run.jsonl"),
        "--metrics-every",
        "2",
        "--peak-tflops",
        "1",
    )
    profile = ("--profile-steps", "1", "--profile-ranks", "2", "--traces", str(tmp_path))
    options = (*OPTIONS[:3], "--json", *sizes, *plans, *more, *written, *profile, *MESH)
    (_, text), *_ = launch(as_rank, options, ranks=4)
    values = result(text)
    assert values["check_loss"] < 1e-13 and values["check_weights"] < 1e-12
    start, *steps = read_json_lines(tmp_path / "run.jsonl")
    assert start["mesh"] == {"replicate": 1, "shard": 2, "tp": 2} and start["peak_flops"] == 1e12
    assert [line["step"] for line in steps] == [0, 1, 2] and all("mfu" in line for line in steps)
    assert steps[-1]["loss"] == values["loss"]
    assert ["exposed_seconds" in line for line in steps] == [False, True, False]
    assert min(steps[1]["exposed_seconds"][axis] for axis in ("shard", "tp")) > 0
    events = json.loads((tmp_path / "steps-1-1-rank-00002.json").read_text())["traceEvents"]
    assert "step 1" in {event.get("name") for event in events}


@pytest.mark.full
def test_four_ranks_by_torchrun() -> None:
    run = train(*OPTIONS, *MESH, torchrun=4)
    assert run.returncode == 0, run.stdout + run.stderr
    check_screen(run.stdout, 4)


@pytest.mark.slow
def test_bad_arguments() -> None:
    run = train("--batch", "3", "--tp", "2")
    assert run.returncode != 0 and "tp" in run.stderr and "Traceback" not in run.stderr
    run = train("--batch", "6", "--micro-batch", "4")
    assert run.returncode != 0 and "the next below that does: 3" in run.stderr
