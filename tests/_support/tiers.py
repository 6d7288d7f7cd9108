"""Which tests run when: what is quick at once, the rest in CI, long sweeps with ``-m full``.

``pytest -n auto`` runs the first case of each test function and one that changes from day to day; ``.ci/run``
all of them. What is marked ``ci`` runs in ``.ci/run`` alone, all cases each day, and so do the tests on
processes but for those marked ``smoke``. What is marked ``slow``, or was measured to take more than ``QUICK``
seconds, runs there each case on one of ``DAYS`` days; what is marked ``slow(every=True)`` on all. On its
other days a case is marked ``slow`` and ``full``; a test's own marks stay. A command that names its tests (a
file, ``::`` or ``-k``) runs all cases but those with marks ``slow`` and ``full`` of their own.

``durations.json`` has what was measured. ``python tests/_support/tiers.py REPORT.xml ...`` writes it, of
reports of ``pytest --junitxml``: new times of the functions that they have, of others those that are there.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import pytest

QUICK = 2.0
"""The most seconds that a case may take in ``pytest -n auto``, on two cores that do nothing else."""
DAYS = 10
"""In so many days ``.ci/run`` runs each slow case."""
DAY = "PARALLEL3D_TESTS_DAY"
"""The environment variable with the number of the day: all workers collect the same, at midnight too."""
DURATIONS = Path(__file__).with_name("durations.json")


def all_are_asked_for(config: pytest.Config) -> bool:
    """Whether the command line names its tests."""
    return bool(config.option.keyword) or any(".py" in given for given in config.args)


def today() -> int:
    return int(os.environ.setdefault(DAY, str(date.today().toordinal())))


def name_of(nodeid: str) -> str:
    """The function of a test, as reports name it: ``tests.fsdp.test_x.TestA.test_b``."""
    return nodeid.partition("[")[0].replace(".py::", ".").replace("::", ".").replace("/", ".")


def on_processes(item: pytest.Item) -> bool:
    """Whether the test runs on the pool, the hosts or what the fork server starts."""
    return not {"gloo_pool", "site", "python"}.isdisjoint(getattr(item, "fixturenames", ()))


def mark(
    items: Iterable[pytest.Item], day: int | None = None, seconds: dict[str, float] | None = None
) -> None:
    """Adds ``slow`` to the cases that a quick run leaves out, ``full`` to those that CI leaves out too.

    ``seconds`` are those of each function's longest case (default: ``durations.json``).
    """
    day = today() if day is None else day
    seconds = json.loads(DURATIONS.read_text()) if seconds is None else seconds
    quick: dict[str, list[pytest.Item]] = defaultdict(list)
    slow = []
    for item in items:
        if item.get_closest_marker("full") is not None:
            continue
        name, own = name_of(item.nodeid), item.get_closest_marker("slow")
        if own is None and seconds.get(name, 0) <= QUICK:
            smoke = item.get_closest_marker("smoke") is not None
            if item.get_closest_marker("ci") is not None or (on_processes(item) and not smoke):
                item.add_marker(pytest.mark.slow)
            else:
                quick[name].append(item)
        elif own is None or not own.kwargs.get("every"):
            item.add_marker(pytest.mark.slow)
            slow.append(item)
    for cases in quick.values():
        for place, case in enumerate(cases[1:]):
            if (place - day) % len(cases[1:]):
                case.add_marker(pytest.mark.slow)
    for place, case in enumerate(slow):
        if (place - day) % DAYS:
            case.add_marker(pytest.mark.full)


def measured(report: Path) -> dict[str, float]:
    """The seconds of each function's longest case in a report of ``pytest --junitxml``."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.get("classname") and case.find("skipped") is None:
            name = f"{case.get('classname')}.{case.get('name')}".partition("[")[0].partition("@")[0]
            found[name] = max(found.get(name, 0.0), float(case.get("time", 0)))
    return found


if __name__ == "__main__":
    times = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    for given in sys.argv[1:]:
        times.update(measured(Path(given)))
    slower = {name: round(took, 1) for name, took in sorted(times.items()) if took > QUICK}
    DURATIONS.write_text(json.dumps(slower, indent=0) + "\n")
