"""A row of docs/integrations.md: a program of another library, on our engine and as its peer runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d.fsdp import gather

LIMITS = {"float64": 1e-9, "float32": 1e-4}
"""The largest difference that rounding explains, of losses and of weights after the steps."""
STEPS = 10


class Run(NamedTuple):
    """What a training gave."""

    losses: Sequence[float]  # of each step, over the whole batch
    weights: Mapping[str, torch.Tensor]  # name -> whole tensor, after the last step


class Difference(NamedTuple):
    """How far a run is from another: ``loss`` and ``weights``, each relative to the other's largest value.

    That of weights is the largest over the parameters.
    """

    loss: float
    weights: float


class Result(NamedTuple):
    """What a row measures: ours and the peer's (None if it can't do it), each against one plain process."""

    ours: Difference
    peers: Difference | None


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str  # what it is, such as ``"accelerate: accumulation"``; the library first
    packages: tuple[str, ...]  # the libraries whose versions the table shows
    lines: int  # that a user changes or adds beside the program that he has
    mesh: tuple[int, int, int]  # replicate, shard, tp
    peer: str  # what the program runs on without us, such as ``"FSDP2"``
    run: Callable[..., Result]  # called on every rank of a gloo world of the mesh's size
    arguments: tuple[Any, ...] = ()  # of ``run``
    dtype: str = "float64"  # of the training: the key of ``LIMITS``
    note: str = ""  # what a reader must know

    @property
    def id(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.mesh))}"

    @property
    def installed(self) -> bool:
        """Whether its libraries are: timm has an extra of its own."""
        return all(find_spec(package.replace("-", "_")) is not None for package in self.packages)

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole of a tensor that may be sharded, on every rank."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    if "shard" in (tensor.device_mesh.mesh_dim_names or ()):  # one of ours
        tensor = gather(tensor)
    return tensor.full_tensor().clone()


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> whole value of each parameter, on every rank."""
    return {name: whole(param) for name, param in model.named_parameters()}


def apart(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of two states of the same names."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def difference(run: Run, plain: Run) -> Difference:
    """How far ``run`` is from ``plain``; raises AssertionError unless both have the same steps and names."""
    assert len(run.losses) == len(plain.losses) >= STEPS, (len(run.losses), len(plain.losses))
    assert run.weights.keys() == plain.weights.keys(), run.weights.keys() ^ plain.weights.keys()
    largest = max(map(abs, plain.losses))
    loss = max(abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)) / largest
    whole = max(w.abs().max().item() for w in plain.weights.values())
    apart = [0.0]
    for name, want in plain.weights.items():
        got = run.weights[name].to(want.dtype)
        assert got.shape == want.shape, (name, got.shape, want.shape)
        apart.append((got - want).abs().max().item() / (want.abs().max().item() or whole))
    assert all(map(math.isfinite, (loss, *apart)))
    return Difference(loss, max(apart))


def check(row: Row, result: Result) -> None:
    """Raises AssertionError if ours is farther from the plain run than rounding explains."""
    limit = LIMITS[row.dtype]
    assert result.ours.loss <= limit and result.ours.weights <= limit, (row.id, result)
