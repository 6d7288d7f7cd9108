"""seed_step: a pure function of integers and coordinates."""

import hashlib
from typing import Any

import pytest
import torch

import parallel3d as p3d
from parallel3d import MeshLayout
from parallel3d.errors import Parallel3dError
from parallel3d.mesh.seeding import last_step_seed
from parallel3d.testing import fake_world


def seeds(sizes: tuple[int, int, int], **numbers: int) -> dict[tuple[int, int, int], int]:
    """By (replicate, shard, tp)."""
    found = {}
    world = sizes[0] * sizes[1] * sizes[2]
    for rank in range(world):
        with fake_world(rank, world):
            mesh = p3d.build_mesh(MeshLayout(*sizes), device_type="cpu")
            found[tuple(mesh.get_coordinate())] = p3d.seed_step(mesh, **numbers)
    return found  # type: ignore[return-value]


def test_by_coordinates() -> None:
    """tp ranks of one data rank alike, data ranks all different."""
    found = seeds((2, 2, 2), seed=1, step=2)
    for replicate, shard, tp in found:
        assert found[replicate, shard, tp] == found[replicate, shard, 0]
    assert len(set(found.values())) == 4


def test_meshes_of_the_same_data_ranks() -> None:
    """What a data rank draws doesn't depend on how data ranks are laid out, nor on tp."""
    a, b, c = (seeds(sizes, seed=3, step=4) for sizes in ((4, 1, 1), (1, 4, 1), (2, 2, 1)))
    by_rank = [[found[key] for key in sorted(found)] for found in (a, b, c)]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    wide = seeds((1, 4, 2), seed=3, step=4)
    assert [wide[0, shard, 1] for shard in range(4)] == by_rank[0]


def test_what_it_is() -> None:
    digest = hashlib.blake2b(b"7 8 9 0", digest_size=8).digest()
    want = int.from_bytes(digest, "little") >> 1
    assert p3d.seed_step(seed=7, step=8, micro_batch=9) == want < 1 << 63
    assert torch.initial_seed() == want
    assert seeds((1, 1, 1), seed=7, step=8, micro_batch=9) == {(0, 0, 0): want}


def test_pure() -> None:
    first = p3d.seed_step(seed=1, step=1)
    a = torch.rand(4)
    torch.rand(17)
    assert p3d.seed_step(seed=1, step=1) == first and torch.equal(torch.rand(4), a)
    numbers = {p3d.seed_step(seed=s, step=t, micro_batch=m) for s in range(5) for t in range(5)
               for m in range(5)}  # fmt: skip
    assert len(numbers) == 125
    # Numbers are kept apart: not "1 11" as "11 1".
    assert p3d.seed_step(seed=1, step=11) != p3d.seed_step(seed=11, step=1)
    assert p3d.seed_step(seed=1 << 70, step=0) != p3d.seed_step(seed=0, step=0)


def test_remembered() -> None:
    p3d.seed_step(seed=4, step=5, micro_batch=6)
    last = last_step_seed()
    assert last is not None and (last.seed, last.step, last.micro_batch) == (4, 5, 6)


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"step": 1.0}, {"micro_batch": True}, {"step": "1"}]
)
def test_wrong_numbers(wrong: dict[str, Any]) -> None:
    state = torch.get_rng_state()
    with pytest.raises(Parallel3dError, match=next(iter(wrong))):
        p3d.seed_step(**({"seed": 1, "step": 1} | wrong))
    assert torch.equal(torch.get_rng_state(), state)
