"""The two short examples: what README shows is minimal.py, and the notebook prints what it shows."""

import json
from pathlib import Path

import pytest
from _support.docs.notebook import NOTEBOOK, kept, run
from _support.examples import shown

ROOT = Path(__file__).parents[2]


def test_readme_shows_minimal() -> None:
    """README's block, which the tests run on eight gloo processes, is the file."""
    path, readme = ROOT / "examples" / "minimal.py", (ROOT / "README.md").read_text()
    program = path.read_text().partition('"""\n\n')[2]
    assert f"```python\n{program}```" in readme
    assert program.count("\n") <= 40
    words, printed = shown(path)
    assert f"`{' '.join(words)}` prints" in readme and "```text\n" + "\n".join(printed) in readme


@pytest.mark.slow
def test_notebook_prints_what_it_shows() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert run(cells) == kept(cells), "run python tests/_support/docs/notebook.py"
