"""What users do with a model whose units are replicated units; see ``test_replicated_units``."""

import copy
import weakref

import torch
from _support.fsdp.lifetimes import collector_off
from _support.fsdp.replicated_models import WIDTH, batch, check, plain, wrapped
from torch import nn

from parallel3d import MeshLayout, build_mesh
from parallel3d.fsdp import fully_shard, register_fsdp_forward_method
from parallel3d.fsdp.inspect import get_unit
from parallel3d.optim import clip_grad_norm_
from parallel3d.testing import GlooPool, fake_world, shards_of


def test_a_graph_from_before_a_change_still_brings_gradients() -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for each in (expected, model):
            loss = each(batch(0)).sum()
            each.blocks[1].up.bias.requires_grad_(False)
            (loss + each(batch(1)).sum()).backward()
            each(batch(2)).sum().backward()
        check(model, expected)


def test_clip_grad_norm() -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for each in (expected, model):
            each(batch()).sum().backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        other = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        torch.testing.assert_close(norm.to(other.dtype), other)
        check(model, expected)


def test_grad_scaler_with_fp16() -> None:
    with fake_world(0, 1):
        expected, model = plain().float(), wrapped(1, plain().float())
        for each in (expected, model):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for index in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = each(batch(index).float()).float().sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            for _, _, local in shards_of(param):
                torch.testing.assert_close(local, other, rtol=0, atol=2e-3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def test_tied_parameters() -> None:
    with fake_world(0, 1):
        torch.manual_seed(0)
        expected = Tied().double()
        torch.manual_seed(0)
        model = Tied().double()
        mesh = build_mesh(MeshLayout(replicate=1, shard=1), device_type="cpu")
        fully_shard([model.first, model.last], mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            for each in (expected, model):
                each(batch()).sum().backward()
        check(model, expected)


def test_compiled_units() -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for block in model.blocks:
            block.norm.compile(backend="eager")
        for _ in range(2):
            for each in (expected, model):
                each(batch()).sum().backward()
        check(model, expected)


def test_a_unit_by_itself_between_steps() -> None:
    with fake_world(0, 1):
        expected, model = plain(), wrapped(1)
        for each in (expected, model):
            each(batch(0)).sum().backward()
            each.blocks[1](batch(1)).sum().backward()
            each(batch(2)).sum().backward()
        check(model, expected)


def test_freed_at_once() -> None:
    with fake_world(0, 1), collector_off():
        model = wrapped(1)
        for index in range(2):
            model(batch(index)).sum().backward()
        for block in model.blocks:
            block.seen = None
        unit = weakref.ref(get_unit(model.blocks[1]))
        bucket = weakref.ref(unit().group.buckets[0])
        del model, block
        assert unit() is None and bucket() is None


def _train(model: nn.Module, batches: list[list[torch.Tensor]]) -> None:
    """A step for each list, the mean over its batches; the second step leaves a block out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, each in enumerate(batches):
        for x in each:
            (model(x, skip=step == 1).square().mean() / len(each)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _on_gloo(steps: int) -> list[torch.Tensor]:
    rank = torch.distributed.get_rank()
    model = wrapped(torch.distributed.get_world_size())
    _train(model, [[batch(10 * step + rank)] for step in range(steps)])
    return [param.to_local().detach().clone() for param in model.parameters()]


def test_processes_beside_the_plain_model(gloo_pool: GlooPool) -> None:
    by_rank = gloo_pool.run(_on_gloo, 3)
    expected = plain()
    _train(
        expected,
        [[batch(10 * step + rank) for rank in range(len(by_rank))] for step in range(3)],
    )
    for params in by_rank:
        for param, other in zip(params, expected.parameters(), strict=True):
            torch.testing.assert_close(param, other.detach(), rtol=0, atol=1e-12)


class Again(nn.Linear):
    def again(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Named(nn.Module):
    """Runs its blocks by a method of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Again(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.again(block(x))
        return x


def test_registered_forward_methods() -> None:
    with fake_world(0, 1):
        torch.manual_seed(0)
        expected = Named().double()
        model = wrapped(1, copy.deepcopy(expected))
        for block in model.blocks:
            register_fsdp_forward_method(block, "again")
        for each in (expected, model):
            each(batch()).sum().backward()
        check(model, expected)
