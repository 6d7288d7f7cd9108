"""Every claim of every script here: runs them one after another and prints the whole table.

    python benchmarks/all.py [--quick] [--only NAME ...] [--results FOLDER] [--no-run] [--write]

Ends with 1 where a bar is missed, with 2 where a script fails. ``--results`` keeps each script's JSON, and
the tables are of all that is there, so that ``--only`` renews a part; ``--no-run`` renews none. ``--write``
puts them into docs/claims.md and docs/performance.md, between their markers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import print_claims
from tables import claims_of, detailed, replace_between, short

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
FIRST = ("host_time", "gloo_step", "overlap", "memory", "copies", "optim_local", "clip_norm")
"""In this order; the rest follows by name."""


def scripts() -> list[str]:
    """Names of the scripts that make claims."""
    found = {path.stem for path in HERE.glob("*.py") if "command_line(__doc__" in path.read_text()}
    return [name for name in FIRST if name in found] + sorted(found - set(FIRST))


def run(names: Sequence[str], folder: Path, *, quick: bool) -> list[str]:
    """Leaves ``NAME.json`` in ``folder`` for each script; returns the names of those that failed."""
    failed = []
    for name in names:
        target = folder / f"{name}.json"
        target.unlink(missing_ok=True)  # an older one must not stand for a run that fails
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(target)]
        print(f"$ {name}", flush=True)
        done = subprocess.run(command + ["--quick"] * quick)
        if done.returncode or not target.exists():
            failed.append(name)
    return failed


def read(names: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """What there is in ``folder``, in the order of ``names``."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def write(results: dict[str, dict[str, Any]]) -> None:
    """docs/claims.md's table and docs/performance.md's."""
    for name, text in (("claims.md", short(results)), ("performance.md", detailed(results))):
        path = DOCS / name
        path.write_text(replace_between(path.read_text(), "claims", text))


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = scripts()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", choices=names, nargs="+", help="run these")
    parser.add_argument("--results", type=Path, help="folder to keep the results in")
    parser.add_argument("--no-run", action="store_true", help="tables of what is there")
    parser.add_argument(
        "--write", action="store_true", help="write docs/claims.md and docs/performance.md"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = [] if options.no_run else options.only or names
        failed = run(chosen, folder, quick=options.quick)
        results = read(names, folder)
    claims = [claim for result in results.values() for claim in claims_of(result)]
    print_claims(claims)
    missed = [claim.what for claim in claims if claim.verdict == "MISSED"]
    for text, which in (("bar missed", missed), ("FAILED", failed)):
        for each in which:
            print(f"{text}: {each}")
    if options.write and not failed:
        write(results)
    return 2 if failed else int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
