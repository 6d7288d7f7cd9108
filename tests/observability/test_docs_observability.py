"""``docs/observability.md``: its code runs, its tables are the fields, its options are train.py's."""

import re
from pathlib import Path

import pytest

from parallel3d.observability import FIELDS, START_FIELDS
from parallel3d.testing import fake_world

pytest.importorskip("rich")
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "observability.md").read_text()


def test_the_code_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 5
    with fake_world(0, 4):
        for code in blocks:
            exec(code, names)
    said = capsys.readouterr().out
    assert "step    4/4  loss " in said and "MFU" in said
    assert (tmp_path / "traces" / "steps-1-2-rank-00000.json").is_file()


def table(after: str) -> dict[str, str]:
    """The first table after these words."""
    lines = TEXT.split(after)[1].split("| field | meaning |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ", 1) for line in lines.splitlines()]
    return {name.strip("`"): meaning for name, meaning in rows}


def test_the_fields_are_listed() -> None:
    assert table("## A record") == FIELDS
    assert table("what `start` is given") == START_FIELDS


def test_the_options_are_there() -> None:
    pytest.importorskip("typer")
    options = (ROOT / "examples" / "llama" / "options.py").read_text()
    listed = re.findall(r"`--([a-z-]+)", TEXT)
    assert len(listed) == 8
    for name in listed:
        assert f"    {name.replace('-', '_')}: Annotated[" in options, name
