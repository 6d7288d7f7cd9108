"""torch's pipeline schedules drive our units: two stages (or twice two) of two shard ranks.

The schedules never call ``.backward()`` on a whole model: they unshard and reshard stages, switch the
gradient synchronisation off, and end a step by calling what they know of torch's own engine. Zero-bubble
ones compute gradients of inputs and of weights apart, and put the latter into ``.grad`` themselves.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from engines import Engine
from torch import distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

BLOCKS, MICRO_BATCHES, DIM = 4, 4, 6


class Block(nn.Module):
    """A norm, a linear and a residual; DIM + 1 rows, so that the ranks' shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, DIM + 1)
        self.down = nn.Linear(DIM + 1, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stage(nn.Sequential):
    """Some of the model's blocks."""


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).double()


def batch(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    make = lambda: torch.randn(  # noqa: E731
        MICRO_BATCHES, DIM, generator=generator, dtype=torch.float64
    )
    return make(), make()


def named_by_stage(indices: list[int], stages: int, model: nn.Sequential) -> Iterator[nn.Module]:
    """The blocks of each stage in ``indices``, of so many."""
    size = BLOCKS // stages
    for index in indices:
        yield Stage(*model[index * size : (index + 1) * size])


def run_schedule(engine: Engine, name: str, reshard_after_forward: bool, scale: bool) -> None:
    """Two steps of SGD; gradients and weights after each equal the plain model's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    schedule_class = getattr(pipelining, name)
    looped = issubclass(schedule_class, pipelining.schedules.PipelineScheduleMulti)
    pp_rank, data_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("shard")
    indices = [pp_rank]
    if looped:
        indices = [pp_rank, 3 - pp_rank if "ZBV" in name else pp_rank + 2]
    stages_in_all = 2 * len(indices)
    plain = build()
    modules = list(named_by_stage(indices, stages_in_all, build()))
    for module in modules:
        for block in module:
            engine.fully_shard(
                block, mesh=mesh["shard"], reshard_after_forward=reshard_after_forward
            )
        engine.fully_shard(module, mesh=mesh["shard"], reshard_after_forward=reshard_after_forward)
    stages = [
        PipelineStage(m, i, stages_in_all, torch.device("cpu"), group=mesh.get_group("pp"))
        for m, i in zip(modules, indices, strict=True)
    ]
    schedule = schedule_class(
        stages if looped else stages[0], MICRO_BATCHES, loss_fn=F.mse_loss, scale_grads=scale
    )
    expected = dict(zip(indices, named_by_stage(indices, stages_in_all, plain), strict=True))
    for step in range(2):
        x, target = batch(step, data_rank)
        arguments = (x,) if 0 in indices else ()
        targets = {"target": target, "losses": []} if stages_in_all - 1 in indices else {}
        schedule.step(*arguments, **targets)
        for rank in range(2):
            x, target = batch(step, rank)
            factor = 1 if scale else MICRO_BATCHES
            (F.mse_loss(plain(x), target) * factor / 2).backward()
        for index, module in zip(indices, modules, strict=True):
            compare(module, expected[index], step)
        for p in [*plain.parameters(), *(p for m in modules for p in m.parameters())]:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None


def compare(module: nn.Module, plain: nn.Module, step: int) -> None:
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        message = f"{name} in step {step}"
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=0, atol=1e-12, msg=message)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0, atol=1e-12, msg=message)


@pytest.mark.parity("behaviour: torch's pipeline schedules")
@pytest.mark.parity("method: set_is_last_backward")
@pytest.mark.parametrize(
    ("name", "reshard_after_forward"),
    [
        ("ScheduleGPipe", True),
        ("Schedule1F1B", True),
        ("Schedule1F1B", False),
        ("ScheduleInterleaved1F1B", True),
        ("ScheduleInterleaved1F1B", False),
        # With True also torch's parameters() are shards when these look for the weights' gradients.
        ("ScheduleInterleavedZeroBubble", False),
        ("ScheduleZBVZeroBubble", False),
    ],
)
def test_schedule(on_ranks, name: str, reshard_after_forward: bool) -> None:
    on_ranks(run_schedule, name, reshard_after_forward, name != "ScheduleGPipe", size=4)
