"""torch's pipeline schedules drive our units: two stages (or twice two) of two shard ranks.

The schedules never call ``.backward()`` on a whole model: they unshard and reshard stages, switch the
gradient synchronisation off, and end a step by calling what they know of torch's own engine. Zero-bubble
ones compute gradients of inputs and of weights apart, and put the latter into ``.grad`` themselves.
"""

from contextlib import nullcontext

import pytest
import torch
from _support.engines import Engine
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

from parallel3d.testing.gloo_pool import WorkerError

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


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))).double()


def batch(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    both = torch.randn(2, MICRO_BATCHES, DIM, generator=generator, dtype=torch.float64)
    return both[0], both[1]


class Pipeline:
    """This rank's stages, the schedule, and the same stages of the plain model."""

    def __init__(self, engine: Engine, name: str, reshard_after_forward: bool, scale: bool) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
        cls = getattr(pipelining, name)
        looped = issubclass(cls, pipelining.schedules.PipelineScheduleMulti)
        pp_rank, self.data_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("shard")
        self.indices = [pp_rank]
        if looped:
            self.indices.append(3 - pp_rank if "ZBV" in name else pp_rank + 2)
        self.count = 2 * len(self.indices)
        self.factor = 1 if scale else MICRO_BATCHES
        self.plain = build()
        self.expected = self._stages_of(self.plain)
        self.modules = self._stages_of(build())
        options = {"mesh": mesh["shard"], "reshard_after_forward": reshard_after_forward}
        for module in self.modules:
            for block in module[:-1]:  # the last one's parameters are the root's
                engine.fully_shard(block, **options)
            engine.fully_shard(module, **options)
        stages = [
            PipelineStage(m, i, self.count, torch.device("cpu"), group=mesh.get_group("pp"))
            for m, i in zip(self.modules, self.indices, strict=True)
        ]
        self.schedule = cls(
            stages if looped else stages[0], MICRO_BATCHES, loss_fn=F.mse_loss, scale_grads=scale
        )

    def _stages_of(self, model: nn.Sequential) -> list[nn.Sequential]:
        size = BLOCKS // self.count
        return [model[index * size : (index + 1) * size] for index in self.indices]

    def train(self, step: int) -> None:
        """Forwards and backwards of a step, here and on the plain model."""
        x, target = batch(step, self.data_rank)
        arguments = (x,) if 0 in self.indices else ()
        last = self.count - 1 in self.indices
        self.schedule.step(*arguments, **({"target": target, "losses": []} if last else {}))
        for rank in range(2):
            x, target = batch(step, rank)
            (F.mse_loss(self.plain(x), target) * self.factor / 2).backward()

    def update(self) -> None:
        """Plain SGD."""
        for model in [self.plain, *self.modules]:
            for p in model.parameters():
                with torch.no_grad():
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None


def run_schedule(engine: Engine, *options) -> None:
    """Two steps; gradients and weights in each equal the plain model's."""
    pipeline = Pipeline(engine, *options)
    for step in range(2):
        pipeline.train(step)
        for module, plain in zip(pipeline.modules, pipeline.expected, strict=True):
            compare(module, plain, step)
        pipeline.update()


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
    scale = name != "ScheduleGPipe"
    sends_to_itself = torch.__version__.startswith("2.11.") and name == "ScheduleZBVZeroBubble"
    # A rank's two stages are neighbours in it; torch 2.11 sends between them through gloo, which can't.
    refused = pytest.raises(WorkerError, match="Pair is not connected")
    with refused if sends_to_itself else nullcontext():
        on_ranks(run_schedule, name, reshard_after_forward, scale, size=4)
