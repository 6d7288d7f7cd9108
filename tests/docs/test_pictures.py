"""The pictures that scripts draw from what the engine and the commands do are what they would draw now."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCREENS = ("plan", "dryrun", "audit", "doctor", "launch")


@pytest.mark.parametrize("name", ["schedule", "streams", "axes"])
def test_up_to_date(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = DOCS / "pictures" / f"{name}.py"
    monkeypatch.chdir(DOCS.parent)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the script adds to
    runpy.run_path(str(script), run_name="__main__")
    drawn, kept = (folder / f"{name}.svg" for folder in (tmp_path, DOCS))
    assert drawn.read_text() == kept.read_text(), f"run python docs/pictures/{name}.py"


@pytest.mark.slow
def test_screens_are_what_the_commands_print_now(tmp_path: Path) -> None:
    """Those that are the same on every machine and take a second."""
    pytest.importorskip("typer")
    script = DOCS / "pictures" / "screens.py"
    command = [sys.executable, str(script), str(tmp_path), "plan", "launch"]
    subprocess.run(command, check=True, cwd=DOCS.parent)
    for name in ("plan", "launch"):
        drawn, kept = (folder / f"{name}.svg" for folder in (tmp_path, DOCS / "screens"))
        assert drawn.read_text() == kept.read_text(), "run python docs/pictures/screens.py"


@pytest.mark.parametrize("name", SCREENS)
def test_screens_are_small_and_need_no_network(name: str) -> None:
    path = DOCS / "screens" / f"{name}.svg"
    text = path.read_text(encoding="utf-8")
    assert f"docs/screens/{name}.svg" in (DOCS.parent / "README.md").read_text()
    assert path.stat().st_size < 60_000
    assert f"parallel3d&#160;{name}" in text or f"parallel3d {name}" in text
    assert not re.search(r"url\([^#]|href=|Traceback|/work/|/home/|/tmp/", text)
    assert text.count("clipPath id=") <= 28  # lines, and the window
