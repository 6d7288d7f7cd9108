"""What one mesh saves, every other loads: bit by bit, and trains on."""

from pathlib import Path

import pytest
import torch
from reshard_models import adamw, build, same, train, whole
from torch import distributed as dist

import parallel3d as p3d
from parallel3d.testing import GlooPool

LAYOUTS = [(2, 2, 2), (1, 4, 2), (8, 1, 1), (1, 1, 4), (1, 1, 1)]
FULL = [(1, 8, 1), (1, 2, 4), (2, 1, 4), (4, 2, 1), (3, 1, 2), (1, 3, 1)]


def world(sizes: tuple[int, int, int]) -> int:
    return sizes[0] * sizes[1] * sizes[2]


def folder(path: str, sizes: tuple[int, int, int]) -> str:
    return f"{path}/{'-'.join(map(str, sizes))}"


def save_all(sizes, path: str, hfsdp: bool, kind: str) -> None:
    model = build(sizes, hfsdp=hfsdp, seed=world(sizes) + sizes[1])
    optimizer = adamw(model, kind)
    for step in range(2):
        train(model, optimizer, step)
    p3d.checkpoint.save(folder(path, sizes), model, optimizer, step=2, extra={"position": 34})
    values = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(values, f"{folder(path, sizes)}/whole.pt")


def load_all(sizes, others, path: str, hfsdp: bool, kind: str) -> None:
    fresh = True
    model = build(sizes, hfsdp=hfsdp, seed=0)
    optimizer = adamw(model, kind)
    for other in others:
        info = p3d.checkpoint.load(folder(path, other), model, optimizer)
        assert info.step == 2 and info.extra == {"position": 34}
        want = torch.load(f"{folder(path, other)}/whole.pt", weights_only=True)
        same(whole(model, optimizer), want)
        if fresh:  # without state, then with
            train(model, optimizer, 2)
            fresh = False


def matrix(pool: GlooPool, path: Path, layouts, hfsdp: bool, kind: str) -> None:
    for sizes in layouts:
        pool.run(save_all, sizes, str(path), hfsdp, kind, world_size=world(sizes))
    for sizes in layouts:
        pool.run(load_all, sizes, layouts, str(path), hfsdp, kind, world_size=world(sizes))


def test_all_pairs(gloo_pool: GlooPool, tmp_path: Path) -> None:
    matrix(gloo_pool, tmp_path, LAYOUTS, False, "torch")


def test_hybrid_optimizer_on_local_tensors(gloo_pool: GlooPool, tmp_path: Path) -> None:
    matrix(gloo_pool, tmp_path, [(2, 2, 2), (1, 1, 4), (8, 1, 1)], True, "local")


@pytest.mark.full
@pytest.mark.parametrize(("hfsdp", "kind"), [(False, "torch"), (True, "local")])
def test_more_pairs(gloo_pool: GlooPool, tmp_path: Path, hfsdp: bool, kind: str) -> None:
    matrix(gloo_pool, tmp_path, [*LAYOUTS, *FULL], hfsdp, kind)
