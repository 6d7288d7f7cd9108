"""seed_step: random numbers as a function of (seed, step, micro-batch, coordinates), on any mesh."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch.distributed import DeviceMesh

from parallel3d._util.arguments import as_count
from parallel3d.mesh.axes import axis_named
from parallel3d.mesh.build import read_layout


@dataclass(frozen=True)
class StepSeed:
    """The arguments of a ``seed_step`` call, as checkpoints store them."""

    seed: int
    step: int
    micro_batch: int


_last: StepSeed | None = None


def seed_step(mesh: DeviceMesh | None = None, *, seed: int, step: int, micro_batch: int = 0) -> int:
    """Seeds this rank's default generators for one micro-batch of one step.

    Called before each forward it makes dropout and the like depend on these integers alone, so that a run
    continued from a checkpoint draws the same numbers. Ranks of other tokens (replicate x shard x cp) draw
    differently, the tp ranks among them alike (``parallel3d.tp`` lets them differ where they hold different
    parts). ``checkpoint.save`` stores the integers.

    Args:
        mesh: from ``build_mesh``; None for one process.
        seed, step, micro_batch: not negative.

    Returns:
        The seed given to ``torch.manual_seed``: the first 8 bytes of BLAKE2b of
        (seed, step, micro-batch, place in replicate x shard x cp), without the sign bit.
    """
    key = StepSeed(
        as_count("seed", seed), as_count("step", step), as_count("micro_batch", micro_batch)
    )
    return set_step_seed(key, number_of(key, mesh))


def number_of(key: StepSeed, mesh: DeviceMesh | None) -> int:
    """Returns the seed for ``torch.manual_seed`` that ``key`` gives on this rank."""
    place = 0
    if mesh is not None:
        read_layout(mesh)  # checks that its axes are known, and in order
        at = zip(mesh.mesh_dim_names or (), mesh.shape, mesh.get_coordinate() or (), strict=False)
        for name, size, coordinate in at:
            axis = axis_named(name)
            if axis is not None and axis.has_other_tokens:
                place = place * size + coordinate
    return number_at(key, place)


def number_at(key: StepSeed, place: int) -> int:
    """Returns the seed that ``key`` gives at index ``place`` in replicate x shard x cp (the data rank)."""
    text = f"{key.seed} {key.step} {key.micro_batch} {place}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_step_seed(key: StepSeed, number: int) -> int:
    """Seeds the default generators with ``number``, and records ``key`` as the last step's seed."""
    global _last
    torch.manual_seed(number)
    _last = key
    return number


def last_step_seed() -> StepSeed | None:
    """Returns the arguments of the last ``seed_step`` call in this process."""
    return _last
