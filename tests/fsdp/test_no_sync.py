"""no_sync(): backwards that reduce nothing, and switches that are put back."""

import pytest
import torch
from _support.models import LM_PLAN, Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.fsdp.inspect import units_of
from parallel3d.testing import fake_world, local_world, shards_of


def plain_grads(samples: list[int], data_size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Lm().double()
    for sample in samples:
        for rank in range(data_size):
            (lm_loss(model, tokens(10 * sample + rank)) / data_size).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def parallel(layout: MeshLayout) -> nn.Module:
    torch.manual_seed(0)
    model = Lm().double()
    return parallelize(model, build_mesh(layout, device_type="cpu"), LM_PLAN)


def accumulate(model: nn.Module, backward) -> None:
    """Samples 0 to 3: two without sync, one nested, one with."""
    with model.no_sync():
        backward(0)
        with model.no_sync():
            backward(1)
        backward(2)
    backward(3)


def check(model: nn.Module, layout: MeshLayout) -> None:
    expected = plain_grads([0, 1, 2, 3], layout.data_size)
    for name, p in model.named_parameters():
        for rank, box, local in shards_of(p.grad):
            torch.testing.assert_close(
                local, expected[name][box], rtol=0, atol=1e-12, msg=f"{name} on rank {rank}"
            )


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_parity(sizes) -> None:
    layout = MeshLayout(*sizes)
    with local_world(4) as world:
        model = parallel(layout)

        def backward(sample: int) -> None:
            with world.paused():
                ids = [tokens(10 * sample + layout.data_rank(r)) for r in range(4)]
            lm_loss(model, world.map(lambda r: ids[r])).backward()

        accumulate(model, backward)
        with world.paused():
            check(model, layout)


def on_ranks(sizes: tuple[int, int, int]) -> None:
    layout = MeshLayout(*sizes)
    model = parallel(layout)
    rank = layout.data_rank(dist.get_rank())
    accumulate(model, lambda sample: lm_loss(model, tokens(10 * sample + rank)).backward())
    check(model, layout)


@pytest.mark.smoke
def test_processes(gloo_pool) -> None:
    gloo_pool.run(on_ranks, (1, 2, 2), world_size=4)


def test_switches_are_put_back_as_they_were() -> None:
    with fake_world(0, 4):
        model = parallel(MeshLayout(2, 2, 1))
        units = list(units_of(model, recurse=True))
        model.layers[0].set_requires_gradient_sync(False)
        model.layers[1].set_requires_all_reduce(False)
        before = [(unit.sync, unit.all_reduce) for unit in units]
        assert len(set(before)) == 3
        with pytest.raises(ZeroDivisionError), model.no_sync():
            assert not any(unit.sync or unit.all_reduce for unit in units)
            raise ZeroDivisionError
        assert [(unit.sync, unit.all_reduce) for unit in units] == before
        with model.layers[0].no_sync():  # of an inner unit: its own alone
            assert [unit.sync for unit in units].count(False) == 1
