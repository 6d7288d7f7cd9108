"""What the tests of bad input share: the case, its check, and models to be wrong about."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

from _support.models import Lm, tokens
from _support.snapshot import Snapshot
from parallel3d import MeshLayout, Parallel3dError, build_mesh, parallelize

Call = Callable[[nn.Module, DeviceMesh], Any]

TWO_BY_TWO = MeshLayout(shard=2, tp=2)
DATA = MeshLayout(shard=4)
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class Case:
    """One wrong call.

    Attributes:
        call: what is done with the model, on a mesh of ``layout``.
        build: makes the model.
        inputs: of its forward, compared before and after.
    """

    call: Call
    layout: MeshLayout = TWO_BY_TWO
    build: Callable[[], nn.Module] = Lm
    inputs: tuple[torch.Tensor, ...] = (tokens(0),)


Table = dict[type[Parallel3dError], dict[str, Case | Call]]
"""The exact class of an error -> a pattern for its message (the value, and a way out) -> what raises it."""


def each_of(table: Table) -> pytest.MarkDecorator:
    """Parametrizes a test by ``error``, ``says`` and ``case``."""
    rows = [
        (error, says, each if isinstance(each, Case) else Case(each))
        for error, calls in table.items()
        for says, each in calls.items()
    ]
    return pytest.mark.parametrize(("error", "says", "case"), rows)


def check(case: Case, error: type[Parallel3dError], says: str, mesh: DeviceMesh) -> None:
    """Makes the call; the model stays as it was."""
    torch.manual_seed(0)
    model = case.build()
    before = Snapshot(model, *case.inputs)
    with pytest.raises(Parallel3dError) as caught:
        case.call(model, mesh)
    assert type(caught.value) is error
    assert re.search(says, str(caught.value), re.DOTALL), (says, str(caught.value))
    before.check()


def given(tp_plan: Any = None, **options: Any) -> Call:
    """``parallelize`` with these arguments."""
    return lambda model, mesh: parallelize(model, mesh, tp_plan, **options)


class With(nn.Module):
    """Linears around a parameter, buffer or module of the test's choice."""

    def __init__(self, **extra: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        for name, value in extra.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """A world of one real rank: parallel models compute real numbers in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield build_mesh(MeshLayout(), device_type="cpu")
    finally:
        dist.destroy_process_group()
