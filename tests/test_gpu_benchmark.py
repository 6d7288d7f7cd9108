"""benchmarks/gpu/run.py: every part runs without a GPU, on tiny models."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RUN = ROOT / "benchmarks" / "gpu" / "run.py"
PARTS = [
    *("host_time", "small_step", "allocator", "largest_batch", "copies"),
    *("overlap", "optimizer", "clip", "compile", "planner"),
]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.slow
def test_every_part_on_a_cpu(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "page"), "--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "page.json").read_text())
    assert [part["name"] for part in written["parts"]] == PARTS
    for part in written["parts"]:
        assert part["rows"] and not part["failed"], part["name"]
        assert all(len(row) == len(part["head"]) for row in part["rows"]), part["name"]
        measured = numbers(part["rows"]) + numbers(part["data"])
        assert measured and all(map(math.isfinite, measured)), part["name"]
    page = (tmp_path / "page.md").read_text()
    assert all(f"## {name}: ok" in page for name in PARTS)


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "page"), "--only", "clip,clap")
    assert done.returncode == 2
    assert "there is no part 'clap'" in done.stderr


def test_readme_lists_the_parts() -> None:
    text = (RUN.parent / "README.md").read_text()
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == PARTS
