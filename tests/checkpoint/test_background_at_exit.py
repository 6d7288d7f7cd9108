"""A save in the background that failed and that nobody has asked about is told of when Python ends.

And the process ends with an error, as nobody else would notice.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from parallel3d.checkpoint import save

SCRIPT = """
import os, sys, time
from torch import nn
from parallel3d.checkpoint import save

def full(*args):
    time.sleep(0.3)  # the main thread has ended by then
    raise OSError(28, "No space left on device")

model = nn.Linear(2, 2)
os.write = full
open(sys.argv[1] + ".txt", "w").write("kept")
future = save(sys.argv[1], model, step=1, async_=True)
if sys.argv[2] == "asked":
    assert future.exception() is not None
if sys.argv[2] == "saved again":
    try:
        save(sys.argv[1], model, step=2)
    except ValueError:
        pass
"""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("not asked", marks=pytest.mark.slow),
        pytest.param("asked", marks=pytest.mark.slow),
        pytest.param("saved again", marks=pytest.mark.full),
    ],
)
def test_it_is_told_once(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), kind],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode == 0) == (kind != "not asked"), done.stderr
    assert (tmp_path / "run.txt").read_text() == "kept"  # Python has ended as it does
    told = "nobody has asked for its result" in done.stderr
    assert told == (kind == "not asked"), done.stderr
    assert ("No space left on device" in done.stderr) == told


def in_a_worker(path: str) -> None:
    def full(*args: object) -> int:
        time.sleep(0.3)
        raise OSError(28, "No space left on device")

    os.write = full  # type: ignore[assignment]
    save(path, torch.nn.Linear(2, 2), step=1, async_=True)


def test_in_a_process_of_multiprocessing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Which runs no exit handlers, and has its own idea of an exit code."""
    process = multiprocessing.get_context("fork").Process(target=in_a_worker, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert "nobody has asked for its result" in capfd.readouterr().err
