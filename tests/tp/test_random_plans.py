"""Random models under random plans compute what the plain model does, on simulated ranks.

A failure prints the case; ``run(Case(...))`` of it is the same without hypothesis.
"""

import hypothesis
import pytest
from _support.sweeps import SETTINGS
from _support.tp.random_plans import Case, RandomLm, batch_of, cases, loss, plan_of
from hypothesis import given, settings

from parallel3d.mesh import MeshLayout
from parallel3d.testing import assert_parity

pytestmark = pytest.mark.slow


def run(case: Case) -> None:
    replicate, shard, tp = case.mesh
    assert_parity(
        lambda: RandomLm(case),
        lambda index: batch_of(case, index),
        MeshLayout(replicate=replicate, shard=shard, tp=tp),
        loss=loss,
        steps=2,
        fp32=False,
        tp_plan=plan_of(case),
    )


@settings(SETTINGS, max_examples=4, derandomize=True)
@given(cases)
def test_few(case: Case) -> None:
    run(case)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_many(seed: int) -> None:
    """150 in all, 25 for each seed."""

    @hypothesis.seed(seed)
    @settings(SETTINGS, max_examples=25)
    @given(cases)
    def examples(case: Case) -> None:
        run(case)

    examples()
