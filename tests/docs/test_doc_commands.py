"""Every command line in README.md and docs/*.md runs, or is listed below with the place that runs it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _support.docs.doc_pages import PAGES, ROOT, Command, commands, sections

from parallel3d.tools.cli import main

pytestmark = pytest.mark.ci

ELSEWHERE = {
    "pip install -c constraints.txt -e '.[cli]' "
    "&& parallel3d demo": "tests/tools/launch/test_run_and_demo.py: demo",
    "torchrun --nproc-per-node 8 examples/llama/train.py --replicate 2 --shard 2 --tp 2 "
    "--check": "tests/integration/test_train.py: --check",
    "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-0:29500 "
    "-m parallel3d doctor --replicate 4 --shard 1 --tp 8 "
    "--checkpoint /shared/run": "tests/tools/doctor/test_on_hosts.py: doctor",
    "pip install -c constraints.txt -e '.[test]' && pytest -n auto": ".ci/run: && pytest",
    "pip install -c constraints.txt -e '.[cli]'": ".ci/run: pip install",
}
"""Command line -> file: what in it runs the like."""

PROGRAMS = {
    "HEAD=node-1": "tests/tools/launch/test_launch_cli.py: bash",
    "kubectl": "tests/tools/launch/test_launch_schemas.py: TrainJob",
    "ray": "tests/tools/launch/test_launch_files.py: ray",
    "sbatch": "tests/tools/launch/test_launch_slurm.py: sbatch",
    "sky": "tests/tools/launch/test_launch_files.py: skypilot",
    "srun": "tests/_support/tools/launch/slurm_cluster.py: srun",
}
"""What starts on machines that a test lacks -> file: what in it runs the like, or reads it."""
QUICKER = {
    "parallel3d dryrun --world-size 64 --rank 0 --against 63 --html report.html --trace trace.json "
    "-- examples/llama/train.py --replicate 2 --shard 4 --tp 8 --size 8b --seq-len 8192 --batch 8 "
    "--mixed-precision --sequence-parallel": "--no-against --size nano --seq-len 32 --tp 4 --shard 8 "
    "--batch 16",
    "parallel3d calibrate --out profile.toml": "--largest 512 --seconds 0.2",
    "python benchmarks/planner_accuracy.py benchmarks/published/runs.csv predictions.csv "
    "--models benchmarks/published/models.csv --json accuracy.json": "--no-models",
}
"""Command line -> options added to it, or with ``--no-`` left out with their values, for a quick run."""

SLOW = {"activations.md", "dryrun.md", "planner.md", "ten_minutes.md"}
PER_PAGE = [(page, commands(page)) for page in PAGES]
SCRIPT = re.compile(r"(?:(?:benchmarks|examples|tests)/)[\w/]+\.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like the repository's root to commands that read from it, or write to docs."""
    for name in ("benchmarks", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    for path in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.svg")):
        shutil.copy(path, tmp_path / "docs")
    return tmp_path


@pytest.mark.parametrize(
    ("page", "lines"),
    [
        pytest.param(page, lines, id=page.name, marks=[pytest.mark.slow] * (page.name in SLOW))
        for page, lines in PER_PAGE
        if lines
    ],
)
def test_they_run(
    page: Path, lines: list[Command], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page's commands one after another in one folder."""
    monkeypatch.chdir(folder)
    files = {s.file: s.code for s in sections(page) if s.file}
    for name, code in files.items():
        (folder / name).write_text(code)
    for command in lines:
        if not listed(command) and not starts_a_section(command):
            run(command, monkeypatch)
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)
    written = folder / "docs" / page.name
    assert not written.exists() or written.read_text() == page.read_text(), "not up to date"


def listed(command: Command) -> bool:
    return command.text in ELSEWHERE or command.words[0] in PROGRAMS


def starts_a_section(command: Command) -> bool:
    """Whether it runs a file that the page tells its reader to save: test_doc_python runs that Python.

    Raises AssertionError if it starts another number of ranks than run there.
    """
    program, *arguments = command.words
    for section in sections(command.page):
        if section.file and section.file in arguments:
            ranks = ["--nproc-per-node", str(section.size)] if section.world != "process" else []
            started = ["torchrun", *ranks] if ranks else ["python"]
            assert [program, *arguments] == [*started, section.file], command.where
            return True
    return False


def test_files_to_save_have_a_line_that_starts_them() -> None:
    files = {(s.page.name, s.file) for page in PAGES for s in sections(page) if s.file}
    started = {(page.name, line.words[-1]) for page, lines in PER_PAGE for line in lines}
    imported = {
        (s.page.name, f"{name}.py")
        for page in PAGES
        for s in sections(page)
        for name in re.findall(r"^from (\w+) import", s.code, re.MULTILINE)
    }
    assert not files - started - imported
    for page in PAGES:
        for section in sections(page):
            assert not section.file or f"`{section.file}`" in page.read_text(), section.where


def run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = quicker(command)
    program, *arguments = words
    if program == "parallel3d":
        monkeypatch.setattr(sys, "argv", words)
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


def quicker(command: Command) -> list[str]:
    """Its words, as ``QUICKER`` changes them."""
    words = [w.replace("/shared/", "shared/") for w in command.words]  # nothing outside the folder
    changes = QUICKER.get(command.text, "").split()
    left_out = {w.replace("--no-", "--") for w in changes if w.startswith("--no-")}
    for option in left_out:
        at = words.index(option)
        del words[at : at + 2]
    return words + [w for w in changes if not w.startswith("--no-")]


def test_the_lists_are_up_to_date() -> None:
    found = {command.text for _, lines in PER_PAGE for command in lines}
    assert not (ELSEWHERE.keys() | QUICKER.keys()) - found, "no page has these any more"
    assert not PROGRAMS.keys() - {text.split()[0] for text in found}, "no page has these any more"
    for place in [*ELSEWHERE.values(), *PROGRAMS.values()]:
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
