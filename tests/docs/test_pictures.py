"""The pictures that scripts draw from what the engine does are what they would draw now."""

import runpy
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["schedule", "streams"])
def test_up_to_date(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = DOCS / "pictures" / f"{name}.py"
    monkeypatch.chdir(DOCS.parent)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the script adds to
    runpy.run_path(str(script), run_name="__main__")
    drawn, kept = (folder / f"{name}.svg" for folder in (tmp_path, DOCS))
    assert drawn.read_text() == kept.read_text(), f"run python docs/pictures/{name}.py"
