"""``parallel3d run`` and ``demo``: which processes start, and a line where torchrun has a traceback."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from parallel3d.tools.launch import local

CHECKED = ["--steps", "60", "--check"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be started: arguments of torchrun."""
    found: list[list[str]] = []
    monkeypatch.setattr(local, "run", lambda arguments: found.append(list(arguments)) or 0)
    return found


def mesh(replicate: int, shard: int, tp: int) -> list[str]:
    return ["--replicate", str(replicate), "--shard", str(shard), "--tp", str(tp)]


@pytest.mark.parametrize(
    ("words", "ranks", "options"),
    [
        ([], 8, [*mesh(2, 2, 2), *CHECKED]),
        (["--tp", "4"], 4, [*mesh(1, 1, 4), *CHECKED]),
        (["--tp=4"], 4, [*mesh(1, 1, 4), *CHECKED]),
        (["--shard", "3", "--replicate=2"], 6, [*mesh(2, 3, 1), *CHECKED]),
        (["--seed", "1", "--shard", "2"], 2, [*mesh(1, 2, 1), *CHECKED, "--seed", "1"]),
        (["--check", "--steps", "5"], 8, [*mesh(2, 2, 2), "--check", "--steps", "5"]),
        (["--help"], 8, [*mesh(2, 2, 2), "--help"]),
    ],
    ids=str,
)
def test_processes_and_options(
    started: list[list[str]], words: list[str], ranks: int, options: list[str]
) -> None:
    assert local.demo(words) == 0
    ((_, number, program, *given),) = started
    assert (number, given) == (str(ranks), options)
    assert (
        Path(program) == local.examples_folder() / "llama" / "train.py" and Path(program).is_file()
    )


@pytest.mark.parametrize(
    ("count", "words", "said", "device"),
    [
        (0, [], "", None),
        (1, [], ", on the CPU, as it has 1 GPU", "cpu"),
        (2, ["--shard", "4"], ", on the CPU, as it has 2 GPUs", "cpu"),
        (2, ["--shard", "2"], "", None),
        (8, [], "", None),
        (1, ["--shard", "1"], "", None),
    ],
)
def test_fewer_gpus_than_processes(
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    count: int,
    words: list[str],
    said: str,
    device: str | None,
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    with mock.patch.dict(os.environ):
        os.environ.pop("PARALLEL3D_DEVICE", None)
        assert local.demo(words) == 0 and len(started) == 1
        assert os.environ.get("PARALLEL3D_DEVICE") == device
        (line,) = capsys.readouterr().out.splitlines()
        assert line.endswith(f"on this machine{said}")
        os.environ["PARALLEL3D_DEVICE"] = "cuda"  # the user's choice stays
        assert local.demo(words) == 0 and os.environ["PARALLEL3D_DEVICE"] == "cuda"


@pytest.mark.parametrize("words", [["--tp", "0"], ["--tp", "-1"], ["--tp", "two"], ["--tp=1.5"]])
def test_a_size_that_is_none(
    started: list[list[str]], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert local.demo(words) == 2 and not started
    value = words[-1].removeprefix("--tp=")
    said = f"parallel3d demo: --tp {value}: give a number from 1 on\n"
    assert capsys.readouterr() == ("", said)


def test_a_size_that_is_missing(
    started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        local.demo(["--steps", "5", "--tp"])
    assert not started and "argument --tp: expected one argument" in capsys.readouterr().err


def test_examples_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "__file__", str(tmp_path / "parallel3d" / "tools" / "launch" / "x"))
    with pytest.raises(
        FileNotFoundError, match=r"no llama/train\.py in .*: install the package anew"
    ):
        local.examples_folder()


# ---- real processes, not beside the pool ----


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


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("code", "line"), [(0, ""), (2, ""), (7, "rank 0 ended first, with exit code 7\n")]
)
def test_run_ends_in_a_line(code: int, line: str, tmp_path: Path) -> None:
    """A mistake in an option, exit code 2, has been said by the program."""
    program = "import os, sys\nprint('rank', os.environ['RANK'])\nsys.exit(int(sys.argv[1]))\n"
    (tmp_path / "program.py").write_text(program)
    done = parallel3d("run", "--nproc-per-node", "1", "program.py", str(code), folder=tmp_path)
    assert (done.returncode, done.stdout) == (code, "rank 0\n")
    assert done.stderr == (line and f"parallel3d run: {line}")


@pytest.mark.slow
@pytest.mark.xdist_group("gloo")
def test_demo_trains_and_compares(tmp_path: Path) -> None:
    """On two ranks and few steps here; eight and 60 steps without options."""
    words = ("--shard", "2", "--size", "nano", "--steps", "2", "--batch", "4", "--check")
    done = parallel3d("demo", *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("starting 2 processes")
    assert "equal to the plain model" in done.stdout
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.xdist_group("gloo")
def test_demo_refuses_a_mesh_that_is_none(tmp_path: Path) -> None:
    done = parallel3d("demo", "--tp", "two", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "parallel3d demo: --tp two: give a number from 1 on\n"
