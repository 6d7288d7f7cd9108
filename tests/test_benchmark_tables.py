"""The tables that ``benchmarks/all.py`` writes, from results made up here."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import tables

    return tables


def claim(what: str, ratio: float, **more: object) -> dict:
    given = {"what": what, "ours": 296.0, "peer": 684.0, "unit": "us", "against": "FSDP2"}
    return given | {"bar": 0.5, "aim": 0.35, "ratio": ratio, "spread": "0.42..0.45"} | more


def result(*claims: dict, quick: bool = False) -> dict:
    machine = {"torch": "2.13", "python": "3.11", "cores": 2, "machine": "x86_64"}
    return {
        "claims": list(claims),
        "quick": quick,
        "environment": machine | {"load_average": [0.5] * 3},
    }


def test_table_of_claims(tables: ModuleType) -> None:
    results = {
        "host_time": result(
            claim("host time, (1, 64, 1) | fp32", 0.43), claim("the same, TP", 0.31)
        ),
        "import_time": result(
            claim("import", 0.02, ours=0.002, peer=0.1, unit="s", against="limit", bar=1, aim=None)
        ),
    }
    assert tables.short(results).splitlines() == [
        "| claim | ours / theirs | at most | met | command |",
        "| --- | --- | --- | --- | --- |",
        "| host time, (1, 64, 1) \\| fp32 | 0.43 (296 against 684 us) | 0.50 of FSDP2 | bar "
        "| `python benchmarks/host_time.py` |",
        "| the same, TP | 0.31 (296 against 684 us) | 0.50 of FSDP2 | aim "
        "| `python benchmarks/host_time.py` |",
        "| import | 0.02 (0.002 s) | 1.00 of limit | bar | `python benchmarks/import_time.py` |",
    ]


def test_a_missed_bar_is_shown_as_such(tables: ModuleType) -> None:
    results = {"host_time": result(claim("host time", 0.51))}
    assert "| **missed** |" in tables.short(results)
    assert "| **missed** |" in tables.detailed(results)


def test_detailed_tables(tables: ModuleType) -> None:
    text = tables.detailed(
        {"one": result(claim("a", 0.4)), "two": result(claim("b", 0.4), quick=True)}
    )
    assert text.count("| claim | ours | theirs |") == 2
    assert "### `benchmarks/one.py`" in text
    assert "| a | 296 | 684 | us | FSDP2 | 0.40 | 0.42..0.45 | 0.50 | 0.35 | bar |" in text
    assert text.endswith("2 cores (x86_64), load average 0.5 at the end; a quick run: few rounds.")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0341, "0.034"),
        (0.4321, "0.43"),
        (12.34, "12.3"),
        (2368.4, "2,368"),
        (1, "1.00"),
    ],
)
def test_numbers(tables: ModuleType, value: float, text: str) -> None:
    assert tables.number(value) == text


def test_between_markers(tables: ModuleType) -> None:
    text = "above\n<!-- claims -->\nold\n<!-- end of claims -->\nbelow\n"
    once = tables.replace_between(text, "claims", "new")
    assert once == "above\n<!-- claims -->\nnew\n<!-- end of claims -->\nbelow\n"
    assert tables.replace_between(once, "claims", "new") == once
    for wrong in ("none", text + text, "<!-- end of claims --><!-- claims -->\n"):
        with pytest.raises(ValueError, match="claims"):
            tables.replace_between(wrong, "claims", "new")


def test_the_documents_have_the_markers(tables: ModuleType) -> None:
    for name in ("claims.md", "performance.md"):
        text = (BENCHMARKS.parent / "docs" / name).read_text()
        tables.replace_between(text, "claims", "new")


def test_readme_has_the_figures_of_the_pages() -> None:
    """Each ratio in README's table is one that its command has in docs/claims.md, or a GPU's page has."""
    readme = (BENCHMARKS.parent / "README.md").read_text()
    docs = BENCHMARKS.parent / "docs"
    command = r"(`python benchmarks/[\w/]+\.py`)"
    rows = re.findall(rf"^\| CPU.*\| ([\d.]+) \| {command} \|$", readme, re.MULTILINE)
    of_gpu = re.findall(rf"^\| H200.*\| ([\d.; to]+) \| {command} \|$", readme, re.MULTILINE)
    assert len(rows) == 1 and len(of_gpu) == 3
    claims = (docs / "claims.md").read_text().splitlines()
    for ratio, command in rows:
        assert any(f"| {ratio} (" in line and command in line for line in claims), command
    for ratios, _ in of_gpu:
        for ratio in re.findall(r"[\d.]+", ratios):
            assert ratio in (docs / "gpu.md").read_text(), ratio


SCRIPT = """
import json, sys
from pathlib import Path
command_line(__doc__)
sys.exit({status}) if {status} else Path(sys.argv[2]).write_text({text!r})
"""


@pytest.mark.parametrize(
    ("ratio", "status", "expected"), [(0.4, 0, 0), (0.6, 0, 1), (0.4, 3, 2)], ids=str
)
def test_exit_status(
    tables: ModuleType, monkeypatch, tmp_path: Path, capsys, ratio, status, expected
) -> None:
    """0 where all bars hold, 1 where one is missed, 2 where a script fails."""
    text = json.dumps(result(claim("made up", ratio)))
    script = "def command_line(doc): ...\n" + SCRIPT.format(status=status, text=text)
    (tmp_path / "made_up.py").write_text(script)
    module = runpy.run_path(str(BENCHMARKS / "all.py"))
    monkeypatch.setitem(module["run"].__globals__, "HERE", tmp_path)
    monkeypatch.setitem(module["scripts"].__globals__, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["all.py"])
    assert module["main"]() == expected
    out = capsys.readouterr().out
    assert ("bar missed: made up" in out) == (expected == 1)
    assert ("FAILED: made_up" in out) == (expected == 2)
