"""Blocks whose forward changes buffers: recomputed or not, they have the same gradients and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointPolicy

import parallel3d as p3d
from parallel3d._util.forwards import wrap_forward
from parallel3d.activations.buffers import SMALL
from parallel3d.activations.selective import keep_costly, partly_recomputed, recomputed
from parallel3d.errors import StateError
from parallel3d.testing import fake_world

DIM = 6


def keep_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Copies too: those that are made of buffers are no operations of the block."""
    return CheckpointPolicy.MUST_SAVE


WRAPPERS = {
    "full": recomputed,
    "selective": partly_recomputed(keep_costly),
    "policy": partly_recomputed(keep_all),
}


class Normed(nn.Module):
    """Statistics that torch updates without a change of their version counters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()


class Spectral(nn.Module):
    """The weight depends on buffers that each forward improves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Codebook(nn.Module):
    """Reads a buffer, then changes it in place; ``size`` rows."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("codes", torch.linspace(-1, 1, size * DIM).view(size, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * (1 + self.codes.clone()[:3].sum())
        self.update(y.detach())
        return y

    def update(self, y: torch.Tensor) -> None:
        self.codes.mul_(0.9).add_(0.1 * y.mean(0))


class Assigned(Codebook):
    """The buffer becomes another tensor."""

    def update(self, y: torch.Tensor) -> None:
        self.codes = 0.9 * self.codes + 0.1 * y.mean(0)


class Counting(Codebook):
    """Two modules share a buffer that counts, and it says how far the codes move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.linear.register_buffer("count", self.count)

    def update(self, y: torch.Tensor) -> None:
        self.linear.count += 1
        self.codes.lerp_(y.mean(0).expand_as(self.codes), 1 / float(self.count + 1))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": Normed,
    "cumulative batch norm": lambda: Normed(momentum=None),
    "spectral norm": Spectral,
    "codes": Codebook,
    "large codes": lambda: Codebook(SMALL // DIM),
    "assigned": Assigned,
    "shared": Counting,
}


def pair(block: Callable[[], nn.Module], how: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(block(), block()).double()
    model = copy.deepcopy(plain)
    for each in model:
        wrap_forward(each, WRAPPERS[how], how)
    return plain, model


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(step)).double()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, got), want in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(got, want), name
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, expected.grad), name


@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.parametrize("block", BLOCKS)
def test_steps(block: str, how: str) -> None:
    plain, model = pair(BLOCKS[block], how)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            each(batch(step)).square().mean().backward()
            optimizer.step()
    assert_same(model, plain)


@pytest.mark.parametrize("block", BLOCKS)
def test_two_forwards_before_their_backwards(block: str) -> None:
    """Each recomputation starts from what its own forward has seen; the first backward comes twice."""
    plain, model = pair(BLOCKS[block], "full")
    for each in (plain, model):
        losses = [each(batch(step)).square().mean() for step in range(2)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        each.eval()
        each(batch(2)).sum().backward()
    assert_same(model, plain)


def test_statistics_that_are_frozen_at_first() -> None:
    plain, model = pair(Normed, "full")
    for each in (plain, model):
        for step in range(4):
            each.train(step % 2 == 1)
            each(batch(step)).square().mean().backward()
    assert_same(model, plain)


def test_an_exception_in_the_recomputation_leaves_the_buffers() -> None:
    _, model = pair(Counting, "full")
    loss = model(batch(0)).sum()
    before = [buffer.clone() for buffer in model.buffers()]

    def broken(*_: Any) -> None:
        raise ArithmeticError

    handle = model[1].linear.register_forward_hook(broken)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    assert all(map(torch.equal, model.buffers(), before))


class Seldom(Codebook):
    def update(self, y: torch.Tensor) -> None:
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == 3:
            super().update(y)


def test_a_large_buffer_that_is_changed_late() -> None:
    """There is no copy of it: an error, not other gradients."""
    block = Seldom(SMALL // DIM)
    wrap_forward(block, recomputed, "full")
    for _ in range(3):
        loss = block(torch.ones(4, DIM)).sum()
    with pytest.raises(
        StateError, match=r"buffer codes of a Seldom.*activation_checkpointing=False"
    ):
        loss.backward()


def test_blocks_without_buffers_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("parallel3d.activations.buffers.Buffers", made)
    block = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM))
    wrap_forward(block, recomputed, "full")
    block(torch.ones(2, DIM)).sum().backward()


KINDS = {"full": True, "selective": "selective", "offload": "offload", "policy": keep_all}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_of_parallel_models(kind: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Normed(), Spectral(), Codebook())
    model = copy.deepcopy(plain)
    with fake_world(0, 1):  # simulated ranks would share the buffers
        mesh = p3d.build_mesh(p3d.MeshLayout(), device_type="cpu")
        p3d.parallelize(model, mesh, units=["*"], activation_checkpointing=kind)
        for each in (plain, model):
            for step in range(2):
                each(batch(step).float()).square().mean().backward()
        for got, want in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(got, want)
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


def test_cast_buffers() -> None:
    """The statistics of a unit with ``buffer_dtype`` are those without recomputation."""
    found = []
    for kind in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Normed(), Codebook())
        with fake_world(0, 1):
            mesh = p3d.build_mesh(p3d.MeshLayout(), device_type="cpu")
            policy = p3d.MixedPrecisionPolicy(buffer_dtype=torch.bfloat16)
            p3d.parallelize(
                model, mesh, units=["*"], activation_checkpointing=kind, mp_policy=policy
            )
            for step in range(3):
                model(batch(step).float()).square().mean().backward()
            found.append([buffer.clone() for buffer in model.buffers()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
