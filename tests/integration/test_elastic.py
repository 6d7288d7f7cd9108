"""examples/llama/train.py goes on where it was: after kills and signals, on other numbers of processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _support.kill.at_random import AT_TORCHRUN, OTHERS, SAME, Job, Killer
from _support.kill.supervisor import Ending, Kill, run_ranks
from _support.kill.verify import Record, different_end, different_steps, wrong_samples

from parallel3d.observability import read_json_lines

EXAMPLES = Path(__file__).parents[2] / "examples" / "llama"
pytestmark = pytest.mark.xdist_group("gloo")  # not beside the pool


class Run:
    """One run's folder; each call is a start of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "text"
        self.data.write_bytes((EXAMPLES / "train.py").read_bytes()[:8000])

    def options(self, *more: str) -> list[str]:
        files = {
            "--checkpoint": "run",
            "--step-log": "log",
            "--data": "text",
            "--metrics": "metrics",
        }
        paths = [part for k, v in files.items() for part in (k, str(self.folder / v))]
        return ["--size", "nano", "--save-every", "3", *paths, *more]

    def start(self, *more: str, world: int = 1, kill: Kill | None = None) -> Ending:
        return run_ranks(self.options(*more), world, kill, self.folder / "output", limit=120)

    def stopped(self, step: int) -> str:
        """What is said at the end of a run that a signal stops."""
        return f"stopped after step {step}; saved {step} in {self.folder / 'run'}; to go on: "

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def record(self) -> Record:
        return Record.read(self.folder / "log")

    @property
    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "run").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


SIX = ("--steps", "6", "--batch", "24")


@pytest.mark.full  # the tests of several hosts kill and resume, too
def test_killed_on_the_same_processes(tmp_path: Path) -> None:
    killer = Killer(tmp_path, random.Random(1))
    killer.kill(Job("HSDP", ((2, 1, 1),), ("--save-every", "2", "--async-save", "--steps", "6")), 2)
    assert not killer.problems and killer.kills == 2 and not killer.forced


def metrics_of(run: Run) -> list[list[int]]:
    """The steps in the file of metrics, from each start on."""
    found: list[list[int]] = []
    for line in read_json_lines(run.folder / "metrics"):
        if line.get("event") == "start":
            found.append([])
        else:
            found[-1].append(line["step"])
    return found


@pytest.mark.slow
def test_goes_on_on_other_processes(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Four with tp, two, one: the samples are those of a run on one, and so are the losses."""
    whole = Run(tmp_path_factory.mktemp("whole"))
    assert not whole.start(*SIX, "--double").failed
    for world, tp in ((4, "2"), (2, "1"), (1, "1")):
        stop: Kill = {"rank": 0, "moment": "optimizer", "call": 2, "signal": "SIGTERM"}
        assert not run.start(*SIX, "--double", "--tp", tp, world=world, kill=stop).failed, (
            run.output
        )
    assert [start.step for start in run.record.starts] == [0, 2, 4]
    assert metrics_of(run) == [[0, 1], [2, 3], [4, 5]]
    assert not different_steps(whole.record, run.record, 1e-12)[0]
    assert not different_end(whole.record, run.record, 1e-12)
    assert not wrong_samples(run.record, run.data, 24)


@pytest.mark.parametrize("rank", [1, pytest.param("all", marks=pytest.mark.full)])
def test_sigterm(run: Run, rank: int | str) -> None:
    """To one rank or all: a last checkpoint, and all end with 0; the same command goes on."""
    kill: Kill = {"rank": rank, "moment": "optimizer", "call": 2, "signal": "SIGTERM"}
    mesh = ("--shard", "2", "--async-save")
    assert not run.start(*SIX, *mesh, world=2, kill=kill).failed, run.output
    assert run.saved == ["step-00000002"] and run.stopped(2) in run.output
    assert not run.start(*SIX, *mesh, world=2).failed, run.output
    assert f"continues {run.folder / 'run' / 'step-00000002'}: 2 steps, 48 samples" in run.output
    assert list(run.record.kept()) == list(range(6)) and run.record.starts[1].step == 2
    assert not wrong_samples(run.record, run.data, 24)


@pytest.mark.slow
def test_starts_again(run: Run) -> None:
    """Damaged, another batch, done, another run's."""
    assert not run.start(*SIX).failed, run.output
    whole = run.record
    newest = run.folder / "run" / "step-00000006" / "rank-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert not run.start(*SIX).failed
    assert "not the newest" in run.output and run.record.starts[1].step == 3
    assert not different_steps(whole, run.record, 0)[0]
    assert not different_end(whole, run.record, 0)

    assert not run.start("--steps", "8", "--batch", "10").failed
    assert [line["samples"] for line in run.record.kept().values()][6:] == [[144, 153], [154, 163]]

    assert not run.start("--steps", "8").failed
    assert "nothing to do: all 8 steps are done" in run.output

    for more, why in {
        ("--seed", "1"): "a run with --seed 0; this one has 1",
        ("--lr", "0.1"): "a run with --lr 0.002; this one has 0.1",
        ("--data", str(EXAMPLES / "llama.py")): "a run with --data",
        ("--size", "tiny"): "tok_embeddings.weight is float32 of shape (256, 64) in",
    }.items():
        assert run.start("--steps", "9", *more).failed
        assert why in run.output.splitlines()[-1]
    assert run.saved[-1] == "step-00000008"


@pytest.mark.full
def test_thirty_kills(tmp_path: Path) -> None:
    """What tests/_support/kill/at_random.py does."""
    killer = Killer(tmp_path, random.Random(0))
    for job in SAME:
        killer.kill(job, 10)
    for job in OTHERS:
        killer.kill(job, 8)
    killer.by_torchrun(SAME[0], AT_TORCHRUN)
    assert not killer.problems and killer.kills == 49 and not killer.forced


def torchrun(run: Run, *options: str, ranks: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *options, str(EXAMPLES / "train.py")]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    with (run.folder / "output").open("a") as file:
        return subprocess.Popen(
            [*command, *run.options("--steps", "100000", "--batch", "8")],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_torchrun(run: Run, number: signal.Signals) -> None:
    """It passes it on to its workers, who save and end."""
    more = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    job = torchrun(run, *more, "--max-restarts", "2", ranks=2)
    deadline = time.monotonic() + 120
    while not run.record.starts or len(run.record.starts[0].steps) < 5:
        assert job.poll() is None and time.monotonic() < deadline, run.output
        time.sleep(0.2)
    job.send_signal(number)
    job.wait(60)
    record = run.record
    assert record.end and len(record.starts) == 1, run.output
    assert (
        run.saved[-1] == f"step-{record.end['step']:08d}"
        and run.stopped(record.end["step"]) in run.output
    )
    info = json.loads((run.folder / "run" / run.saved[-1] / "checkpoint.json").read_text())
    assert info["step"] == record.end["step"]
