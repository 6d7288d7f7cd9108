"""Uses of autograd beyond loss.backward(), and hooks of the user's beside the engine's."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from _support.engine.twins import (
    Twins,
    device_mesh,
    floats,
    full,
    mean_square,
    same,
    sample_of,
    shard_layers,
    train,
)
from _support.models import Block
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d.testing import fake_world


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def twins_of(engine, model: nn.Module, **options) -> Twins:
    return Twins(
        model, lambda m: shard_layers(engine, m, device_mesh(), **options), mean_square, floats
    )


def gradients_of_inputs(engine) -> None:
    for reshard in (None, False):
        twins = twins_of(engine, Stack(), reshard_after_forward=reshard)
        for frozen in (False, True):
            grads = []
            for model in (twins.plain, twins.sharded):
                model.requires_grad_(not frozen)
                x = floats(0).requires_grad_()
                grads.append(torch.autograd.grad(mean_square(model, x), x)[0])
                y = floats(1).requires_grad_()
                if frozen:
                    mean_square(model, y).backward()
                    grads.append(y.grad)
                assert all(p.grad is None for p in model.parameters())
            half = len(grads) // 2
            for got, want in zip(grads[half:], grads[:half], strict=True):
                same(got, want, "gradient of the input")
        twins.plain.requires_grad_(True)
        twins.sharded.requires_grad_(True)
        twins.train(range(2))


@pytest.mark.parity("behaviour: gradients of inputs only")
def test_gradients_of_inputs(on_ranks) -> None:
    """By torch.autograd.grad, and through a frozen model; training goes on after it."""
    on_ranks(gradients_of_inputs)


def discarded(engine) -> None:
    """Outputs that don't reach the loss, and the same unit run without gradients beside."""

    class Odd(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                teacher = self.layers[2](x)
            self.layers[1](x)
            return self.layers[2](self.layers[0](x)) - teacher

    twins_of(engine, Odd()).train()
    twins_of(engine, Odd(), reshard_after_forward=False).train()


@pytest.mark.parity("behaviour: outputs that no gradient reaches")
def test_discarded_outputs(on_ranks) -> None:
    on_ranks(discarded)


def jvp(engine) -> None:
    twins = twins_of(engine, Stack())
    x, tangent = floats(0), floats(1)
    got = torch.func.jvp(twins.sharded, (x,), (tangent,))
    want = torch.func.jvp(twins.plain, (x,), (tangent,))
    for a, b, what in zip(got, want, ("output", "tangent"), strict=True):
        same(a, b, what)
    twins.train(range(1))


@pytest.mark.parity("behaviour: forward-mode derivatives")
def test_forward_mode(on_ranks) -> None:
    on_ranks(jvp)


@dataclass
class Output:
    hidden: torch.Tensor
    aux: dict[str, torch.Tensor]


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Structured(Block):
    def forward(self, inputs: Output, pair: Pair) -> tuple[Output, Pair]:
        y = super().forward(inputs.hidden + pair.second)
        return Output(y, {"shift": inputs.aux["shift"] * 2}), Pair(y, pair.first)


class StructuredStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Structured() for _ in range(2))
        self.first = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        out, pair = Output(h, {"shift": x}), Pair(h, h * 2)
        for layer in self.layers:
            out, pair = layer(out, pair=pair)
        return out.hidden + out.aux["shift"] + pair.first * pair.second


def structured(engine) -> None:
    twins_of(engine, StructuredStack()).train()


@pytest.mark.parity("behaviour: structures of inputs and outputs")
def test_dataclasses_and_named_tuples(on_ranks) -> None:
    on_ranks(structured)


@pytest.mark.parity("behaviour: hooks of the user's on units")
def test_module_hooks_see_whole_parameters(engine) -> None:
    """A pre-hook does whenever it was registered; a forward hook if it was before ``fully_shard``."""
    seen = []

    def note(module, *_):
        seen.append(isinstance(module.up.weight, DTensor))

    with fake_world(0, 2):
        mesh, block = device_mesh(), Block()
        block.register_forward_pre_hook(note)
        block.register_forward_hook(note)
        engine.fully_shard(block, mesh=mesh)
        block.register_forward_pre_hook(note)
        engine.fully_shard(nn.Sequential(block), mesh=mesh)(torch.randn(2, 12))
    assert seen == [False, False, False]


def optimizer_in_backward(engine) -> None:
    """Hooks on the sharded parameters step each with its reduced gradient, once per backward."""
    twins = twins_of(engine, Stack())
    steps = []

    def hook_on(p: nn.Parameter) -> None:
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(p: nn.Parameter) -> None:
            steps.append(p)
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)

    for p in twins.sharded.parameters():
        hook_on(p)
    plain = torch.optim.SGD(twins.plain.parameters(), lr=0.1)
    for index in range(3):
        twins.backward(index)
        plain.step()
        plain.zero_grad()
    assert len(steps) == 3 * 18
    twins.check_weights()


@pytest.mark.parity("behaviour: hooks of the user's on units")
def test_optimizer_in_backward(on_ranks) -> None:
    on_ranks(optimizer_in_backward)


def autocast(engine) -> None:
    plain = Stack()
    model = shard_layers(engine, copy.deepcopy(plain), device_mesh())
    for index in range(2):
        for each in (plain, model):
            with torch.autocast("cpu", torch.bfloat16):
                loss = mean_square(each, floats(index).float())
            loss.backward()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        if want.grad is not None:
            same(full(got.grad), want.grad, name, 1e-5)


@pytest.mark.parity("behaviour: autocast")
def test_autocast(on_ranks) -> None:
    on_ranks(autocast)


def world_of_one(engine) -> None:
    train(Stack(), lambda m: shard_layers(engine, m, device_mesh(1)), mean_square, floats)
    train(Stack(), lambda m: shard_layers(engine, m, device_mesh(1, 1)), mean_square, floats)


@pytest.mark.parity("argument: mesh 1-D", "argument: mesh 2-D")
def test_world_of_one(on_ranks) -> None:
    on_ranks(world_of_one, size=1)


def scaled(engine) -> None:
    """torch.amp.GradScaler: a step of scaled gradients, and one skipped as a rank's are not finite."""
    twins = twins_of(engine, Stack())
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for index in range(3):
        for model, optimizer, scaler in zip(
            (twins.plain, twins.sharded), twins.optimizers, scalers, strict=True
        ):
            ranks = range(2) if model is twins.plain else [dist.get_rank()]
            for rank in ranks:
                loss = mean_square(model, floats(sample_of(index, rank))) / len(ranks)
                bad = index == 1 and rank == 1
                (scaler.scale(loss) * (float("inf") if bad else 1)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == (8.0 if index == 0 else 4.0)
        twins.check_weights()


@pytest.mark.parity("behaviour: gradient scaling")
def test_grad_scaler(on_ranks) -> None:
    on_ranks(scaled)
