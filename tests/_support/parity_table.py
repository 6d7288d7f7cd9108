"""Writes ``docs/parity.md`` from the tests' own marks, and from running the engine tests on both engines.

    python tests/_support/parity_table.py            # both tables; runs tests/engine on torch and on ours
    python tests/_support/parity_table.py --marks    # what follows from the marks alone, in seconds

Exits with 1 where a required item has no test, or an outcome is not the one the marks say: a test that
torch fails without citing a fault (``@pytest.mark.torch_fails("fault b", match="...")``), one that it
passes although it cites one, or one that we fail.

Also a pytest plugin (``-p _support.parity_table``): ``--tests-json FILE`` writes the collected tests with
their marks and outcomes.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # under pytest it is there already
    sys.path.insert(0, str(ROOT / "tests"))

from _support.parity_items import CITED, KINDS, required_items  # noqa: E402

PAGE = ROOT / "docs" / "parity.md"

_HEAD = """# Parity with `torch.distributed.fsdp.fully_shard`

Written by `python tests/_support/parity_table.py` from the tests' marks; `tests/test_parity_table.py`
fails where it is out of date.
"""

# Of all tests, set by conftest.py.
MARKED: pytest.StashKey[dict[str, "MarkedTest"]] = pytest.StashKey()


@dataclass
class MarkedTest:
    """One test function that has marks, with all its parameters."""

    path: str  # tests/engine/test_x.py::test_y
    items: list[str]  # of its parity marks
    engine: bool  # runs on both engines
    needs: str = ""  # what it is skipped without
    fails: dict[str, str] = field(default_factory=dict)  # parameters -> the fault torch fails by
    cases: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)  # parameters -> what happened, if run


class Gather:
    """The plugin: gathers tests from the items of a session."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.tests: dict[str, MarkedTest] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = session.config.stash[MARKED]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, _, case = report.nodeid.partition("[")
        if report.when != "call" and report.passed:
            return
        self.tests[path].outcomes[case.rstrip("]")] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self.target.write_text(json.dumps([asdict(test) for test in self.tests.values()]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tests-json", type=Path, help="write the tests and their marks to this file")


def pytest_configure(config: pytest.Config) -> None:
    if target := config.getoption("--tests-json"):
        config.pluginmanager.register(Gather(target))


def gather(items: list[pytest.Item]) -> dict[str, MarkedTest]:
    """The tests of a collection that have marks or run on both engines, by path."""
    tests: dict[str, MarkedTest] = {}
    for item in items:
        marked = [_canonical(i) for mark in item.iter_markers("parity") for i in mark.args]
        engine = "engine" in getattr(item, "fixturenames", ())
        if not marked and not engine:
            continue
        path, _, case = item.nodeid.partition("[")
        test = tests.setdefault(path, MarkedTest(path, [], engine))
        test.items += [i for i in marked if i not in test.items]
        test.cases += 1
        if (mark := item.get_closest_marker("torch_fails")) is not None:
            test.fails[case.rstrip("]")] = mark.args[0]
        if (mark := item.get_closest_marker("skipif")) is not None:
            test.needs = mark.kwargs["reason"]
    return tests


@functools.cache
def _canonical(item: str) -> str:
    """``fault b: in other words`` is the required item of fault b."""
    if item.startswith("fault"):
        letter = item.partition(":")[0] + ":"
        known = [required for required in required_items() if required.startswith(letter)]
        return known[0] if len(known) == 1 else item
    return item


def collect(*arguments: str) -> dict[str, MarkedTest]:
    """The tests as a pytest of their own collects, or runs, them."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "tests.json")
        options = "-p _support.parity_table -p no:cacheprovider --tests-json"
        paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options.split(), str(target), *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        if not target.exists():
            raise SystemExit(f"pytest {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
        return {t["path"]: MarkedTest(**t) for t in json.loads(target.read_text())}


def tables(tests: dict[str, MarkedTest]) -> str:
    """The whole page, as the marks have it."""
    ordered = sorted(tests.values(), key=lambda t: t.path)
    lines = [_HEAD, "## What shows what\n", *_item_table(ordered)]
    lines += [
        "\n## The same tests on torch\n",
        "`pytest --engine torch` runs these tests on torch's engine. A test that it fails says by which",
        "of the faults below. Lettered and numbered ones were known before; these tests found",
        "the others. `-m full` and a GPU add to what is shown here.\n",
        "| fault | torch 2.13.0 |",
        "|---|---|",
        *(f"| {key} | {text} |" for key, text in CITED.items()),
        "\n| test | torch | parallel3d |",
        "|---|---|---|",
        *(f"| {_name(t)} | {_on_torch(t)} | {_on_ours(t)} |" for t in ordered if t.engine),
    ]
    return "\n".join(lines) + "\n"


def missing_items(tests: dict[str, MarkedTest]) -> list[str]:
    """Required items that no test has."""
    marked = {item for test in tests.values() for item in test.items}
    return [item for item in required_items() if item not in marked]


def _item_table(tests: list[MarkedTest]) -> list[str]:
    required = required_items()
    marked = sorted({item for test in tests for item in test.items})
    lines = []
    for kind, heading in KINDS.items():
        items = [i for i in [*required, *marked] if i.startswith(kind)]
        if kind == "method":
            items.sort()
        lines += [f"### {heading}\n", "| item | tests |", "|---|---|"]
        for item in dict.fromkeys(items):
            shown = ", ".join(_name(t) for t in tests if item in t.items)
            text = item if kind == "fault" else item.removeprefix(f"{kind}: ")
            lines.append(f"| {text} | {shown or '**MISSING**'} |")
        lines.append("")
    return lines


def _name(test: MarkedTest) -> str:
    file, _, name = test.path.partition("::")
    return f"[{name.replace('::', '.')}](../{file})"


def _on_torch(test: MarkedTest) -> str:
    if unlike := _unlike(test):
        return f"**{unlike}**"
    if test.needs:
        return test.needs
    if not test.fails:
        return "passes"
    faults = ", ".join(sorted(set(test.fails.values())))
    if len(test.fails) == test.cases:
        return f"fails: {faults}"
    return f"fails {len(test.fails)} of {test.cases} cases: {faults}"


def _on_ours(test: MarkedTest) -> str:
    bad = [case for case, outcome in test.outcomes.items() if outcome == "ours failed"]
    return f"**fails {', '.join(bad)}**" if bad else test.needs or "passes"


def _unlike(test: MarkedTest) -> str:
    bad = sorted(case for case, outcome in test.outcomes.items() if outcome == "torch unlike")
    return f"not as marked: {', '.join(bad) or 'all'}" if bad else ""


def _run_both() -> dict[str, MarkedTest]:
    """All tests; those of both engines with their outcomes."""
    tests = collect("--collect-only")
    files = sorted({t.path.partition("::")[0] for t in tests.values() if t.engine})
    for engine, bad in (("torch", "torch unlike"), ("parallel3d", "ours failed")):
        run = collect("-m", "not full", "--engine", engine, "--only-engine-tests", *files)
        for path, test in run.items():
            if not test.engine:
                continue
            # Under --engine torch a test passes that fails as its mark says; see conftest.py.
            allowed = ("passed", "skipped") if test.needs else ("passed",)
            wrong = {case: bad for case, outcome in test.outcomes.items() if outcome not in allowed}
            if not test.outcomes:
                wrong = {"not run": bad}
            tests[path].outcomes |= wrong
    return tests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--marks", action="store_true", help="do not run the tests")
    tests = collect("--collect-only") if parser.parse_args().marks else _run_both()
    PAGE.write_text(tables(tests))
    problems = [f"no test: {item}" for item in missing_items(tests)]
    problems += [
        f"{outcome}: {test.path}[{case}]"
        for test in tests.values()
        for case, outcome in test.outcomes.items()
    ]
    print(f"{PAGE.relative_to(ROOT)}: {len(tests)} tests", *problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
