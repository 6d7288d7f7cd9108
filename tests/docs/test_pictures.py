"""The pictures that scripts draw from what the engine does are what they would draw now."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["schedule", "streams"])
def test_up_to_date(name: str, tmp_path: Path) -> None:
    script = DOCS / "pictures" / f"{name}.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, cwd=DOCS.parent)
    drawn, kept = (folder / f"{name}.svg" for folder in (tmp_path, DOCS))
    assert drawn.read_text() == kept.read_text(), f"run python docs/pictures/{name}.py"
