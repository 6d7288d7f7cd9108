"""One process with one of torchao's optimizers, or Adafactor, beside shards that get the same gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

import parallel3d as p3d
from _support.ep import models as mixtures
from _support.models import LM_PLAN, Lm
from parallel3d import Checks, MeshLayout, Sharding
from parallel3d.optim import local

CLASSES = [AdamW8bit, AdamW4bit, AdamWFp8, torch.optim.Adafactor]
MESHES = [
    {"shard": 2},
    {"tp": 2},
    {"replicate": 2},
    {"shard": 4},
    {"replicate": 2, "shard": 2},
    {"shard": 2, "tp": 2},
    {"shard": 2, "cp": 2},
    {"shard": 4, "ep": 2},
    {"tp": 4},
    {"shard": 6},
    {"shard": 3, "tp": 2},
    {"replicate": 3, "shard": 2},
]
STEPS = 3


class Model(nn.Module):
    """Whole blocks, parts of blocks, odd sizes, vectors, small parameters, experts. It isn't run."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(256, 20)
        self.odd = nn.Linear(67, 64)
        with mock.patch.object(mixtures, "HIDDEN", 128):
            self.experts = mixtures.Batched(4)
        self.lm = Lm(dim=48, hidden=192, layers=1, vocab=4352)

    def forward(self, ids: Tensor) -> Tensor:
        """As Lm's."""
        return self.lm(ids)


PLAN = {f"lm.{name}": style for name, style in LM_PLAN.items()}


def build() -> Model:
    """The same each time."""
    torch.manual_seed(0)
    return Model()


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Whole gradients by name, of sizes from 1e-4 to 1."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(param.shape, generator=generator)
        * 10.0
        ** torch.randint(-4, 1, (param.shape[0], *[1] * (param.dim() - 1)), generator=generator)
        for name, param in model.named_parameters()
    }


@contextmanager
def eager() -> Iterator[None]:
    """torchao compiles its step, which takes minutes for many shapes: here it runs as it is."""
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        yield


def plain(cls: Any, steps: int = STEPS, **options: Any) -> tuple[nn.Module, Any]:
    """The model and its optimizer on one process, after some steps."""
    model = build()
    optimizer = cls(model.parameters(), **{"lr": 0.01, **options})
    for step in range(steps):
        for name, grad in gradients(model, step).items():
            model.get_parameter(name).grad = grad
        with eager():
            optimizer.step()
    return model, optimizer


def sharded(
    cls: Any,
    sizes: dict[str, int],
    block: int | None,
    model: nn.Module | None = None,
    hfsdp: bool = False,
    **options: Any,
) -> Any:
    """The model on a mesh, and ``optim.local`` of the class."""
    layout = MeshLayout(**sizes)
    mesh = p3d.build_mesh(layout, device_type="cpu")
    model = p3d.parallelize(
        build() if model is None else model,
        mesh,
        PLAN if layout.tp > 1 else None,
        fsdp=Sharding(block=block, shard_optimizer_over_replicate=hfsdp),
        checks=Checks(audit=False),
    )
    return model, local(cls, model, **{"lr": 0.01, **options})


def step_on(model: nn.Module, optimizer: Any, whole: dict[str, Tensor]) -> None:
    """A step with ``whole`` gradients."""
    for name, param in model.named_parameters():
        param.grad = p3d.fsdp.chunk(
            whole[name].to(param.dtype), param.device_mesh, param.placements
        )
    with eager():
        optimizer.step()
