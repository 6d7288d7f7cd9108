"""--stack, intervals in what predict and plan print, and calibrate --run."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from click.testing import Result
from typer.testing import CliRunner

from parallel3d.observability.sinks import JsonLines
from parallel3d.tools.cli.app import app

pytestmark = pytest.mark.ci

MODEL = ["--model", "layers=16,hidden=2048,heads=16,kv_heads=8,ffn=5504,vocab=32000"]
SETUP = [*MODEL, "--gpu", "a100-80gb-sxm", "--seq-len", "2048"]
PREDICT = ["predict", *SETUP, "--micro-batch", "2", "--json"]


def run(*words: str) -> Result:
    result = CliRunner(env={"COLUMNS": "130"}).invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result


def log(path: Path, seconds: float) -> None:
    """Eight steps of 8 GPUs, (1, 8, 1), 2 sequences of 2048 tokens each."""
    sink = JsonLines(path)
    sink.start({"mesh": {"replicate": 1, "shard": 8, "tp": 1}, "tokens_per_step": 8 * 2 * 2048})
    for number in range(8):
        sink.write({"step": number, "step_seconds": 9.0 if number < 3 else seconds})
    sink.close()


def test_predict_prints_how_sure_it_is() -> None:
    text = run(*PREDICT[:-1]).stdout
    assert re.search(r"tokens/s/GPU \([\d,]+ to [\d,]+ in 8 of 10 runs\)", text)
    assert re.search(r"fits in [\d.]+ GiB \(\d+% that it does; [\d.]+ to spare\)", text)
    assert "stack parallel3d; no published run has this stack" in text


def test_plan_prints_which_layouts_it_cannot_tell_apart() -> None:
    text = run("plan", *SETUP, "--global-batch", "64", "--checkpointing", "none").stdout
    found = re.search(r"The first (\d+) can't be told apart", text)
    assert found is not None and int(found[1]) > 1


def test_a_stack_by_its_name() -> None:
    data = json.loads(run(*PREDICT, "--stack", "fsdp1-2023").stdout)
    assert (data["stack"], data["familiarity"]) == ("fsdp1-2023", "known")
    wrong = CliRunner().invoke(app, [*PREDICT, "--stack", "fsdp1"])
    assert wrong.exit_code == 2
    assert "there is no stack 'fsdp1'; the nearest: fsdp1-2023" in wrong.output


def test_a_measured_run_brings_predictions_to_it(tmp_path: Path) -> None:
    before = json.loads(run(*PREDICT).stdout)
    log(tmp_path / "log.jsonl", 1.3 * before["step_seconds"])
    own = str(tmp_path / "own.toml")
    words = ["--micro-batch", "2", "--out", own, "--run", str(tmp_path / "log.jsonl")]
    text = " ".join(run("calibrate", *SETUP, *words).stdout.split())
    assert "gemm_sustained" in text
    assert "5 steps: measured" in text
    after = json.loads(run(*PREDICT, "--stack", own).stdout)
    assert after["step_seconds"] == pytest.approx(1.3 * before["step_seconds"], rel=0.06)
    assert after["familiarity"] == "measured"
    planned = run("plan", *SETUP, "--global-batch", "64", "--stack", own, "--json").stdout
    assert json.loads(planned)["best"]["stack"] == "calibrated"


@pytest.mark.parametrize(("times", "is_unlikely"), [(1.2, False), (60.0, True)])
def test_a_fit_to_another_run_is_said_to_be_unlikely(
    tmp_path: Path, times: float, is_unlikely: bool
) -> None:
    """A step that is 60 times as long is no slow GPU's: an option isn't the run's."""
    log(tmp_path / "log.jsonl", times * json.loads(run(*PREDICT).stdout)["step_seconds"])
    words = ["--micro-batch", "2", "--run", str(tmp_path / "log.jsonl")]
    text = run("calibrate", *SETUP, *words, "--out", str(tmp_path / "own.toml")).stdout
    assert ("unlikely: " in text) == is_unlikely


def test_a_log_that_does_not_go_with_the_options(tmp_path: Path) -> None:
    log(tmp_path / "log.jsonl", 1.0)
    words = [*MODEL, "--seq-len", "3000", "--run", str(tmp_path / "log.jsonl")]
    found = CliRunner().invoke(app, ["calibrate", *words, "--gpu", "a100"])
    assert found.exit_code == 2
    assert "32768 tokens a step are no multiple of --seq-len 3000" in found.output
    found = CliRunner().invoke(app, ["calibrate", *words])
    assert found.exit_code == 2
    assert "which GPU?" in found.output
