"""The two short examples: what README shows is minimal.py, and the notebook prints what it shows."""

import json
from pathlib import Path

import pytest
from _support.docs.notebook import NOTEBOOK, kept, run

ROOT = Path(__file__).parents[2]


def test_readme_shows_minimal() -> None:
    """README's block, which the tests run on eight gloo processes, is the file."""
    program = (ROOT / "examples" / "minimal.py").read_text()
    assert f"```python\n{program}```" in (ROOT / "README.md").read_text()
    assert program.count("\n") <= 40


@pytest.mark.slow
def test_notebook_prints_what_it_shows() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert run(cells) == kept(cells), "run python tests/_support/docs/notebook.py"
