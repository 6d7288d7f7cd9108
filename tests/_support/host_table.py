"""Writes the table of ``docs/performance.md`` of what the host does for a unit on an accelerator.

python tests/_support/host_table.py
"""

import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # under pytest it is there already
    sys.path[0] = str(ROOT / "tests")  # this folder has another ``models``
sys.path.append(str(ROOT / "benchmarks"))

import models  # noqa: E402

import parallel3d as p3d  # noqa: E402
from _support.fsdp.host_counts import COUNTED, CountedStreams, counted  # noqa: E402
from parallel3d.testing import fake_world  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
WIDTH = 16
BEGIN, END = "<!-- host counts -->\n", "<!-- end of host counts -->\n"


@dataclass(frozen=True)
class Case:
    """A model of small blocks on a mesh (replicate, shard, tp).

    Attributes:
        mixed: bf16 parameters, sums in fp32.
    """

    name: str
    mesh: tuple[int, int, int]
    mixed: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {'bf16/fp32' if self.mixed else 'fp32'}"


CASES = [
    Case("FSDP", (1, 4, 1)),
    Case("FSDP", (1, 4, 1), mixed=True),
    Case("HSDP", (2, 2, 1)),
    Case("HSDP", (2, 2, 1), mixed=True),
    Case("FSDP + TP", (1, 2, 2)),
]


@cache
def of_unit(case: Case, engine: str) -> Counter[str]:
    """What a unit costs in a step, above the plain model, under ``ours``, that with ``static`` memory, or
    ``torch``.

    It is the difference between models of four and of two units, so that the root's own share is out.
    """
    few, many = (_of_model(case, engine, depth) for depth in (2, 4))
    plain = _of_plain(4, case.mixed) - _of_plain(2, case.mixed)
    return Counter({what: (many[what] - few[what] - plain[what]) // 2 for what in COUNTED})


def _of_model(case: Case, engine: str, depth: int) -> Counter[str]:
    def wrapped() -> nn.Module:
        mesh = p3d.build_mesh(p3d.MeshLayout(*case.mesh), device_type="cpu")
        wrap = getattr(
            models, ("torchs" if engine == "torch" else "ours") + "_tp" * (case.mesh[2] > 1)
        )
        made = wrap(models.Stack(models.SmallBlock, depth, WIDTH), mesh, mixed=case.mixed)
        if engine == "static":
            made.set_static_memory(True)
        return made

    replicate, shard, tp = case.mesh
    with fake_world(0, replicate * shard * tp), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return counted(wrapped, torch.randn(4, WIDTH), CountedStreams())[0]


@cache
def _of_plain(depth: int, mixed: bool) -> Counter[str]:
    dtype = torch.bfloat16 if mixed else torch.float32
    plain = models.Stack(models.SmallBlock, depth, WIDTH).to(dtype)
    return counted(lambda: plain, torch.randn(4, WIDTH, dtype=dtype), CountedStreams())[0]


def table() -> str:
    """The table as Markdown. Calls of functions are rounded to tens."""
    lines = [
        f"| a unit and step, above the plain model | {' | '.join(COUNTED)} |\n",
        f"|---|{'---:|' * len(COUNTED)}\n",
    ]
    for case in CASES:
        for engine in ("ours", "torch"):
            counts = of_unit(case, engine)
            name = "ours" if engine == "ours" else "torch"
            cells = [counts[what] for what in COUNTED]
            cells[-1] = round(cells[-1], -1)
            lines.append(f"| {case}: {name} | {' | '.join(f'{cell:,}' for cell in cells)} |\n")
    return "".join(lines)


def written() -> str:
    """The table that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    page = PAGE.read_text()
    head, tail = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}{table()}{END}{tail}")
