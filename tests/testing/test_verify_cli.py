"""parallel3d audit --relation plain: exit codes, what it prints, and its documentation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from _support.testing import verify_cases
from _support.testing.verify_models import ids
from _support.testing.write_verify_docs import DOCS, run_example, written
from click.testing import Result
from typer.testing import CliRunner

from parallel3d import MeshLayout
from parallel3d.testing import first_difference
from parallel3d.tools.cli.app import app

INPUT = "--input verify_models:ids"


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(verify_cases.__file__).parent  # whose models the commands name
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])


def run(words: str) -> Result:
    words = f"audit --relation plain {words}"
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, words.split())


def said(words: str, exit_code: int = 0) -> dict[str, Any]:
    """What it prints as JSON."""
    result = run(f"{words} --json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def numbers_masked(text: str) -> str:
    return re.sub(r"\d\.\de[+-]\d\d", "N", text)


@pytest.mark.slow
def test_docs_show_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output, and the table of faults; roundings may be others on other machines."""
    monkeypatch.chdir(tmp_path)
    text = DOCS.read_text()
    shown = {plan: run_example(tmp_path, text, plan) for plan in ("PLAN", "WRONG")}
    assert numbers_masked(written(text, shown)) == numbers_masked(text)


@pytest.mark.slow
def test_json_of_equal_models() -> None:
    data = said(f"--tp 2 verify_models:Decoder {INPUT} --plan verify_models:PLAN")
    assert data["equal"] and data["difference"] is None
    assert data["layout"] == {"replicate": 1, "shard": 1, "tp": 2}
    assert 0 <= data["largest"]["gradients"]["float64"] < 1e-12


def test_cp() -> None:
    """Each cp rank has its part of the tokens, by a function of the user's."""
    data = said(
        "_support.cp_axis:build --cp 2 --input _support.cp_axis:batch --loss _support.cp_axis:loss "
        "--shard-batch _support.cp_axis:shard_batch"
    )
    assert data["equal"] and data["layout"] == {"replicate": 1, "shard": 1, "cp": 2, "tp": 1}
    assert 0 < data["largest"]["gradients"]["float64"] < 1e-12


def test_cp_of_what_parallelize_made() -> None:
    """Each cp rank has its part of the tokens, by ``p3d.cp.shard_batch``, and keeps what costs most."""
    assert said(
        "_support.cp.models:Lm --cp 2 --input _support.cp.models:samples --loss _support.cp.models:lm_loss "
        "--activation-checkpointing selective"
    )["equal"]


def test_json_of_a_difference() -> None:
    """A function of the user's that makes the model parallel, and forgets a bias."""
    data = said(f"--tp 2 verify_cases:build {INPUT} --parallelize verify_cases:forgets", 1)
    found = data["difference"]
    assert (found["module"], found["kind"]) == ("layers.0.mlp.down", "output")
    assert found["difference"] > found["bound"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere:model", "importing 'nowhere' raised ModuleNotFoundError"),
        ("verify_cases", "must be package.module:name"),
        ("verify_cases:biuld", "the nearest: build"),
        ("verify_models:PLAN", "is a dict, which can't be called"),
        ("verify_cases:fails", "building the model raised RuntimeError: no such size"),
        ("verify_cases:number", "is a int, no nn.Module"),
        ("verify_cases:build --input verify_cases:number", "a tensor, a tuple of tensors"),
        ("verify_cases:build --tp 0", "--tp 0: a mesh axis has at least 1 rank"),
        ("verify_cases:build --cp -1", "--cp -1: a mesh axis has at least 1 rank"),
        ("verify_cases:build --tp 2 --plan verify_models:VOCAB", "a dict of"),
        ("verify_cases:build --tp 2 --plan verify_cases:WRONG", "matches no"),
        ("verify_cases:build --tolerance 2", "between 0 and 1"),
        ("verify_cases:build --steps 0", "at least 1"),
        ("verify_cases:build --loss verify_cases:vector", "a scalar tensor"),
        ("verify_cases:build --parallelize verify_cases:nothing", "no nn.Module"),
        (
            "verify_cases:build --plan auto --parallelize verify_cases:forgets",
            "leave it out with --parallelize",
        ),
    ],
)
def test_mistakes_are_one_line(words: str, message: str) -> None:
    result = run(words if "--input" in words else f"{words} {INPUT}")
    assert result.exit_code == 2, result.output
    assert message in result.stderr and result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1 and not result.stdout


def on_a_rank() -> tuple[str, str]:
    found = first_difference(
        verify_cases.build, ids, MeshLayout(1, 1, 2), apply=verify_cases.forgets
    )
    assert found is not None
    return found.module, found.kind


def test_on_real_ranks(gloo_pool) -> None:
    """All of them say the same."""
    assert gloo_pool.run(on_a_rank, world_size=2) == [("layers.0.mlp.down", "output")] * 2


@pytest.mark.full
def test_under_torchrun(tmp_path: Path) -> None:
    """Two gloo processes under torchrun; the file is in the current directory."""
    source = Path(verify_cases.__file__)
    (tmp_path / "mine.py").write_text(source.read_text())
    words = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m parallel3d audit --relation plain "
        "--tp 2 mine:build --input mine:batch --parallelize mine:forgets --json"
    )
    done = subprocess.run(
        [sys.executable, *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["difference"]
    assert (found["module"], found["kind"]) == ("layers.0.mlp.down", "output"), done.stdout
