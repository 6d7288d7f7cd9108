"""What the caching allocator reserves: its rules one by one, and the whole of trainings on an H200."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

import parallel3d as p3d
from parallel3d.tools.dryrun import record
from parallel3d.tools.dryrun.memory import CachingAllocator
from parallel3d.tools.dryrun.result import from_json, to_json

MIB = 2**20


def taken(*sizes: float, expandable: bool = False) -> tuple[float, int]:
    """MiB and segments for tensors of so many MiB that are there together."""
    allocator = CachingAllocator(expandable=expandable)
    for size in sizes:
        allocator.allocate(int(size * MIB))
    return allocator.reserved / MIB, allocator.segments


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((0.5,), (2, 1)),  # small ones share segments of 2 MiB
        ((1, 1), (2, 1)),
        ((1, 1, 0.1), (4, 2)),
        ((1.5,), (20, 1)),  # those of up to 10 MiB segments of 20
        ((9, 9), (20, 1)),
        ((9, 9, 9), (40, 2)),
        ((10,), (10, 1)),  # larger ones have their own, in steps of 2
        ((10.5, 33), (46, 2)),
        ((0.5, 1.5, 33), (56, 3)),
    ],
    ids=str,
)
def test_segments(sizes: tuple[float, ...], wanted: tuple[float, int]) -> None:
    assert taken(*sizes) == wanted


def test_what_is_freed_is_used_again_on_its_stream() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(30 * MIB, stream=1)
    allocator.free(block)
    allocator.allocate(30 * MIB, stream=2)
    assert (allocator.reserved, allocator.segments) == (60 * MIB, 2)
    allocator.allocate(20 * MIB, stream=1)  # the smallest that fits is divided
    allocator.allocate(10 * MIB, stream=1)
    assert allocator.segments == 2
    allocator.allocate(2 * MIB, stream=1)
    assert allocator.segments == 3


def test_a_little_more_than_what_is_asked_for_stays_whole() -> None:
    """A rest of a MiB is no block of its own."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(31 * MIB))  # of 32
    allocator.allocate(31 * MIB)
    allocator.allocate(MIB // 2)
    assert allocator.reserved == 34 * MIB


def test_neighbours_are_joined() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(10 * MIB - 512) for _ in range(2)]  # of one segment of 20
    for block in blocks:
        allocator.free(block)
    allocator.allocate(20 * MIB)
    assert allocator.segments == 1


def test_the_smallest_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(100 * MIB), allocator.allocate(40 * MIB)
    allocator.free(large)
    allocator.free(small)
    for size in (40, 100):
        allocator.allocate(size * MIB)
    assert allocator.reserved == 140 * MIB


def test_a_segment_that_grows() -> None:
    """One for each stream, as large as what was alive with the holes in it."""
    assert taken(9, 9, 9, expandable=True) == (40, 1)
    assert taken(0.5, 1.5, 33, expandable=True) == (42, 2)
    allocator = CachingAllocator(expandable=True)
    first, last = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.free(last)
    allocator.allocate(50 * MIB)  # its end, and more
    allocator.free(first)
    allocator.allocate(60 * MIB)  # the hole is too small
    assert (allocator.reserved, allocator.segments) == (160 * MIB, 1)


@pytest.mark.parametrize("expandable", [False, True])
def test_no_byte_is_given_twice(expandable: bool) -> None:
    """Of random sizes in a random order; at the end it is all free, and joined."""
    draw = random.Random(0)
    allocator = CachingAllocator(expandable=expandable)
    alive: list = []
    for _ in range(3000):
        if alive and draw.random() < 0.5:
            allocator.free(alive.pop(draw.randrange(len(alive))))
        else:
            size = int(2 ** draw.uniform(0, 26))
            alive.append(allocator.allocate(size, draw.randrange(2)))
            assert size <= alive[-1].size
        spans = sorted((*block.pool, block.start, block.start + block.size) for block in alive)
        for one, other in pairwise(spans):
            assert one[:2] != other[:2] or one[3] <= other[2]
    assert sum(block.size for block in alive) <= allocator.reserved
    for block in alive:
        allocator.free(block)
    free = [size for blocks in allocator._free.values() for size, *_ in blocks]
    assert sum(free) == allocator.reserved
    assert len(free) == allocator.segments


def train(steps: int, memory: str) -> None:
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=4))
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))
    model.forward = lambda x: nn.Sequential(*model.layers)(x)  # type: ignore[method-assign]
    p3d.parallelize(model, mesh, memory=memory)  # type: ignore[arg-type]
    p3d.materialize(model, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_of_a_dry_run() -> None:
    """At least what is alive, as much after more steps; none on CPUs; kept in JSON."""
    for memory in ("on demand", "static"):
        run, longer = (record(lambda n=n, m=memory: train(n, m), 4) for n in (2, 4))
        found = run.reserved
        assert found is not None and found == longer.reserved
        assert run.peak.bytes <= found.expandable <= found.bytes <= run.peak.bytes + 40 * MIB
        assert from_json(to_json(run)) == run
    assert record(lambda: train(1, "static"), 4, backend="gloo").reserved is None
