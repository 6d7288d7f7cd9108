"""What one mesh saves, every other loads: bit by bit, and trains on."""

from pathlib import Path

import pytest
from _support.checkpoint.reshard_models import (
    adamw,
    build,
    fill,
    same_parts,
    same_whole,
    train,
    truth,
)

import parallel3d as p3d
from parallel3d.testing import GlooPool

LAYOUTS = [(2, 2, 2), (1, 4, 2), (8, 1, 1), (1, 1, 4), (1, 1, 1)]
FULL = [(1, 8, 1), (1, 2, 4), (2, 1, 4), (4, 2, 1), (3, 1, 2), (1, 3, 1)]
Sizes = tuple[int, int, int]


def world(sizes: Sizes) -> int:
    return sizes[0] * sizes[1] * sizes[2]


def session(save: list[Sizes], into: list[Sizes], load: list[Sizes], *where) -> None:
    """Saves on the meshes ``save``, then loads on the meshes ``into`` what the meshes ``load`` have saved.

    One call for several meshes of one world: starting their groups, and DTensor's first operations, take most
    of the time.
    """
    path, hfsdp, kind = where
    models = {sizes: build(sizes, hfsdp=hfsdp, seed=0) for sizes in {*save, *into}}
    for sizes in save:
        model, optimizer = models[sizes], adamw(models[sizes], kind)
        if kind == "local":  # whose state is its own, and not to be made by hand
            train(model, optimizer, 0)
        fill(model, optimizer, truth(sizes))
        same_whole(model, truth(sizes))
        folder = f"{path}/{'-'.join(map(str, sizes))}"
        p3d.checkpoint.save(folder, model, optimizer, step=2, extra={"position": 34})
    for sizes in into:
        model, optimizer = models[sizes], adamw(models[sizes], kind)
        for other in load:  # the first time the optimizer has no state, then it has
            folder = f"{path}/{'-'.join(map(str, other))}"
            info = p3d.checkpoint.load(folder, model, optimizer)
            assert info.step == 2 and info.extra == {"position": 34}
            same_parts(model, optimizer, truth(other))
        if sizes == into[0]:
            train(model, optimizer, 2)


def matrix(pool: GlooPool, path: Path, layouts: list[Sizes], hfsdp: bool, kind: str) -> None:
    by_world: dict[int, list[Sizes]] = {}
    for sizes in sorted(layouts, key=world):
        by_world.setdefault(world(sizes), []).append(sizes)
    *others, last = by_world
    where = str(path), hfsdp, kind
    for count in others:
        pool.run(session, by_world[count], [], [], *where, world_size=count)
    pool.run(session, by_world[last], by_world[last], layouts, *where, world_size=last)
    for count in others:
        pool.run(session, [], by_world[count], layouts, *where, world_size=count)


@pytest.mark.slow
def test_a_pair(gloo_pool: GlooPool, tmp_path: Path) -> None:
    matrix(gloo_pool, tmp_path, [(1, 1, 4), (1, 1, 1)], False, "torch")


@pytest.mark.slow
def test_all_pairs(gloo_pool: GlooPool, tmp_path: Path) -> None:
    matrix(gloo_pool, tmp_path, LAYOUTS, False, "torch")


@pytest.mark.full
def test_hybrid_optimizer_on_local_tensors(gloo_pool: GlooPool, tmp_path: Path) -> None:
    matrix(gloo_pool, tmp_path, [(2, 2, 2), (1, 1, 4), (8, 1, 1)], True, "local")


@pytest.mark.full
@pytest.mark.parametrize(("hfsdp", "kind"), [(False, "torch"), (True, "local")])
def test_more_pairs(gloo_pool: GlooPool, tmp_path: Path, hfsdp: bool, kind: str) -> None:
    matrix(gloo_pool, tmp_path, [*LAYOUTS, *FULL], hfsdp, kind)
