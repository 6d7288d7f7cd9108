"""``docs/tensor_parallel.md``: its code runs, its table of styles is the styles', its tests exist and say
which fault or complaint they are of."""

import ast
import re
from pathlib import Path

import pytest

from parallel3d.testing import fake_world
from parallel3d.tp import STYLE_NAMES

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "tensor_parallel.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under ``heading``."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    with fake_world(0, 4):
        for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(code, names)
    said = capsys.readouterr().out
    assert re.search(r"nearest: .*'layers\.\*\.attention\.w", said)
    assert said.count("Tensor parallel over 2 ranks") == 2
    assert isinstance(names["mine"], dict)


def test_every_style_is_listed() -> None:
    listed = {name: row[1] for row in rows("Styles") for name in re.findall(r"`(.*?)`", row[0])}
    assert listed == {name: f"`{style}`" for name, style in STYLE_NAMES.items()}


@pytest.mark.parametrize("row", rows("Faults and complaints that are tests"), ids=str)
def test_the_tests_exist_and_cite(row: list[str]) -> None:
    what, test = row
    path, name = test.strip("`").split("::")
    source = (ROOT / path).read_text()
    assert any(
        isinstance(node, ast.FunctionDef) and node.name == name for node in ast.parse(source).body
    )
    number = what.split(":")[0]
    cited = (f"fault {number}", f"fault_{number}", f"complaint {number}", f"complaint_{number}")
    assert any(words in source.lower() for words in cited)


def test_all_that_are_asked_for_are_there() -> None:
    numbers = {row[0].split(":")[0] for row in rows("Faults and complaints that are tests")}
    assert numbers == {*"jklm", "4", "10", "14", "18", "19", "21"}
