"""docs/parity.md is what the tests' marks give."""

import pytest
from _support.engines import check_fault
from _support.parity_items import CITED, KINDS
from _support.parity_table import MARKED, PAGE, ROOT, MarkedTest, collect, missing_items, tables


@pytest.fixture(scope="module")
def tests(request: pytest.FixtureRequest) -> dict[str, MarkedTest]:
    """All tests with marks: this session's, or those of a collection of its own if it has only some."""
    config = request.config
    args = [config.invocation_params.dir / arg for arg in config.args]
    whole = any(arg == ROOT or arg == ROOT / "tests" for arg in args)
    if whole and not any(config.getoption(name, None) for name in ("lf", "ignore", "ignore_glob")):
        return config.stash[MARKED]
    return collect("--collect-only")


def test_page_is_up_to_date(tests: dict[str, MarkedTest]) -> None:
    assert PAGE.read_text() == tables(tests), "run python tests/_support/parity_table.py"


def test_every_required_item_has_a_test(tests: dict[str, MarkedTest]) -> None:
    assert missing_items(tests) == []


def test_marks_are_well_formed(tests: dict[str, MarkedTest]) -> None:
    for test in tests.values():
        for item in test.items:
            assert item.startswith(tuple(KINDS)), f"{test.path}: {item!r}"
        for fault in test.fails.values():
            assert fault in CITED, f"{test.path}: {fault!r}"


class TestTables:
    def test_missing_items_and_tests_are_shown(self) -> None:
        test = MarkedTest("tests/a.py::TestB::test_c", ["method: unshard", "behaviour: ours"], True)
        page = tables({test.path: test})
        assert "| unshard | [TestB.test_c](../tests/a.py) |" in page
        assert "| ours | [TestB.test_c](../tests/a.py) |" in page
        assert "| reshard | **MISSING** |" in page
        missing = missing_items({test.path: test})
        assert "method: reshard" in missing and "method: unshard" not in missing

    @pytest.mark.parametrize(
        ("fails", "outcomes", "cells"),
        [
            ({}, {}, "passes | passes"),
            ({"x": "fault b"}, {}, "fails 1 of 2 cases: fault b | passes"),
            ({"x": "fault b", "y": "fault b"}, {}, "fails: fault b | passes"),
            ({}, {"x": "torch unlike"}, "**not as marked: x** | passes"),
            ({}, {"x": "ours failed"}, "passes | **fails x**"),
        ],
    )
    def test_outcomes(self, fails, outcomes, cells) -> None:
        test = MarkedTest("a.py::b", [], True, fails=fails, outcomes=outcomes, cases=2)
        assert f"| [b](../a.py) | {cells} |" in tables({test.path: test})


class TestFaults:
    def test_a_test_that_fails_as_marked(self) -> None:
        check_fault("fault b", "twice", ValueError("it is twice"))

    @pytest.mark.parametrize(
        ("error", "message"),
        [(None, "torch passes.*fault b"), (ValueError("other"), "otherwise.*ValueError: other")],
    )
    def test_a_test_that_does_not(self, error, message) -> None:
        with pytest.raises(AssertionError, match=message):
            check_fault("fault b", "twice", error)
