"""docs/files.md lists the files that there are."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow(every=True)
def test_up_to_date() -> None:
    module = runpy.run_path(str(DOCS / "files.py"))
    assert (DOCS / "files.md").read_text() == module["page"](), "run python docs/files.py"


@pytest.mark.slow(every=True)
def test_every_file_says_what_it_is() -> None:
    module = runpy.run_path(str(DOCS / "files.py"))
    package = DOCS.parent / "parallel3d"
    silent = [p for p in package.rglob("*.py") if p.read_text() and not module["first_sentence"](p)]
    assert silent == []
