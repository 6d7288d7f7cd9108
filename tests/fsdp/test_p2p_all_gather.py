"""Large all-gathers over gloo, as messages: the same as gloo's own, and recorded as one."""

from datetime import timedelta
from functools import partial

import pytest
import torch
from _support.fsdp.wrapped import cpu_mesh
from _support.models import Lm, lm_loss, tokens
from torch import distributed as dist

from parallel3d import MeshLayout
from parallel3d.fsdp import collectives, fully_shard
from parallel3d.fsdp.collectives import all_gather
from parallel3d.testing import assert_parity, record_collectives


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gathers(dtype: torch.dtype) -> None:
    """Several under way on one group, waited for in another order; of each rank's own numbers."""
    group, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    size = collectives.LEAST_BYTES // dtype.itemsize + 5
    base = torch.arange(size) % 50
    parts = [(base + rank + 10 * i).to(dtype) for i in range(3)]
    outputs = [torch.empty(n * size, dtype=dtype) for _ in parts]
    works = [all_gather([o], [p], group, unit="u") for o, p in zip(outputs, parts, strict=True)]
    assert all(isinstance(work, collectives.Works) for work in works)
    for work in reversed(works):
        work.wait()
    for i, output in enumerate(outputs):
        for k, row in enumerate(output.view(n, -1)):
            assert torch.equal(row.float(), (base + k + 10 * i).to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_gathers(gloo_pool, dtype):
    gloo_pool.run(gathers, dtype, world_size=3)


def trained() -> tuple[float, list]:
    """With every gather by messages: the gradients' difference, and the collectives of a step."""
    seen = []
    for least in (0, 2**60):
        collectives.LEAST_BYTES = least
        result = assert_parity(
            partial(Lm, layers=3), tokens, MeshLayout(2, 2, 1), loss=lm_loss, apply=shard, steps=2
        )
        mesh = cpu_mesh(2, 2)
        model = shard(Lm(layers=3), mesh)
        with record_collectives(mesh) as recorder:
            lm_loss(model, tokens(dist.get_rank())).backward()
        assert result.grads["float64"] < 1e-9
        seen.append(recorder.calls)
    collectives.LEAST_BYTES = 2**17
    by_messages, by_gloo = seen
    assert by_messages == by_gloo
    return len([call for call in by_gloo if call.op == "all_gather"])


@pytest.mark.slow
def test_training_records_the_same_collectives(gloo_pool):
    assert min(gloo_pool.run(trained, world_size=4)) > 3


def one_leaves() -> str:
    """What a rank is told whose peer has gone."""
    part = torch.zeros(collectives.LEAST_BYTES)
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return ""
    work = all_gather([part.new_empty(2 * part.numel())], [part], group, unit="u")
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    return "came"


@pytest.mark.slow
def test_a_peer_that_does_not_come(gloo_pool):
    """All messages are waited for, and the first failure raised."""
    told = gloo_pool.run(one_leaves, world_size=2)
    assert told[0] not in ("", "came")
