"""verify names the module in which a fault was planted."""

import functools
from pathlib import Path

import pytest
from _support.testing.verify_faults import FAULTS, Fault, table

from parallel3d import MeshLayout
from parallel3d.testing import Difference, first_difference

DOCS = Path(__file__).parents[2] / "docs" / "verify.md"


@functools.cache
def found(index: int) -> Difference | None:
    """What verify finds of a fault."""
    fault = FAULTS[index]
    return first_difference(fault.build, fault.batch, MeshLayout(*fault.mesh), **fault.options)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, id=fault.title.replace(" ", "-"), marks=[pytest.mark.slow] * (i % 4 > 0)
        )
        for i, fault in enumerate(FAULTS)
    ],
)
def test_names_the_module(fault: Fault) -> None:
    difference = found(FAULTS.index(fault))
    assert difference is not None
    assert (difference.module, difference.kind) == (fault.module, fault.kind), str(difference)
    assert difference.difference > difference.bound


def test_at_least_twenty_faults_of_different_kinds() -> None:
    assert len(FAULTS) >= 20
    assert len({fault.title for fault in FAULTS}) == len(FAULTS)
    assert len({fault.kind for fault in FAULTS}) >= 7


def test_the_docs_have_the_table_and_the_count() -> None:
    text = DOCS.read_text()
    assert table() in text
    assert f"names the right module in all {len(FAULTS)} of {len(FAULTS)}" in text
