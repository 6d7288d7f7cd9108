"""A model whose positions don't see each other, and its parts of sequences, for tests of the axis cp."""

from typing import Any

import torch
from torch.distributed import DeviceMesh

from _support.models import LM_PLAN, Lm, tokens
from parallel3d import MeshLayout
from parallel3d.mesh.build import read_layout

Sizes = tuple[int, int, int, int]

LENGTH = 8


def layout_of(sizes: Sizes) -> MeshLayout:
    """Returns the layout of (replicate, shard, cp, tp)."""
    replicate, shard, cp, tp = sizes
    return MeshLayout(replicate, shard, tp, cp=cp)


def plan_of(sizes: Sizes) -> dict | None:
    return LM_PLAN if sizes[3] > 1 else None


def build() -> Lm:
    return Lm(dim=6, hidden=10)


def batch(index: int) -> torch.Tensor:
    return tokens(index, length=LENGTH)


def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """A mean over all tokens: of two halves of the sequences it is the mean of their losses."""
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def shard_batch(inputs: Any, mesh: DeviceMesh) -> Any:
    """Returns this cp rank's part of dim 1 of each tensor."""
    if read_layout(mesh).cp == 1:
        return inputs
    size, rank = mesh["cp"].size(), mesh.get_local_rank("cp")

    def cut(whole: torch.Tensor) -> torch.Tensor:
        part = whole.shape[1] // size
        return whole.narrow(1, rank * part, part)

    if isinstance(inputs, dict):
        return {name: cut(whole) for name, whole in inputs.items()}
    return tuple(cut(whole) for whole in inputs)
