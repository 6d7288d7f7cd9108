"""What plan, predict and calibrate print fits into a terminal: no line is longer, no word is cut."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from parallel3d.observability.sinks import JsonLines
from parallel3d.tools.cli.app import app

pytestmark = pytest.mark.ci

LLAMA = "--model llama-3.1-8b --gpu h100 --nodes 4"
SCREENS = {
    "plan": f"plan {LLAMA} --seq-len 8192 --explain",
    "plan over cp": f"plan {LLAMA} --seq-len 131072",
    "plan with ep": "plan --model mixtral-8x7b --gpu a100-80gb-sxm --nodes 4 --ep 8 --ep 1",
    "LoRA": f"plan {LLAMA} --seq-len 8192 --lora rank=16,targets=q+v --checkpointing full",
    "nothing fits": "plan --model llama-3.1-405b --gpu a100-40gb-sxm --seq-len 8192",
    "predict": f"predict {LLAMA} --seq-len 8192 --shard 16 --tp 2 --explain",
    "refused": f"predict {LLAMA} --seq-len 8192 --tp 32 --checkpointing offload",
    "plan's help": "plan --help",
    "predict's help": "predict --help",
    "calibrate's help": "calibrate --help",
    "calibrate": "calibrate --device cpu --seconds 0.2 --largest 512 --out {folder}/profile.toml",
    "calibrate from a run": "calibrate --run {folder}/log.jsonl --out {folder}/own.toml --name mine "
    "--model llama-3.1-8b --gpu h100 --seq-len 2048",
    "mistakes": "predict --nodes x --tp y --unknown",
    "mistakes in what a workload is": f"plan {LLAMA} --optimizer x --precision y --stack z",
    "nothing given": "plan",
}
MISTAKES = ("nothing fits", "mistakes", "mistakes in what a workload is", "nothing given")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("screens")
    sink = JsonLines(made / "log.jsonl")
    sink.start({"mesh": {"replicate": 1, "shard": 32, "tp": 1}, "tokens_per_step": 32 * 2048})
    for number in range(8):
        sink.write({"step": number, "step_seconds": 9.0})
    sink.close()
    return made


def printed(name: str, folder: Path, columns: int) -> str:
    words = SCREENS[name].format(folder=folder).split()
    as_terminal = {"COLUMNS": str(columns), "FORCE_COLOR": "1", "TERM": "xterm"}
    result = CliRunner(env=as_terminal).invoke(app, words)
    assert result.exit_code == (2 if name in MISTAKES else 0), result.output
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.output)
    return re.sub(r"[\u2800-\u28ff] [^\r\n]*? \d:\d\d:\d\d", "", text)  # how long it has been busy


def words_of(text: str) -> set[str]:
    """Words without the lines and bars of tables."""
    return {word.strip(",;") for word in text.split() if re.search(r"\w", word)}


@pytest.mark.parametrize("columns", [80, 60, 120])
@pytest.mark.parametrize("name", SCREENS)
def test_no_word_is_cut_and_no_line_is_longer(name: str, columns: int, folder: Path) -> None:
    """A cut word is none of the words that are there on a terminal of any width."""
    text = printed(name, folder, columns)
    whole = words_of(printed(name, folder, 10_000))
    for line in text.splitlines():
        alone = len(line.split()) == 1 and ("/" in line or columns < 80)  # such as a path
        assert len(line.rstrip()) <= columns or alone, line
    if name != "calibrate":  # whose numbers are measured anew
        assert words_of(text) <= whole
    assert "\N{HORIZONTAL ELLIPSIS}\n" not in text.replace(" \N{HORIZONTAL ELLIPSIS}\n", "\n")


def test_columns_are_left_out_before_rows_are_broken(folder: Path) -> None:
    heads = {}
    for columns in (60, 80, 130):
        text = printed("plan", folder, columns)
        heads[columns] = next(line for line in text.splitlines() if "tokens/s/GPU" in line)
    assert "activations" in heads[130] and "activations" not in heads[80]
    assert "MFU" in heads[80] and "MFU" not in heads[60]
    for head in heads.values():
        assert "layout " in head and "checkpointing " in head and "micro-batch" in head


def test_in_a_pipe_it_is_as_wide_as_a_terminal_of_80_columns() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    command = [sys.executable, "-m", "parallel3d", *SCREENS["predict"].split()]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert max(map(len, map(str.rstrip, done.stdout.splitlines()))) <= 80


def test_what_must_fit_and_its_bound_count_the_same(folder: Path) -> None:
    """On the screen and in JSON every figure has the parts that it is the sum of."""
    text = printed("predict", folder, 80)
    words = SCREENS["predict"].split()[:-1]
    memory = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    start = text.index("reserved by torch")
    table = text[start : text.index("8 of 10 runs", start)]
    rows = dict(re.findall(r"^(allocated|fragmentation|workspace|context|all) +(.*)$", table, re.M))
    shown = {name: [float(each) for each in cells.split()] for name, cells in rows.items()}
    assert len(shown["context"]) == 2  # torch reserves none of it
    parts = ("allocated", "fragmentation", "workspace", "context")
    for place, name in enumerate(("needed", "upper_needed")):
        counts = memory["counts_gib"][name]
        assert sum(counts.values()) == pytest.approx(memory[f"{name}_gib"])
        assert list(counts) == list(parts)
        assert [shown[part][-1 if place else 0] for part in parts] == pytest.approx(
            list(counts.values()), abs=1e-3
        )
    assert sum(memory["counts_gib"]["reserved"].values()) == pytest.approx(memory["reserved_gib"])
    assert "context" not in memory["counts_gib"]["reserved"]
    assert memory["needed_gib"] < memory["upper_needed_gib"]
