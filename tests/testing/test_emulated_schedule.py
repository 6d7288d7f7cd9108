"""When the engine issues and waits, in the exact figures of a network that costs no CPU time."""

import pytest
import torch
from _support.emulated import EmulatedNetwork, Link, VirtualClock
from torch import nn

import parallel3d as p3d
from parallel3d.fsdp import fully_shard

BLOCKS, WORLD, WIDTH = 8, 8, 8


class Tick(torch.autograd.Function):
    """Takes ``seconds`` in forward and twice that in backward."""

    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock.advance(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.advance(2 * ctx.seconds)
        return grad, None, None


class Block(nn.Module):
    """Takes one second in forward and two in backward, ``linears`` of ``width`` after one another."""

    def __init__(self, clock, width, linears):
        super().__init__()
        self.clock = clock
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(linears))

    def forward(self, x):
        for linear in self.linears:
            x = Tick.apply(linear(x), self.clock, 1 / len(self.linears))
        return x


def step_seconds(
    layout: p3d.MeshLayout, axes: dict[str, str], *, width: int = WIDTH, linears: int = 1
) -> tuple[float, EmulatedNetwork]:
    """A step's seconds where an all-gather, or a reduce-scatter, takes as long as a block's forward."""
    clock = VirtualClock()
    n = layout.resolve(WORLD).shard
    bandwidth = linears * width * width * 4 * (n - 1) / n
    links = {"nic": Link(bandwidth=bandwidth), "second": Link(bandwidth=bandwidth)}
    axes = {"shard": "nic", "replicate": "nic"} | axes
    with EmulatedNetwork(world_size=WORLD, links=links, axes=axes, clock=clock) as net:
        mesh = p3d.build_mesh(layout, device_type="cpu")
        model = nn.Sequential(*(Block(clock, width, linears) for _ in range(BLOCKS)))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):  # the first knows no order to gather ahead in
            net.clear()
            start = clock.now()
            model(torch.ones(2, width)).sum().backward()
        return clock.now() - start, net


def test_fsdp():
    """All but the first gather, the first gather of the backward and the last reduction is hidden."""
    seconds, net = step_seconds(p3d.MeshLayout(shard=WORLD), {})
    assert net.busy("nic") == pytest.approx(24)
    assert seconds == pytest.approx(27)
    exposed = [(t.op, t.unit) for t in net.timeline if t.waited > 1e-9]
    assert exposed == [("all_gather", "0"), ("all_gather", "7"), ("reduce_scatter", "0")]


def test_hsdp_on_a_nic_of_its_own():
    """And the last all-reduce, a quarter of a block's bytes here."""
    seconds, net = step_seconds(p3d.MeshLayout(2, 4), {"replicate": "second"})
    assert net.busy("second") == pytest.approx(8 / 3)
    assert seconds == pytest.approx(27 + 1 / 3)


def test_hsdp_on_one_nic():
    """The link is busy for 26.67 s."""
    seconds, net = step_seconds(p3d.MeshLayout(2, 4), {})
    assert net.busy("nic") == pytest.approx(24 + 8 / 3)
    assert seconds <= 1.1 * net.busy("nic") + 1e-9


def test_hsdp_on_one_nic_with_large_parameters():
    """An all-reduce goes behind the next reduce-scatter, which the gather half-way through a backward, there
    for the sake of memory, has to wait for."""
    seconds, net = step_seconds(p3d.MeshLayout(2, 4), {}, width=512, linears=2)
    assert net.busy("nic") == pytest.approx(24 + 8 / 3)
    assert seconds == pytest.approx(29 + 1 / 3)
    waited = {t.unit for t in net.timeline if t.op == "reduce_scatter" and t.waited > 1e-9}
    assert waited == {"0"}  # the last
