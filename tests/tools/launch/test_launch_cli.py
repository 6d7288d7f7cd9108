"""``parallel3d launch`` as it is typed, and a file of it that really runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from _support.tools.launch_jobs import ODD

pytest.importorskip("typer")
pytest.importorskip("rich")
from typer.testing import CliRunner

from parallel3d.tools.cli.app import app
from parallel3d.tools.launch.local import example, examples_folder

GLOO = """\
import os, sys
import torch
from torch import distributed as dist
import parallel3d as p3d
mesh = p3d.build_mesh(p3d.MeshLayout(shard=-1, tp=int(sys.argv[-1])), device_type="cpu")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print("total", total.item(), "mesh", tuple(mesh.shape), os.environ["NOTE"], ascii(sys.argv[1:-6]))
dist.destroy_process_group()
"""


def launch(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    found = CliRunner().invoke(app, ["launch", *words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


def test_the_help_lists_all_commands_and_explains_each() -> None:
    """``run`` and ``demo`` too, which need no typer and are handled before it."""
    listed = CliRunner().invoke(app, ["--help"]).stdout
    for command in ("plan", "dryrun", "audit", "doctor", "launch", "run", "demo"):
        assert f" {command} " in listed
    run, demo = (CliRunner().invoke(app, [name, "--help"]).stdout for name in ("run", "demo"))
    assert "--nproc-per-node 8 train.py" in run and "(2, 2, 2) mesh of eight" in demo


def test_an_example_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As README and the docs name it; a file of that name in the current folder goes before."""
    monkeypatch.chdir(tmp_path)
    assert Path(example("examples/llama/train.py")) == examples_folder() / "llama" / "train.py"
    for other in ("train.py", "examples/none.py", "examples/", "--lr"):
        assert example(other) == other
    (tmp_path / "examples" / "llama").mkdir(parents=True)
    (tmp_path / "examples" / "llama" / "train.py").touch()
    assert example("examples/llama/train.py") == "examples/llama/train.py"


def test_prints_or_writes(tmp_path: Path) -> None:
    options = ("--to", "slurm", "--nodes", "4", "--tp", "4", "--name", "big", "--env", "A=b=c")
    code, text, _ = launch(*options, "--", "train.py", "--lr", "1", "--env", "X")
    assert code == 0 and "mesh replicate 1 x shard 8 x tp 4 = 32 ranks" in text
    assert "export A=b=c" in text and "--env X" in text
    without_dashes = launch(*options, "train.py", "--lr", "1", "--env", "X")
    assert without_dashes[1] == text
    code, nothing, said = launch(*options, "--out", f"{tmp_path}/new/", "train.py")
    file = tmp_path / "new" / "big.sbatch"
    assert code == 0 and not nothing and f"sbatch {file}" in said
    assert os.access(file, os.X_OK) and file.read_text().startswith("#!/bin/bash\n# Written by")
    assert (
        launch(*options, "--out", str(file), "other.py")[0] == 0 and "other.py" in file.read_text()
    )


def test_what_is_missing_is_said() -> None:
    slurm = ("--to", "slurm", "--nodes", "2")
    code, text, said = launch(*slurm, "train.py")
    assert code == 0 and text.startswith("#!") and len(said.splitlines()) == 3
    for words in ("no --time: ", "no --checkpoint FOLDER among", "no --setup: nodes use"):
        assert words in said
    full = ("--time", "90", "--setup", "module load cuda", "--setup", "source v/bin/activate")
    code, text, said = launch(*slurm, *full, "--", "train.py", "--checkpoint=/run")
    assert code == 0 and not said and "#SBATCH --time=90\n" in text
    assert "module load cuda\nsource v/bin/activate\n" in text
    assert "--time" not in launch(*slurm, "--grace", "0", "train.py")[2]
    assert not launch("train.py")[2]
    assert "at step 0" in launch("--max-restarts", "1", "train.py")[2]
    assert "no --image: " in launch("--to", "kubeflow", "train.py")[2]
    assert "no --setup: " in launch("--to", "skypilot", "--gpu", "H100", "train.py")[2]


def test_keeps_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("mine")
    code, _, said = launch("--out", str(tmp_path), "train.py")
    assert (
        code == 2 and "is there already" in said and "mine" in (tmp_path / "train.sh").read_text()
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "slrum", "train.py"), "did you mean slurm"),
        (("--tp", "3", "train.py"), "Nearest that fit"),
        (("--tp", "16", "--nodes", "2", "train.py"), "nearest that fits is tp 8"),
        (("--env", "A", "train.py"), "give NAME=VALUE"),
        ((), "such as train.py"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], says: str) -> None:
    code, text, said = launch(*words)
    assert code == 2 and not text and says in said and said.count("\n") == 1


@pytest.mark.slow  # torch is imported by three processes; test_launch_files reads the file
@pytest.mark.xdist_group("gloo")
def test_torchrun_file_trains(tmp_path: Path) -> None:
    """Written, then started by bash: real processes, the mesh of the options, odd words and all."""
    script = tmp_path / "it's a script.py"
    script.write_text(GLOO)
    words = [word for word in ODD if word.isascii() and "\n" not in word]
    mesh = ("--gpus-per-node", "2", "--device", "cpu", "--tp", "2")
    code, _, said = launch(
        *mesh, "--env", "NOTE=$(hi) 'x'", "--out", str(tmp_path), "--", str(script), *words
    )
    assert code == 0, said
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "train.sh"],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    expected = f"total 3 mesh (1, 1, 2) $(hi) 'x' {words!a}"
    lines = done.stdout.splitlines()
    assert sorted(lines) == [f"[default{rank}]:{expected}" for rank in (0, 1)]
    assert not (tmp_path / "oops").exists()
