"""Which cases of a test function run at once, in CI and with ``-m full``."""

from collections import Counter
from pathlib import Path

import pytest
from _support.tiers import DAYS, mark, measured, name_of


class Item:
    """What is read of a collected test."""

    def __init__(self, nodeid: str, *marks: str, **options: bool) -> None:
        self.nodeid = nodeid
        self.marks = {name: getattr(pytest.mark, name)(**options) for name in marks}
        self.fixturenames: list[str] = []

    def get_closest_marker(self, name: str) -> pytest.MarkDecorator | None:
        return self.marks.get(name)

    def add_marker(self, made: pytest.MarkDecorator) -> None:
        self.marks[made.name] = made


def tiers(*items: Item, day: int, seconds: dict[str, float] | None = None) -> dict[str, list[str]]:
    mark(items, day, seconds or {})  # type: ignore[arg-type]
    found: dict[str, list[str]] = {"quick": [], "slow": [], "full": []}
    for item in items:
        tier = "full" if "full" in item.marks else "slow" if "slow" in item.marks else "quick"
        found[tier].append(item.nodeid)
    return found


def cases(n: int, *marks: str, name: str = "a.py::test", **options: bool) -> list[Item]:
    return [Item(f"{name}[{i}]", *marks, **options) for i in range(n)]


def test_the_first_and_one_that_changes() -> None:
    found = tiers(*cases(4), day=1)
    assert found["quick"] == ["a.py::test[0]", "a.py::test[2]"] and not found["full"]


def test_functions_are_told_apart() -> None:
    items = [*cases(2), *cases(2, name="b.py::test"), Item("a.py::other")]
    assert len(tiers(*items, day=3)["quick"]) == 5


@pytest.mark.parametrize("n", [1, 2, 3, 40])
def test_each_case_has_its_turn(n: int) -> None:
    seen: Counter[str] = Counter()
    for day in range(n):
        found = tiers(*cases(n), day=day)
        assert len(found["quick"]) == min(n, 2) and not found["full"]
        seen.update(found["quick"])
    assert len(seen) == n


@pytest.mark.parametrize("n", [1, DAYS, DAYS + 1, 40])
def test_slow_cases_have_their_turn_in_ci(n: int) -> None:
    seen: Counter[str] = Counter()
    for day in range(DAYS):
        items = [Item(f"{i}.py::test", "slow") for i in range(n)]
        found = tiers(*items, day=day)
        assert not found["quick"] and len(found["slow"]) <= n // DAYS + 1
        seen.update(found["slow"])
    assert len(seen) == n and max(seen.values()) == 1


def test_what_was_measured_to_be_slow() -> None:
    items = [
        *cases(DAYS),
        *cases(1, name="b.py::test"),
        *cases(1, "slow", name="c.py::test", every=True),
    ]
    found = tiers(*items, day=0, seconds={"a.test": 9.0, "b.test": 1.0, "c.test": 9.0})
    assert found["quick"] == ["b.py::test[0]"] and "c.py::test[0]" in found["slow"]
    assert [len(found[tier]) for tier in ("slow", "full")] == [2, DAYS - 1]


def test_times_of_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a.test_b.TestC" name="test_d[1]@gloo" time="3.5"/>'
        '<testcase classname="tests.a.test_b.TestC" name="test_d[2]@gloo" time="1.5"/>'
        '<testcase classname="tests.a.test_b" name="test_e" time="0"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert measured(report) == {name_of("tests/a/test_b.py::TestC::test_d[1]"): 3.5}


def test_own_marks_stay() -> None:
    items = [*cases(2), *cases(1, "slow", name="c.py::test"), *cases(2, "full", name="b.py::test")]
    found = tiers(*items, day=0)
    assert [len(found[tier]) for tier in ("quick", "slow", "full")] == [2, 1, 2]


def test_every_slow_case_of_some() -> None:
    assert len(tiers(*cases(40, "slow", every=True), day=0)["slow"]) == 40


def test_processes_and_heavy_imports_are_for_ci() -> None:
    some = cases(4, name="b.py::test")
    on_ranks, smoke = cases(4), cases(4, "smoke", name="c.py::test")
    for item in (*on_ranks, *smoke):
        item.fixturenames.append("gloo_pool")
    found = tiers(*on_ranks, *smoke, *cases(4, "ci", name="d.py::test"), *some, day=0)
    assert [name[0] for name in found["quick"]] == ["c", "c", "b", "b"]
    assert len(found["slow"]) == 12 and not found["full"]
