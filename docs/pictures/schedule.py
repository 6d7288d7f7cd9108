"""Draws docs/schedule.svg: what the engine communicates when, and the memory it holds, in exact units.

    python docs/pictures/schedule.py [FOLDER]

Nothing is measured: a block's forward takes one second of a clock that only moves when told to, its backward
two, and an emulated link is as fast as that makes exciting: an all-gather takes as long as a forward. What is
recorded is when the engine issues its collectives, when it waits, and which storages are alive.
"""

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

import torch
from emulated_network import EmulatedNetwork, Link, Transfer, VirtualClock
from models import local_parameters
from picture import COLORS, MemoryOverTime
from svg import Drawing
from torch import nn

import parallel3d as p3d
from parallel3d.fsdp import fully_shard

BLOCKS, WORLD, WIDTH, LINEARS = 4, 8, 512, 2
UNIT = LINEARS * WIDTH * WIDTH * 4  # bytes of a unit's parameters
LANES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}
LEVELS = 5
LEFT, RIGHT, LANE, BAR, CURVE = 120, 20, 26, 18, 130


class Work(torch.autograd.Function):
    """Takes ``seconds`` in forward and twice that in backward, and notes both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: "Block", seconds: float) -> torch.Tensor:
        ctx.block, ctx.seconds = block, seconds
        block.work("forward", seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.block.work("backward", 2 * ctx.seconds)
        return grad, None, None


class Block(nn.Module):
    """Linear layers one after another; a second in forward, two in backward."""

    def __init__(self, index: int, clock: VirtualClock, bars: list[tuple]) -> None:
        super().__init__()
        self.index, self.clock, self.bars = index, clock, bars
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LINEARS))

    def work(self, kind: str, seconds: float) -> None:
        since = self.clock.now()
        self.clock.advance(seconds)
        last = self.bars[-1] if self.bars else ("", "", 0.0, 0.0)
        if last[:2] == (kind, str(self.index)) and last[3] == since:
            since = self.bars.pop()[2]
        self.bars.append((kind, str(self.index), since, self.clock.now()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = Work.apply(linear(x), self, 1 / LINEARS)
        return x


def record(layout: p3d.MeshLayout) -> tuple[list[tuple], list[Transfer], list[tuple[float, int]]]:
    """Bars of computing, transfers and (when, bytes) of the second step; its beginning is 0."""
    clock, bars = VirtualClock(), []
    n = layout.shard
    links = {axis: Link(bandwidth=UNIT * (n - 1) / n) for axis in ("shard", "replicate")}
    axes = {"shard": "shard", "replicate": "replicate"}
    with EmulatedNetwork(world_size=WORLD, links=links, axes=axes, clock=clock) as network:
        mesh = p3d.build_mesh(layout, device_type="cpu")
        model = nn.Sequential(*(Block(i, clock, bars) for i in range(BLOCKS)))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):  # the first knows no order to gather ahead in
            state = local_parameters(model)
            network.clear()
            bars.clear()
            model.zero_grad()
            start = clock.now()
            with MemoryOverTime(clock, state) as memory:
                model(torch.ones(2, WIDTH)).sum().backward()
                torch.zeros(())  # what is left, once more
            end = clock.now()
    shift = [(kind, label, since - start, to - start) for kind, label, since, to in bars]
    for transfer in network.timeline:
        transfer.started -= start
        transfer.ended -= start
    samples = [(when - start, size) for when, size in memory.samples]
    return [*shift, ("end", "", end - start, end - start)], network.timeline, samples


def draw(picture: Drawing, top: float, title: str, layout: p3d.MeshLayout, scale: float) -> float:
    """A panel; returns where the next one begins."""
    bars, transfers, memory = record(layout)
    end = bars.pop()[2]
    picture.text(
        8, top + 14, f"{title}: {end:.4g} units of time, {3 * BLOCKS} of them computing", size=14
    )
    top += 26
    lanes = {op: name for op, name in LANES.items() if any(t.op == op for t in transfers)}
    for number, name in enumerate(["compute", *lanes.values()]):
        picture.text(LEFT - 10, top + number * LANE + 13, name, anchor="end")
        picture.rect(LEFT, top + number * LANE, end * scale, BAR, fill="#f4f4f4")
    for kind, label, since, to in bars:
        bar(picture, top, kind, label, since, to, scale)
    for transfer in transfers:
        y = top + (1 + list(lanes).index(transfer.op)) * LANE
        bar(picture, y, transfer.op, transfer.unit, transfer.started, transfer.ended, scale)
        if transfer.waited > 1e-9:
            since = max(transfer.started, transfer.ended - transfer.waited)
            bar(picture, top, "waits", "waits", since, transfer.ended, scale)
    return curve(picture, top + (1 + len(lanes)) * LANE + 8, memory, end, scale)


def bar(
    picture: Drawing, y: float, kind: str, label: str, since: float, to: float, scale: float
) -> None:
    x, width = LEFT + since * scale, (to - since) * scale
    picture.rect(
        x, y, width - 1, BAR, fill=COLORS[kind], note=f"{kind} {label}: {since:.3g} to {to:.3g}"
    )
    if width > 40 or (width > 12 and len(label) == 1):
        # Bars keep their colours on dark pages, and so does what is written on them.
        color, size = ("#1a1a1a", 9) if kind == "waits" else ("#ffffff", 11)
        picture.text(x + width / 2, y + 13, label, anchor="middle", color=color, size=size)


def curve(
    picture: Drawing, top: float, memory: list[tuple[float, int]], end: float, scale: float
) -> float:
    """Memory over time in units of one block's parameters."""
    peak = max(size for _, size in memory)
    bottom, height = top + CURVE, CURVE / LEVELS
    picture.text(LEFT - 10, top + 12, "memory", anchor="end")
    for level in range(LEVELS):
        y = bottom - level * height
        picture.line([(LEFT, y), (LEFT + end * scale, y)], color="#e0e0e0")
        picture.text(LEFT - 10, y + 4, str(level), anchor="end", color="#777777", size=10)
    points: list[tuple[float, float]] = [(LEFT, bottom)]
    for when, size in memory:
        x, y = LEFT + when * scale, bottom - size / UNIT * height
        points += [(x, points[-1][1]), (x, y)]
    picture.line(points, color="#c0392b", width=1.5)
    for second in range(0, int(end) + 1, 2):
        picture.text(
            LEFT + second * scale,
            bottom + 16,
            str(second),
            anchor="middle",
            color="#777777",
            size=10,
        )
    note = f"beyond the sharded parameters, in blocks' parameters: at most {peak / UNIT:.2f}"
    picture.text(LEFT + 6, top + 12, note, color="#c0392b")
    return bottom + 38


def main() -> None:
    """Command line."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    picture = Drawing(1000, 600)
    scale = (picture.width - LEFT - RIGHT) / 16
    top = draw(picture, 8, "FSDP on 8 ranks", p3d.MeshLayout(1, 8, 1), scale)
    draw(picture, top + 10, "HSDP (2, 4), a link for each axis", p3d.MeshLayout(2, 4, 1), scale)
    picture.write(folder / "schedule.svg")


if __name__ == "__main__":
    main()
