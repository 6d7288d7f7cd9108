"""Draws docs/axes.svg: what each of the three axes does with a layer, on eight ranks.

    python docs/pictures/axes.py [FOLDER]

The numbers of ranks are a mesh's own: ``MeshLayout(2, 2, 2).rank`` of each coordinate.
"""

import sys
from itertools import product
from pathlib import Path

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

from svg import Drawing

import parallel3d as p3d

LAYOUT = p3d.MeshLayout(replicate=2, shard=2, tp=2)
SHARDS = ("#4f8fcc", "#d98a2b")
REST = "#f4f4f4"
WEIGHT, GAP, LEFT, TOP, PANEL = 88, 26, 40, 92, 400


def rank_box(drawing: Drawing, x: float, y: float, shard: int, tp: int, rank: int) -> None:
    """A rank as the layer's weight: grey as a whole, coloured the part that this rank stores."""
    half = WEIGHT / 2
    drawing.rect(x, y, WEIGHT, WEIGHT, fill=REST)
    drawing.rect(x + tp * half, y + shard * half, half, half, fill=SHARDS[tp])
    drawing.text(x + WEIGHT / 2, y - 5, f"rank {rank}", anchor="middle", color="#555555")


def main(folder: Path) -> None:
    """Two copies side by side; in each, rows of shard and columns of tp."""
    step = WEIGHT + GAP + 24
    drawing = Drawing(LEFT + 2 * PANEL, TOP + 2 * step + 34)
    drawing.text(
        LEFT, 22, "One weight on 2 x 2 x 2 ranks: each stores the coloured quarter.", size=15
    )
    drawing.text(
        LEFT,
        42,
        "tp halves its columns, shard halves the rows, replicate copies all.",
        size=13,
        color="#555555",
    )
    for replicate, shard, tp in product(*(range(size) for size in LAYOUT.sizes)):
        rank = LAYOUT.rank(replicate=replicate, shard=shard, tp=tp)
        x = LEFT + replicate * PANEL + tp * (step + 10)
        rank_box(drawing, x, TOP + shard * step, shard, tp, rank)
    width = 2 * WEIGHT + GAP + 34
    for replicate in range(LAYOUT.replicate):
        x = LEFT + replicate * PANEL
        drawing.text(x, TOP - 24, f"replicate {replicate}", size=13)
        for shard in range(LAYOUT.shard):
            y = TOP + shard * step + WEIGHT + 16
            drawing.line([(x, y - 8), (x + width, y - 8)], color="#bbbbbb")
            drawing.text(
                x + width / 2,
                y + 6,
                "tp: activations, in each layer",
                anchor="middle",
                color="#555555",
                size=12,
            )
        x += width + 12
        drawing.line([(x, TOP), (x, TOP + step + WEIGHT)], color="#bbbbbb")
        for line, words in enumerate(
            ("shard:", "weights before", "a layer, their", "gradients after")
        ):
            drawing.text(x + 8, TOP + step / 2 + 36 + 15 * line, words, color="#555555", size=12)
    y = TOP + 2 * step - 8
    drawing.line([(LEFT, y), (LEFT + PANEL + width, y)], color="#bbbbbb")
    drawing.text(
        LEFT + (PANEL + width) / 2,
        y + 18,
        "replicate: gradients of the stored quarter, once a step",
        anchor="middle",
        color="#555555",
        size=12,
    )
    drawing.write(folder / "axes.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
