"""Autograd functions that give None where a gradient was asked for: it is left out, as in torch."""

from typing import Any

import pytest
import torch
from _support.fsdp.wrapped import at_rest, cpu_mesh, held_bytes, shard_blocks
from _support.models import LM_PLAN, Block, Lm, tokens
from torch import nn

from parallel3d import MeshLayout
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import unit_of
from parallel3d.testing import assert_parity, local_world


class _Scale(torch.autograd.Function):
    """x * sum(w), which says nothing of w; with ``of_x`` False nothing of x either."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, of_x: bool) -> torch.Tensor:
        ctx.save_for_backward(w)
        ctx.of_x = of_x
        return x * w.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return grad * w.sum() if ctx.of_x else None, None, None


class Gated(Block):
    """A block with a parameter that gets None, and one that gets None from one use and a gradient from
    another."""

    of_x = True

    def __init__(self, dim: int = 12, hidden: int = 20) -> None:
        super().__init__(dim, hidden)
        self.gate = nn.Parameter(torch.full((5,), 0.2))
        self.both = nn.Parameter(torch.full((3,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Scale.apply(super().forward(x), self.gate, self.of_x)
        return _Scale.apply(x, self.both, True) * self.both.sum()


class GatedLm(Lm):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(), Gated()])


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(MeshLayout(1, 2, 1), {}, id="shard"),
        pytest.param(MeshLayout(2, 1, 1), {}, id="replicate"),
        pytest.param(MeshLayout(2, 2, 1), {"defer": "sync", "micro_batches": 2}, id="no sync"),
        pytest.param(MeshLayout(1, 2, 2), {"tp_plan": LM_PLAN}, id="tp"),
        pytest.param(MeshLayout(1, 2, 1), {"activation_checkpointing": True}, id="recomputed"),
        pytest.param(MeshLayout(shard=1, cp=2), {"shard_batch": lambda x, mesh: x}, id="cp"),
    ],
)
def test_it_is_left_out(layout: MeshLayout, options: dict[str, Any]) -> None:
    assert_parity(GatedLm, tokens, layout, steps=2, fp32=False, **options)


def test_the_unit_does_not_wait_for_it() -> None:
    """It is freed as soon as its other gradients are there, and .grad stays None."""
    with local_world(2):
        model = shard_blocks(GatedLm(), cpu_mesh())
        held: list[int] = []

        def note(grad: torch.Tensor) -> None:
            buckets = unit_of(model.layers[1]).group.buckets
            held.append(sum(held_bytes(bucket.precision.unsharded) for bucket in buckets))

        model.layers[0].register_forward_pre_hook(
            lambda _, args: args[0].register_hook(note) and None
        )
        model(tokens(0)).sum().backward()
        assert held == [0]
        assert all(layer.gate.grad is None for layer in model.layers)
        assert model.layers[0].both.grad is not None
        assert at_rest(model)


class _Blocked(Gated):
    of_x = False


@pytest.mark.parametrize("create_graph", [False, True])
def test_of_a_units_input(create_graph: bool) -> None:
    with local_world(2):
        block = fully_shard(_Blocked(), mesh=cpu_mesh())
        x = torch.ones(2, 12, requires_grad=True)
        out = block(x).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=create_graph, allow_unused=True)
        assert grad is None
        block(x).sum().backward()
        assert x.grad is None and block.up.weight.grad is None
        assert block.both.grad is not None
        assert at_rest(block)
