"""Draws docs/streams.svg: what the engine puts on which stream of an accelerator, and what waits for what.

    python docs/pictures/streams.py [FOLDER]

The engine runs on streams and events that take notes, ``tests/_support/fsdp/noted_streams.py``. Each box is
something that was put on a stream; it stands to the right of all that its stream had waited for by then. An
arrow is such a wait.
"""

import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
sys.path[:0] = [str(DOCS.parent / folder) for folder in ("tests", "benchmarks")]

import pytest
from _support.fsdp.noted_streams import Device, note
from _support.models import Block, Lm, lm_loss, tokens
from svg import Drawing

import parallel3d as p3d
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world

STREAMS = {
    "compute": ("compute", "#2e75b6"),
    "gather": ("all-gather, high priority", "#59a14f"),
    "scatter": ("reduce-scatter, high priority", "#f28e2b"),
    "replicate": ("all-reduce", "#b07aa1"),
}
WORDS = {
    "gather_buffers": "cast",
    "all_gather": "gather",
    "copy_out": "unpack",
    "reduce_scatter": "reduce",
    "all_reduce": "all-reduce",
    "optimizer": "optimizer",
    "backward": "backward",
}
LEFT, TOP, LANE, BOX, STEP = 150, 34, 56, 34, 64


def record() -> list[tuple[str, str, dict[str, int]]]:
    """What was put on streams in the backward of the second step, and the optimizer's step."""
    device = Device()
    with pytest.MonkeyPatch.context() as patch, fake_world(0, 4):
        note(device, patch)
        mesh = p3d.build_mesh(p3d.MeshLayout(2, 2, 1), device_type="cpu")
        model = Lm(layers=3)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for index, layer in enumerate(model.layers):
            tell(device, layer, index)
        for _ in range(2):
            loss = lm_loss(model, tokens(0))
            device.log.clear()
            loss.backward()
            device.compute.put("optimizer")
    return [entry for entry in device.log if entry[0].split()[0] in WORDS]


def tell(device: Device, block: Block, index: int) -> None:
    """A note on the compute stream when the block's own backward has run."""

    def done(_: object) -> None:
        device.compute.put(f"backward layers.{index}")

    def watch(_: object, args: tuple, out: object) -> None:
        args[0].register_hook(done)

    block.up.register_forward_hook(watch)


def columns(log: list) -> list[int]:
    """Each entry's column: behind the one before it on its stream, and behind what that has waited for."""
    placed: dict[tuple[str, int], int] = {}
    found = []
    for _, stream, clock in log:
        known = [placed.get((name, count), -1) for name, count in before(placed, stream, clock)]
        column = max(known, default=-1) + 1
        placed[stream, clock[stream]] = column
        found.append(column)
    return found


def before(placed: dict, stream: str, clock: dict[str, int]) -> list[tuple[str, int]]:
    """The newest entry of each stream that is drawn and that ``clock`` has waited for."""
    newest = []
    for name, count in clock.items():
        upto = count - 1 if name == stream else count
        at = max((c for n, c in placed if n == name and c <= upto), default=0)
        if at:
            newest.append((name, at))
    return newest


def draw(log: list, path: Path) -> None:
    at = columns(log)
    lanes = list(STREAMS)
    picture = Drawing(LEFT + (max(at) + 1) * STEP + 20, TOP + len(lanes) * LANE + 6)
    picture.text(8, 18, "backward of three blocks and the optimizer, HSDP", size=14)
    for lane, name in enumerate(lanes):
        y = TOP + lane * LANE
        title = STREAMS[name][0].split(", ")
        picture.text(
            LEFT - 10, y + (21 if len(title) == 1 else 15), title[0], anchor="end", size=12
        )
        if len(title) > 1:
            picture.text(LEFT - 10, y + 29, title[1], anchor="end", size=10, color="#777777")
        picture.rect(LEFT, y, picture.width - LEFT - 10, BOX, fill="#f4f4f4")
    placed: dict[tuple[str, int], tuple[float, float]] = {}
    clocks: dict[tuple[str, int], dict[str, int]] = {}
    seen: dict[str, dict[str, int]] = {}
    for (what, stream, clock), column in zip(log, at, strict=True):
        x, y = LEFT + column * STEP, TOP + lanes.index(stream) * LANE
        new = [d for d in before(placed, stream, clock) if d[1] > seen.get(stream, {}).get(d[0], 0)]
        for name, count in new:
            implied = any(clocks[d].get(name, 0) >= count for d in new if d != (name, count))
            if name != stream and not implied:
                arrow(picture, placed[name, count], (x, y))
        clocks[stream, clock[stream]] = clock
        seen[stream] = dict(clock)
        placed[stream, clock[stream]] = (x, y)
        box(picture, x, y, what, STREAMS[stream][1])
    picture.write(path)


def box(picture: Drawing, x: float, y: float, what: str, color: str) -> None:
    word, _, unit = what.partition(" ")
    unit = unit.removeprefix("layers.") if unit.startswith("layers.") else "root" if unit else ""
    picture.rect(x + 2, y + 3, STEP - 12, BOX - 6, fill=color, note=what)
    middle = x + 2 + (STEP - 12) / 2
    picture.text(
        middle, y + (15 if unit else 21), WORDS[word], anchor="middle", size=10, color="#ffffff"
    )
    if unit:
        picture.text(middle, y + 27, unit, anchor="middle", size=10, color="#ffffff")


def arrow(picture: Drawing, since: tuple[float, float], to: tuple[float, float]) -> None:
    """From the right end of one box to the left end of another."""
    x1, y1 = since[0] + STEP - 10, since[1] + BOX / 2
    x2, y2 = to[0] + 2, to[1] + BOX / 2
    picture.line([(x1, y1), (x2, y2)], color="#999999", width=1.2)
    picture.circle(x2, y2, 2.6, fill="#999999")


def main() -> None:
    """Command line."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    draw(record(), folder / "streams.svg")


if __name__ == "__main__":
    main()
