"""Of tests that train with other libraries, .ci/run has one case each; ``-m full`` has the others too."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the second case and later ones of a slow test ``full``; of rows, those of the same library."""
    seen: set[tuple[str, str]] = set()
    for item in items:
        if item.get_closest_marker("slow") is None or "tests/integrations/" not in item.nodeid:
            continue
        name, _, case = item.nodeid.partition("[")
        case = case.partition(":")[0] if name.endswith("::test_row") else ""
        if (name, case) in seen:
            item.add_marker(pytest.mark.full)
        seen.add((name, case))
