"""Attention on the ranks of ``cp`` equals plain attention of the whole sequences, in float64."""

import pytest
from _support.cp.reference import CASES, check

from parallel3d.testing.worlds import local_world


@pytest.mark.parametrize("kind", ["ulysses", "gather", "ring"])
@pytest.mark.parametrize("name", CASES)
def test_equal_on_simulated_ranks(name: str, kind: str) -> None:
    check(local_world, 2, name, kind, True)
    check(local_world, 2, name, kind, False)
