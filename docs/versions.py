"""Runs the suite on several torch versions and writes ``docs/versions.md``.

    python docs/versions.py 2.11.0 2.13.0 2.15.0             # an environment for each, made and thrown away
    python docs/versions.py 2.15.0 --python 2.15.0=~/env/bin/python      # in one that is there
    python docs/versions.py 2.11.0 --only fsdp engine        # these folders of tests; the others' rows stay
    python docs/versions.py                                  # only writes the page anew

An environment has that torch, the package with its ``test``, ``clients`` and ``docs`` extras, and what
``constraints.txt`` pins, but for
torch: about 3 GB for a torch that comes with CUDA, and four minutes. The suite takes longer than that.
Results are kept in ``docs/versions.json``, by version and folder, each with its date and commit: versions and
folders can be run one at a time. Exits with 1 if a test of this run has failed.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PAGE, RESULTS = ROOT / "docs" / "versions.md", ROOT / "docs" / "versions.json"
Results = dict[str, dict[str, dict]]  # version -> folder -> what came of it

_HEAD = """# torch versions

Written by `python docs/versions.py`, which says how to run it; the numbers are tests passed, and failed or
skipped where any were.
"""


def folders() -> dict[str, list[str]]:
    """Name -> what pytest is given, for each folder of tests; ``.`` has those beside the folders."""
    found = {".": [str(path.relative_to(ROOT)) for path in sorted(TESTS.glob("test_*.py"))]}
    for folder in sorted(TESTS.iterdir()):
        if folder.is_dir() and any(folder.rglob("test_*.py")):
            found[folder.name] = [str(folder.relative_to(ROOT))]
    return found


def make_environment(version: str, where: Path) -> Path:
    """The Python of a new environment in ``where`` with torch ``version``."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    # torchvision has a release for each of torch's.
    pins = [pin for pin in pins if not re.match(r"(torch|torchvision)\s*==", pin)]
    pins.append(f"torch=={version}")
    constraints = where / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    venv.create(where / "env", with_pip=True)
    python = where / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(constraints)]
    subprocess.run([*install, "-e", f"{ROOT}[test,clients,docs]"], check=True)
    return python


def check_version(python: Path, version: str) -> None:
    """Raises SystemExit unless it has that torch."""
    code = "import torch; print(torch.__version__)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    if found.partition("+")[0] != version:
        raise SystemExit(f"{python} has torch {found or 'none'}, not {version}")


def run_folder(python: Path, paths: list[str], workers: int, minutes: float) -> dict:
    """What came of the tests of one folder."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers)]
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])  # its torchrun too
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
        try:
            done = subprocess.run(
                [*command, f"--junitxml={report}", *paths],
                cwd=ROOT,
                env=environment,
                timeout=60 * minutes,
            )
        except subprocess.TimeoutExpired:
            return {"note": f"not done after {minutes:g} minutes"}
        if not report.exists():
            return {"note": f"pytest ended with {done.returncode}"}
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            for key in counts:
                counts[key] += int(suite.get(key, 0))
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return {"passed": passed, "failed": failed, "skipped": counts["skipped"]}


def commit() -> str:
    """The short name of what is checked out; with ``+`` if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno", "--", "parallel3d", "tests"],
        capture_output=True,
        text=True,
    )
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")


def page(results: Results) -> str:
    """The table of all ``results``."""
    versions = sorted(results, key=lambda v: [int(n) for n in re.findall(r"\d+", v)])
    names = list(dict.fromkeys(name for v in versions for name in results[v]))
    lines = [_HEAD, "| tests | " + " | ".join(f"torch {v}" for v in versions) + " |"]
    lines.append("|---|" + "---|" * len(versions))
    for name in sorted(names):
        cells = [_cell(results[v].get(name)) for v in versions]
        lines.append(
            f"| `{'tests/*.py' if name == '.' else 'tests/' + name}` | {' | '.join(cells)} |"
        )
    lines.append("| **all** | " + " | ".join(_cell(_sum(results[v])) for v in versions) + " |")
    lines.append("| of | " + " | ".join(_when(results[v]) for v in versions) + " |")
    return "\n".join(lines) + "\n"


def _sum(by_folder: dict[str, dict]) -> dict:
    done = [found for found in by_folder.values() if "note" not in found]
    return {key: sum(found[key] for found in done) for key in ("passed", "failed", "skipped")}


def _cell(found: dict | None) -> str:
    if found is None:
        return "not run"
    if "note" in found:
        return found["note"]
    others = [f"{found[key]} {key}" for key in ("failed", "skipped") if found[key]]
    return ", ".join([f"{found['passed']:,}", *others])


def _when(by_folder: dict[str, dict]) -> str:
    return ", ".join(dict.fromkeys(f"{f['date']} {f['commit']}" for f in by_folder.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", help="torch versions to run, such as 2.13.0")
    parser.add_argument(
        "--python", action="append", default=[], metavar="VERSION=PATH", help="one that is there"
    )
    parser.add_argument("--only", nargs="+", metavar="FOLDER", help="these folders of tests/")
    parser.add_argument("-n", "--workers", type=int, default=2, help="of pytest-xdist")
    parser.add_argument("--minutes", type=float, default=60, help="most for one folder")
    options = parser.parse_args()
    given = dict(each.split("=", 1) for each in options.python)
    if unknown := set(given) - set(options.versions):
        parser.error(f"--python for {', '.join(unknown)}, which is not among the versions")
    if unknown := set(options.only or ()) - set(folders()):
        parser.error(f"no folder {', '.join(unknown)} of tests; there are {', '.join(folders())}")
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = 0
    for version in options.versions:
        with tempfile.TemporaryDirectory() as where:
            if version in given:
                python = Path(given[version]).expanduser().absolute()
            else:
                python = make_environment(version, Path(where))
            check_version(python, version)
            of_version = results.setdefault(version, {})
            for name in list(of_version):
                if name not in folders():
                    del of_version[name]
            for name, paths in folders().items():
                if options.only is not None and name not in options.only:
                    continue
                print(f"torch {version}: {name}", flush=True)
                found = run_folder(python, paths, options.workers, options.minutes)
                today = datetime.datetime.now(datetime.UTC).date().isoformat()
                of_version[name] = {**found, "date": today, "commit": commit()}
                failed += found.get("failed", 1)
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                PAGE.write_text(page(results))
    PAGE.write_text(page(results))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
