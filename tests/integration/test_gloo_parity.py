"""The oracle on real processes: asynchronous gloo collectives, prefetch and the two-stage reduction."""

import functools

import pytest
from models import LM_PLAN, Lm, lm_loss, tokens
from torch._dynamo.utils import counters

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
    )
    return result.grads


def compiled_parity(backend: str, checkpointing: bool) -> dict[str, float]:
    """The same with each block compiled; and no graph is broken or built anew after the first step."""
    counters.clear()
    result = assert_parity(
        functools.partial(Lm, layers=2),
        tokens,
        MeshLayout(1, 2, 2),
        loss=lm_loss,
        tp_plan=LM_PLAN,
        steps=3,
        fp32=False,
        compile=backend,
        activation_checkpointing=checkpointing,
    )
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2
    return result.grads


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks(gloo_pool, checkpointing: bool) -> None:
    results = gloo_pool.run(compiled_parity, "aot_eager", checkpointing, world_size=4)
    assert all(0 <= grads["float64"] < 1e-12 for grads in results)


@pytest.mark.parametrize("defer", ["nothing", "all_reduce", "sync"])
@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 1), (1, 4, 2), (2, 2, 2)], ids=str)
def test_meshes(gloo_pool, mesh: tuple[int, int, int], defer: str) -> None:
    micro_batches = 1 if defer == "nothing" else 3
    size = mesh[0] * mesh[1] * mesh[2]
    results = gloo_pool.run(parity, mesh, micro_batches, defer, world_size=size)
    assert len(results) == size
    assert all(0 <= grads["float64"] < 1e-12 for grads in results)
