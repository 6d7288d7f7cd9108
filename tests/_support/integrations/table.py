"""Runs rows of docs/integrations.md and writes its table.

    python tests/_support/integrations/table.py            # all, in some minutes
    python tests/_support/integrations/table.py hsdp       # those with this in their names; the others stay
    python tests/_support/integrations/table.py 7          # row 7
    python tests/_support/integrations/table.py --list

Each row trains another library's program on gloo processes. Results are kept in ``docs/integrations.json``.
Exits with 1 if one is farther from the plain run than rounding explains.
"""

import importlib
import json
import pkgutil
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import _support.integrations as here
from _support.integrations.rows import LIMITS, Result, Row

PAGE, RESULTS = ROOT / "docs" / "integrations.md", ROOT / "docs" / "integrations.json"
START, END = "<!-- table -->", "<!-- end of table -->"
COMMAND = "python tests/_support/integrations/table.py"


def rows() -> list[Row]:
    """The rows of every file ``*_rows.py`` here, in the order of the files' names."""
    names = sorted(m.name for m in pkgutil.iter_modules(here.__path__) if m.name.endswith("_rows"))
    found = [r for n in names for r in importlib.import_module(f"{here.__name__}.{n}").ROWS]
    assert len({row.id for row in found}) == len(found)
    return found


def measured(row: Row, result: Result) -> dict:
    """What the results' file says of a row."""
    versions = " ".join(
        f"{package} {version(package).partition('+')[0]}" for package in row.packages
    )
    return {"versions": versions, "ours": result.ours, "peers": result.peers}


def table(known: list[Row], results: dict[str, dict]) -> str:
    """The table as Markdown."""
    lines = [
        "| | program | versions | lines | mesh | dtype | ours: loss, weights | peer's: loss, weights |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, row in enumerate(known, start=1):
        if (result := results.get(row.id)) is None:
            continue
        ours, peers = (
            ", ".join(f"{far:.0e}" if far else "0" for far in result[who]) if result[who] else "-"
            for who in ("ours", "peers")
        )
        name = f"{row.name}<br>{row.note}" if row.note else row.name
        mesh = f"({', '.join(map(str, row.mesh))})"
        cells = (number, name, result["versions"], row.lines, mesh, row.dtype, ours)
        lines.append(f"| {' | '.join(map(str, cells))} | {row.peer}: {peers} |")
    return "\n".join(lines)


def write(known: list[Row], results: dict[str, dict]) -> None:
    """Writes the results, and the table into the page."""
    results = {row.id: results[row.id] for row in known if row.id in results}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{table(known, results)}\n{END}{after}")


def main(arguments: list[str]) -> int:
    from parallel3d.testing import GlooPool

    known = rows()
    if arguments == ["--list"]:
        print("\n".join(row.id for row in known))
        return 0
    if len(arguments) == 1 and arguments[0].isdigit():
        wanted = known[int(arguments[0]) - 1 :][:1]
    else:
        wanted = [r for r in known if all(word.lower() in r.id.lower() for word in arguments)]
    if not wanted:
        print(f"{' '.join(arguments)!r} is in no row's name; {COMMAND} --list prints them")
        return 2
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wrong = 0
    with GlooPool(max(row.world_size for row in wanted)) as pool:
        for row in wanted:
            if not row.installed:
                print(row.id, f"not run: needs {' and '.join(row.packages)}")
                wrong += bool(arguments)  # it was asked for
                continue
            result = pool.run(row.run, *row.arguments, world_size=row.world_size, timeout=300)[0]
            results[row.id] = json.loads(json.dumps(measured(row, result)))
            far = max(result.ours) > LIMITS[row.dtype]
            wrong += far
            print(row.id, result, "TOO FAR" if far else "", flush=True)
            write(known, results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
