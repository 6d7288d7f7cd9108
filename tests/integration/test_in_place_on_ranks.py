"""Parameters in place on real processes: gloo, which has one call for each, all of them counted as one."""

import functools

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import nn

from parallel3d import MeshLayout, build_mesh
from parallel3d.fsdp import fully_shard, param
from parallel3d.testing import assert_parity, record_collectives


def parity(sizes: tuple[int, int, int], hidden: int) -> dict[str, float]:
    """Runs on every rank; returns the gradients' differences."""
    least, param.CPU_BYTES = param.CPU_BYTES, 0
    try:
        return assert_parity(
            functools.partial(Lm, hidden=hidden),
            tokens,
            MeshLayout(*sizes),
            loss=lm_loss,
            tp_plan=LM_PLAN,
            micro_batches=2,
            steps=3,
            fp32=False,
        ).grads
    finally:
        param.CPU_BYTES = least


def calls() -> list[tuple[str, int]]:
    """(operation, bytes) of a step, on every rank."""
    least, param.CPU_BYTES = param.CPU_BYTES, 0
    try:
        mesh = build_mesh(MeshLayout(shard=4), device_type="cpu")
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3))
        fully_shard(model, mesh=mesh)
        with record_collectives(mesh) as recorder:
            model(torch.randn(2, 8)).sum().backward()
        return [(c.op, c.bytes) for c in recorder.calls if c.unit]
    finally:
        param.CPU_BYTES = least


# 23 rows are 12 on one rank of tp and 11 on the other: in place, and gathered half-way, on the first alone.
@pytest.mark.parametrize(
    ("sizes", "hidden"),
    [((1, 4, 1), 24), ((2, 2, 1), 24), ((1, 2, 2), 24), ((1, 2, 2), 23)],
    ids=str,
)
def test_numbers_are_the_plain_models(gloo_pool, sizes, hidden):
    results = gloo_pool.run(parity, sizes, hidden, world_size=4)
    assert all(0 <= grads["float64"] < 1e-12 for grads in results)


def test_one_call_of_each_kind(gloo_pool):
    size = (8 * 16 + 16 + 16 * 8 + 8 + 4 * 8 + 4) * 4  # 3 rows are 4 on the wire
    for made in gloo_pool.run(calls, world_size=4):
        assert made == [("all_gather", size), ("all_to_all", size)]
