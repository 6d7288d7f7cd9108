"""What train.py's runs say where files are not what they need."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from options import parse
from run import Run
from step_log import StepLog

import parallel3d as p3d
from parallel3d._util.dry_run import running
from parallel3d.testing import fake_world


def test_the_help_has_headings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("Trains.", ["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: [torchrun --nproc-per-node RANKS] ") and "[--tp" not in said
    under = said.partition("\ncheckpoints:\n")[2].partition("\n\n")[0]
    assert "--save-every" in under and "--tp" not in under
    assert said.count(":\n  --") == 6


def test_a_checkpoint_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(path=tmp_path / "step-00000001", extra={"epoch": 1})
    monkeypatch.setattr(p3d.checkpoint, "latest", lambda folder: info.path)
    monkeypatch.setattr(p3d.checkpoint, "load", lambda *args: info)
    run = Run(tmp_path, {"--seed": 0}, every=1, keep=1, background=False)
    nothing: Any = None
    with pytest.raises(p3d.CheckpointError, match="a run with --seed None; this one has 0"):
        run.resume(nothing, nothing, nothing)


def test_the_step_logs_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.jsonl"
    with fake_world(0, 2):
        StepLog(path, p3d.MeshLayout(1, 2, 1), torch.device("cpu")).start(3, 12)
    assert path.read_text().startswith('{"event": "start", "step": 3')


def test_a_dry_run_leaves_the_step_log_alone(tmp_path: Path) -> None:
    with fake_world(0, 2), running(None, nullcontext):
        log = StepLog(tmp_path / "steps.jsonl", p3d.MeshLayout(1, 2, 1), torch.device("cpu"))
        log.start(0, 0)
    assert not list(tmp_path.iterdir())
