"""A change of cp is a resharding like any other: what one mesh saves, another loads, and trains on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from _support.checkpoint.dcp_models import check_equal, everything
from _support.cp_axis import Sizes, batch, build, layout_of, loss, plan_of, shard_batch
from torch.distributed import DeviceMesh

import parallel3d as p3d

Whole = dict[str, Any]


def made(sizes: Sizes) -> tuple[torch.nn.Module, torch.optim.Optimizer, DeviceMesh]:
    torch.manual_seed(sum(sizes))  # each mesh begins with other weights
    mesh = p3d.build_mesh(layout_of(sizes), device_type="cpu")
    model = p3d.parallelize(build().double(), mesh, plan_of(sizes))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), mesh


def trained(sizes: Sizes, model, optimizer, mesh, step: int) -> Whole:
    """One step on the whole batch, whatever the mesh; returns weights and the optimizer's state, whole."""
    (ids,) = shard_batch((batch(step),), mesh)
    loss(model, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    return everything(model, optimizer)


def save(path: str, sizes: Sizes) -> tuple[Whole, Whole]:
    """Returns what was saved, and what it is after one more step."""
    model, optimizer, mesh = made(sizes)
    trained(sizes, model, optimizer, mesh, 0)
    p3d.checkpoint.save(path, model, optimizer, step=1)
    return everything(model, optimizer), trained(sizes, model, optimizer, mesh, 1)


def load(path: str, sizes: Sizes, saved_on: Sizes, want: tuple[Whole, Whole]) -> None:
    model, optimizer, mesh = made(sizes)
    info = p3d.checkpoint.load(path, model, optimizer)
    assert info.mesh == layout_of(saved_on).as_dict()
    assert (info.rng == "restored") == (sizes == saved_on), (info.rng, sizes, saved_on)
    check_equal(everything(model, optimizer), want[0])
    found = trained(sizes, model, optimizer, mesh, 1)
    torch.testing.assert_close(found, want[1], rtol=1e-9, atol=1e-12)


def there_and_back(path: str, a: Sizes, b: Sizes) -> None:
    """One call for both: starting groups takes most of the time."""
    for there, back in ((a, b), (b, a)):
        folder = f"{path}/{'-'.join(map(str, there))}"
        want = save(folder, there)
        load(folder, back, there, want)
        load(folder, there, there, want)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param((1, 2, 2, 1), (1, 1, 2, 2), marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 1), (1, 1, 4, 1), marks=pytest.mark.slow),
        pytest.param((2, 1, 2, 1), (1, 4, 1, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_there_and_back(gloo_pool, tmp_path: Path, a: Sizes, b: Sizes) -> None:
    gloo_pool.run(there_and_back, str(tmp_path), a, b, world_size=4)
