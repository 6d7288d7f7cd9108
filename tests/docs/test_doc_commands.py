"""Every command line in README.md and docs/*.md runs, or is listed below with the place that runs it."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, Command, commands

from parallel3d.cli import main

ELSEWHERE = {
    "python3 -m venv .venv && source .venv/bin/activate": ".ci/run: python3 -m venv",
    "pip install -c constraints.txt -e '.[cli]' && torchrun --nproc-per-node 8 examples/train.py "
    "--replicate 2 --shard 2 --tp 2 --check": "tests/integration/test_train.py: --check",
    "pip install -c constraints.txt -e '.[test]' && pytest -n auto": ".ci/run: && pytest",
    "pip install -c constraints.txt -e '.[cli,report]'": ".ci/run: pip install",
    "parallel3d calibrate --out profile.toml": "tests/planner/test_planner_cli.py: calibrate",
}
"""Command line -> file: what in it runs the like."""

PER_PAGE = [(page, commands(page)) for page in PAGES]
SCRIPT = re.compile(r"(?:(?:benchmarks|examples|tests)/)[\w/]+\.py")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder that looks like the repository's root to commands that read from it."""
    for name in ("benchmarks", "examples", "docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    yield tmp_path


@pytest.mark.parametrize(
    ("page", "lines"), [p for p in PER_PAGE if p[1]], ids=lambda x: getattr(x, "name", "")
)
def test_they_run(
    page: Path, lines: list[Command], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page's commands one after another in one folder."""
    monkeypatch.chdir(folder)
    for command in lines:
        if command.text not in ELSEWHERE:
            run(command, monkeypatch)


def run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = command.words
    if program == "parallel3d":
        monkeypatch.setattr(sys, "argv", command.words)
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, f"{command.where}: {command.text}: exit code {end.value.code}"
    elif program == "python":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command.where}: {command.text}\n{done.stderr}"
    else:
        pytest.fail(f"{command.where}: nothing runs {command.text!r}; see ELSEWHERE")


def test_the_list_is_up_to_date() -> None:
    found = {command.text for _, lines in PER_PAGE for command in lines}
    assert not ELSEWHERE.keys() - found, "no page has these any more"
    for place in ELSEWHERE.values():
        path, _, words = place.partition(": ")
        assert words in (ROOT / path).read_text(), place


INLINE = re.compile(r"`((?:python|pytest|torchrun|parallel3d) [^`]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_options_exist(page: Path) -> None:
    """Also of commands in running text and tables, which nothing here runs."""
    lines = [command.text for command in commands(page)] + INLINE.findall(page.read_text())
    for line in lines:
        for script in SCRIPT.findall(line):
            assert (ROOT / script).is_file(), f"{page.name}: {line}"
        script = next(iter(SCRIPT.findall(line)), None)
        if script and line.startswith(("python", "torchrun")):
            source = (ROOT / script).read_text()
            for option in options(line.split(script)[1]):
                assert known(option, source), f"{page.name}: {line}: {script} has no {option}"


def options(text: str) -> list[str]:
    return [w.split("=")[0] for w in shlex.split(text, comments=True) if w.startswith("--")]


def known(option: str, source: str) -> bool:
    """As argparse and click write options, or as typer makes them of arguments' names."""
    name = option.removeprefix("--").replace("-", "_")
    return option in source or re.search(rf"\b{name}: Annotated", source) is not None
