"""``check.py`` on a CPU: all parts run, a wrong engine is seen, and a hang ends with its stack."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.slow


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """The script's exit code, and the parts of its JSON by name."""
    command = [sys.executable, str(HERE / "check.py"), "--device", "cpu", "--small"]
    command += ["--out", str(folder / "out"), *arguments]
    done = subprocess.run(
        command,
        env=os.environ | variables,
        cwd=folder,
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (folder / "out.json").exists(), done.stdout + done.stderr
    found = json.loads((folder / "out.json").read_text())
    assert (folder / "out.md").read_text().startswith("# On a CPU")
    return done.returncode, {part["name"]: part for part in found["parts"]}


def test_one_process_and_the_races(tmp_path: Path) -> None:
    code, parts = run(tmp_path, "--worlds", "1")
    assert [each for part in parts.values() for each in part["failed"]] == []
    assert code == 0
    assert len(parts["truth"]["rows"]) >= 10
    assert {row[-1] for row in parts["truth"]["rows"]} == {"ok"}
    assert {row[-1] for row in parts["races"]["rows"]} == {"ok", "control", "control seen"}


@pytest.mark.full
def test_all_parts(tmp_path: Path) -> None:
    code, parts = run(tmp_path)
    assert list(parts) == ["truth", "races"]
    assert [each for part in parts.values() for each in part["failed"]] == []
    assert code == 0
    assert len(parts["truth"]["rows"]) > 40
    assert {row[-1] for row in parts["truth"]["rows"]} == {"ok"}
    assert {row[0] for row in parts["truth"]["rows"]} == {
        *("(1, 1, 1)", "(1, 2, 1)", "(2, 1, 1)", "(2, 2, 1)", "(1, 1, 2)", "(1, 2, 2)")
    }
    assert {row[-1] for row in parts["races"]["rows"]} == {"ok", "control", "control seen"}


def test_a_wrong_engine_is_seen(tmp_path: Path) -> None:
    fault = {"PARALLEL3D_GPU_TESTS_FAULT": "scaled_gradient"}
    code, parts = run(tmp_path, "--only", "truth", "--worlds", "1", **fault)
    assert code == 1
    # Loss and gradients of the checkpoint's mesh, too: each case sees it.
    wrong = {row[1] for row in parts["truth"]["rows"] if row[-1] == "FAILED"}
    assert wrong >= {"fp64", "fp32", "offload", "accumulate", "checkpoint"}
    assert any("grads differ from the plain model's by 0.01" in f for f in parts["truth"]["failed"])


def hang(here: Any, argument: str) -> str:
    """A case: of two ranks one does not come."""
    from torch import distributed as dist

    if argument == "hangs" and here.rank == 1:
        time.sleep(600)
    if argument == "raises" and here.rank == 0:
        raise ValueError("on purpose")
    dist.barrier()
    return argument


def test_a_hang_ends_with_its_stack(tmp_path: Path) -> None:
    from ranks import run_cases

    names = ["first", "hangs", "second", "raises", "third"]
    outcome = run_cases(
        hang,
        [(name, name) for name in names],
        world=2,
        device_type="cpu",
        backend="gloo",
        folder=tmp_path,
        limit=4.0,
        deadline=time.monotonic() + 120,
    )
    assert outcome.results == {name: [name, name] for name in ("first", "second", "third")}
    assert set(outcome.failed) == {"hangs", "raises"}
    assert "rank 1 hangs in hangs" in outcome.failed["hangs"]
    assert "test_runs_on_cpu.py" in outcome.failed["hangs"]
    assert "ValueError: on purpose" in outcome.failed["raises"]


def test_one_process_goes_on_after_an_error(tmp_path: Path) -> None:
    from ranks import run_cases

    outcome = run_cases(
        alone,
        [("raises", "raises"), ("after", "after")],
        world=1,
        device_type="cpu",
        backend="",
        folder=tmp_path,
        limit=20.0,
        deadline=time.monotonic() + 60,
    )
    assert "ValueError: on purpose" in outcome.failed["raises"]
    (after,) = outcome.results["after"]
    assert after == ["raises", "after"]  # in the same process


_run: list[str] = []


def alone(here: Any, argument: str) -> list[str]:
    """A case of one process: the cases that have run in it."""
    _run.append(argument)
    if argument == "raises":
        raise ValueError("on purpose")
    return _run
