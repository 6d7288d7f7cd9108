"""``parallel3d run``: Ctrl-C and a mistake of the user end it with a line and an exit code, no traceback."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "examples" / "llama" / "train.py"
SOON = 10  # seconds
ENDLESS = ("--size", "nano", "--batch", "8", "--steps", "1000000", "--shard", "2")
STUCK = """
import signal, sys, time
from parallel3d.checkpoint import StopSignal

with StopSignal():
    print("within a step", flush=True)
    time.sleep(120)
"""
pytestmark = pytest.mark.xdist_group("gloo")  # not beside the pool


class Job:
    """``parallel3d run`` on two processes, the leader of a process group as in a shell, by the command
    ``python``, which is Python itself unless ``forked``."""

    def __init__(self, folder: Path, python: list[str], *program: str, forked: bool = True) -> None:
        self.output = folder / "output"
        words = ["-m", "parallel3d", "run", "--nproc-per-node", "2"]
        command = [*python, *words, *(["--no-python", *python] if forked else []), *program]
        hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={k: v for k, v in os.environ.items() if k not in hidden},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    def until(self, text: str, times: int = 1, limit: float = 120) -> None:
        end = time.monotonic() + limit
        while self.said.count(text) < times:
            assert self.process.poll() is None and time.monotonic() < end, self.said
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends SIGINT to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ends(self, limit: float = SOON) -> int:
        return self.process.wait(limit)


def stops_and_saves(folder: Path, python: list[str], forked: bool) -> None:
    run = folder / "run"
    job = Job(folder, python, str(TRAIN), *ENDLESS, "--checkpoint", str(run), forked=forked)
    job.until("step    1/")
    job.interrupt()
    assert job.ends() == 128 + signal.SIGINT, job.said
    ((step, saved),) = re.findall(r"^stopped after step (\d+); saved (\d+) in ", job.said, re.M)
    assert step == saved and [path.name for path in run.iterdir()] == [f"step-{int(step):08d}"]
    assert job.said.splitlines()[-1].endswith(" ".join([*ENDLESS, "--checkpoint", str(run)]))
    assert "Traceback" not in job.said and "Signal" not in job.said


@pytest.mark.slow
def test_once_saves_and_ends(tmp_path: Path, python: list[str]) -> None:
    stops_and_saves(tmp_path, python, forked=True)


@pytest.mark.slow  # torch is imported by three processes
def test_once_saves_and_ends_as_a_user_starts_it(tmp_path: Path) -> None:
    stops_and_saves(tmp_path, [sys.executable], forked=False)


def check_twice(folder: Path, python: list[str], forked: bool) -> None:
    program = folder / "program.py"
    program.write_text(STUCK)
    job = Job(folder, python, str(program), forked=forked)
    job.until("within a step", times=2)
    job.interrupt()
    time.sleep(1)  # within half a second it would be the first one once more
    assert job.process.poll() is None, job.said
    job.interrupt()
    assert job.ends() == 128 + signal.SIGINT, job.said
    assert job.said.split() == ["within", "a", "step"] * 2


def test_twice_ends_at_once(tmp_path: Path, python: list[str]) -> None:
    """In the middle of a step that takes two minutes."""
    check_twice(tmp_path, python, forked=True)


@pytest.mark.slow
def test_twice_ends_at_once_as_a_user_starts_it(tmp_path: Path) -> None:
    check_twice(tmp_path, [sys.executable], forked=False)


def test_before_the_first_step_it_just_ends(tmp_path: Path, python: list[str]) -> None:
    """There is nothing to save while one rank waits for a peer."""
    alone = tmp_path / "alone.py"
    alone.write_text(
        "import os, runpy, sys, time\n"
        f"sys.path.insert(0, {str(TRAIN.parent)!r})\n"
        "from starting import announce\n"
        "announce()\n"
        "print('waits', flush=True)\n"
        "time.sleep(120)\n"
    )
    job = Job(tmp_path, python, str(alone))
    job.until("waits", times=2)
    job.interrupt()
    assert job.ends() == 128 + signal.SIGINT, job.said
    assert job.said.count("stopped before the first step") == 1 and "Traceback" not in job.said


def test_a_usage_error_is_said_once(tmp_path: Path, python: list[str]) -> None:
    job = Job(tmp_path, python, str(TRAIN), "--size", "nano", "--batch", "3")
    assert job.ends(60) == 2, job.said
    (line,) = [line for line in job.said.splitlines() if "error" in line]
    assert line.startswith("error: --batch 3 is not divisible by the 2 data ranks")
    assert line.endswith("the next that is: 4") and "Traceback" not in job.said
