"""The oracle on real processes: asynchronous gloo collectives, prefetch and the two-stage reduction."""

import functools
import itertools

import pytest
from _support.models import LM_PLAN, Lm, lm_loss, tokens

from parallel3d import MeshLayout
from parallel3d.testing import assert_parity


def parity(sizes: tuple[int, int, int], micro_batches: int, defer: str) -> dict[str, float]:
    """Runs on every rank; returns the gradients' differences."""
    build = functools.partial(Lm, hidden=21, layers=3)
    result = assert_parity(
        build,
        tokens,
        MeshLayout(*sizes),
        loss=lm_loss,
        tp_plan=LM_PLAN,
        micro_batches=micro_batches,
        defer=defer,
        steps=3,
        fp32=sizes == (1, 4, 2),  # once is enough to see that it does as well
    )
    return result.grads


MESHES = [(1, 4, 1), (2, 2, 1), (1, 4, 2), (2, 2, 2)]
WAYS = list(itertools.product(MESHES, ["nothing", "all_reduce", "sync"]))
# Each mesh and each way to accumulate; the rest by -m full.
MARKS = {
    ((1, 4, 1), "nothing"): (),
    ((2, 2, 1), "sync"): (),
    ((1, 4, 2), "nothing"): pytest.mark.slow,
    ((2, 2, 2), "all_reduce"): (),
}


@pytest.mark.parametrize(
    ("mesh", "defer"),
    [pytest.param(*way, marks=MARKS.get(way, pytest.mark.full)) for way in WAYS],
    ids=str,
)
def test_meshes(gloo_pool, mesh: tuple[int, int, int], defer: str) -> None:
    micro_batches = 1 if defer == "nothing" else 3
    size = mesh[0] * mesh[1] * mesh[2]
    results = gloo_pool.run(parity, mesh, micro_batches, defer, world_size=size)
    assert len(results) == size
    assert all(0 <= grads["float64"] < 1e-12 for grads in results)
