"""Draws a training step, ours above torch's FSDP2: what computes, what communicates, and memory over time.

    python benchmarks/picture.py [PATH]

One step of HSDP (2, 4) on an emulated network with a link for each mesh axis, where what the busier sends
takes as long as the plain model computes. Time is CPU time of the process plus what waiting takes; the
instruments' own is left out. Memory is that of the storages alive, activations among them, less the sharded
parameters and the batch. PATH is docs/overlap.svg if not given.
"""

import copy
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from emulated_network import EmulatedNetwork, Link, Transfer, VirtualClock
from measure import no_gc
from models import MlpBlock, Stack, local_parameters, ours, torchs
from overlap import bytes_by_link
from svg import Drawing
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel3d as p3d

BLOCKS, WIDTH, TOKENS = 8, 512, 512
LAYOUT = p3d.MeshLayout(2, 4)
LANES = ("all_gather", "reduce_scatter", "all_reduce")
COLORS = {
    "forward": "#7fb3d5",
    "backward": "#2e75b6",
    "waits": "#e8b4b0",
    "all_gather": "#59a14f",
    "reduce_scatter": "#f28e2b",
    "all_reduce": "#b07aa1",
}
LINES = {"ours": "#c0392b", "FSDP2": "#555555"}


@dataclass
class Step:
    """What one step did; seconds from its start."""

    seconds: float = 0.0
    # Pass, block, from, to.
    compute: list[tuple[str, int, float, float]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # when, bytes


class Mark(torch.autograd.Function):
    """Notes when forward passes it, and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Any, edge: str) -> torch.Tensor:
        ctx.note, ctx.edge = note, edge
        note("forward", edge)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.note("backward", "ends" if ctx.edge == "begins" else "begins")
        return grad, None, None


class MarkedBlock(MlpBlock):
    """Tells ``note(pass, edge)`` when its own computation begins and ends."""

    note: Any = staticmethod(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Mark.apply(super().forward(Mark.apply(x, self.note, "begins")), self.note, "ends")


class MemoryOverTime(TorchDispatchMode):
    """Notes the bytes of the storages alive after each operation, in time that the clock doesn't count."""

    def __init__(self, clock: Any, outside: list[torch.Tensor]) -> None:
        super().__init__()
        self.clock = clock
        # By address: a bucket's shards are storages of their own in memory of the bucket's.
        self.outside = {t.untyped_storage().data_ptr() for t in outside}
        self.known: dict[int, StorageWeakRef] = {}
        self.samples: list[tuple[float, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: the operation on its local tensor comes next
        result = func(*args, **(kwargs or {}))
        now = self.clock.now()
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.outside:
                    known = StorageWeakRef(storage)
                    self.known[known.cdata] = known
        self.known = {key: ref for key, ref in self.known.items() if not ref.expired()}
        make = torch.UntypedStorage._new_with_weak_ptr
        self.samples.append((now, sum(make(ref.cdata).nbytes() for ref in self.known.values())))
        self.clock.rewind_to(now)
        return result


def watched(model: nn.Module, network: EmulatedNetwork, x: torch.Tensor) -> Step:
    """One step of ``model``."""
    clock, step = network.clock, Step()
    begun: dict[int, float] = {}

    def note_for(block: int) -> Any:
        def note(kind: str, edge: str) -> None:
            if edge == "begins":
                begun[block] = clock.now()
            else:
                step.compute.append((kind, block, begun[block] - start, clock.now() - start))

        return note

    for index, block in enumerate(cast(Any, model.blocks)):
        block.note = note_for(index)
    network.clear()
    state = [x, *local_parameters(model)]
    with no_gc(), MemoryOverTime(clock, state) as memory:
        start = clock.now()
        model(x).sum().backward()
        step.seconds = clock.now() - start
    step.memory = [(when - start, size) for when, size in memory.samples]
    step.transfers = network.timeline
    for transfer in step.transfers:
        transfer.started -= start
        transfer.ended -= start
    model.zero_grad()
    return step


def take() -> dict[str, Step]:
    """A step of each engine, after some that are not looked at."""
    clock = VirtualClock(time.process_time)
    names = {"shard": "shard", "replicate": "replicate"}
    links = dict.fromkeys(names, Link())
    with EmulatedNetwork(world_size=8, links=links, axes=names, clock=clock) as network:
        mesh = p3d.build_mesh(LAYOUT, device_type="cpu")
        plain = Stack(MarkedBlock, BLOCKS, WIDTH)
        models = {
            "ours": ours(copy.deepcopy(plain), mesh),
            "FSDP2": torchs(copy.deepcopy(plain), mesh),
        }
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        seconds = []
        for _ in range(7):
            start = clock.now()
            plain(x).sum().backward()
            seconds.append(clock.now() - start)
        for model in models.values():
            for _ in range(2):
                watched(model, network, x)
        sent = max(bytes_by_link(network.timeline).values())
        for name in links:
            network.links[name] = Link(bandwidth=sent / statistics.median(seconds[2:]))
        return {name: watched(model, network, x) for name, model in models.items()}


# -- drawing -----------------------------------------------------------------------------------------

LEFT, RIGHT, LANE, BAR = 110, 30, 24, 16
PANEL = LANE * (1 + len(LANES)) + 34
CURVE = 150


def draw(steps: dict[str, Step], path: Path) -> None:
    """The picture: a panel of lanes for each engine, below them one of memory."""
    picture = Drawing(1000, len(steps) * PANEL + CURVE + 70)
    longest = max(step.seconds for step in steps.values())
    scale = (picture.width - LEFT - RIGHT) / longest
    for index, (name, step) in enumerate(steps.items()):
        _draw_lanes(picture, 8 + index * PANEL, name, step, scale)
    top = 8 + len(steps) * PANEL
    _draw_memory(picture, top, steps, scale)
    picture.write(path)


def _draw_lanes(picture: Drawing, top: float, name: str, step: Step, scale: float) -> None:
    computing = sum(to - since for _, _, since, to in step.compute)
    picture.text(
        8,
        top + 16,
        f"{name}: {step.seconds * 1e3:,.0f} ms, of which the blocks run {computing * 1e3:,.0f} ms",
        size=13,
    )
    for index, what in enumerate(("forward", "backward", "waits")):
        x = picture.width - RIGHT - 70 * (3 - index)
        picture.rect(x, top + 8, 10, 10, fill=COLORS[what])
        picture.text(x + 14, top + 17, what, size=10)
    top += 24
    for lane, title in enumerate(("compute", *LANES)):
        y = top + lane * LANE
        picture.text(LEFT - 8, y + 12, title.replace("_", "-"), anchor="end")
        picture.rect(LEFT, y, step.seconds * scale, BAR, fill="#f4f4f4")
    for transfer in step.transfers:
        y = top + (1 + LANES.index(transfer.op)) * LANE
        _bar(picture, y, transfer.started, transfer.ended, scale, transfer.op, transfer.unit[7:])
        if transfer.waited:
            since = transfer.ended - transfer.waited
            _bar(picture, top, since, transfer.ended, scale, "waits", "")
    for kind, block, since, to in step.compute:
        _bar(picture, top, since, to, scale, kind, str(block))


def _bar(
    picture: Drawing, y: float, since: float, to: float, scale: float, what: str, label: str
) -> None:
    x, width = LEFT + since * scale, (to - since) * scale
    note = f"{what} {label}: {since * 1e3:.1f} to {to * 1e3:.1f} ms"
    picture.rect(x, y, max(width - 0.5, 0.5), BAR, fill=COLORS[what], note=note)
    if label and width > 8:
        picture.text(x + width / 2, y + 12, label, size=9, anchor="middle", color="#ffffff")


def _draw_memory(picture: Drawing, top: float, steps: dict[str, Step], scale: float) -> None:
    most = max(size for step in steps.values() for _, size in step.memory)
    bottom = top + 24 + CURVE
    picture.text(8, top + 12, "memory, less the sharded parameters", size=13)
    picture.line([(LEFT, bottom), (picture.width - RIGHT, bottom)], color="#999999")
    for name, step in steps.items():
        color, peak = LINES[name], max(size for _, size in step.memory)
        points: list[tuple[float, float]] = [(LEFT, bottom)]
        for when, size in step.memory:
            x, y = LEFT + when * scale, bottom - size / most * CURVE
            points += [(x, points[-1][1]), (x, y)]
        picture.line(points, color=color, width=1.5)
        y = bottom - peak / most * CURVE
        picture.line([(LEFT, y), (picture.width - RIGHT, y)], color=color, width=0.5, dash="3 3")
        picture.text(LEFT - 8, y + 4, f"{name} {peak / 2**20:,.0f} MiB", anchor="end", color=color)
    end = max(step.seconds for step in steps.values())
    every = next(s for s in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if end / s < 12)
    for number in range(int(end / every) + 1):
        x, when = LEFT + number * every * scale, number * every * 1e3
        picture.line([(x, bottom), (x, bottom + 4)], color="#999999")
        picture.text(x, bottom + 16, f"{when:,.0f} ms", size=10, anchor="middle", color="#777777")


def main() -> None:
    """Command line."""
    default = Path(__file__).parent.parent / "docs" / "overlap.svg"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw(take(), path)
    print(path)


if __name__ == "__main__":
    main()
