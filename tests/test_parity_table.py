"""docs/parity.md is what the tests' marks give."""

import pytest
from parity_items import CITED, KINDS
from parity_table import MARKED, PAGE, ROOT, MarkedTest, collect, missing_items, tables


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
    assert PAGE.read_text() == tables(tests), "run python tests/parity_table.py"


def test_every_required_item_has_a_test(tests: dict[str, MarkedTest]) -> None:
    assert missing_items(tests) == []


def test_marks_are_well_formed(tests: dict[str, MarkedTest]) -> None:
    for test in tests.values():
        for item in test.items:
            assert item.startswith(tuple(KINDS)), f"{test.path}: {item!r}"
        for fault in test.fails.values():
            assert fault in CITED, f"{test.path}: {fault!r}"
