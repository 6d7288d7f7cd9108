"""What expert parallelism sends: the recorder on real processes, the formulas, the page."""

import re
from pathlib import Path

import pytest
from _support.ep.on_ranks import exchanged, traffic

from parallel3d import MeshLayout
from parallel3d.ep.division import rows_a_pair


@pytest.mark.parametrize(
    ("layout", "capacity"),
    [
        (MeshLayout(shard=4, ep=2), None),
        (MeshLayout(shard=4, ep=4), None),
        (MeshLayout(shard=2, tp=2, ep=4), None),
        (MeshLayout(replicate=2, shard=2, ep=2), 1.25),
        (MeshLayout(shard=2, tp=2, ep=4), 1.25),
    ],
    ids=str,
)
def test_the_recorder_counts_what_the_formula_says(gloo_pool, layout, capacity) -> None:
    for recorded, wanted in gloo_pool.run(exchanged, layout, capacity, world_size=4):
        assert recorded == wanted


def test_the_page_has_these_numbers() -> None:
    text = (Path(__file__).parents[2] / "docs" / "expert_parallel.md").read_text()
    table = re.findall(r"^\| (\d+) \| ([\d.]+) \| (.+) \| (.+) \|$", text, re.M)
    assert [int(row[0]) for row in table] == [2, 4, 8, 16]
    for ranks, share, *cells in table:
        ep, pairs = int(ranks), 4096 * 8
        assert share == f"{rows_a_pair(128, ep, 8):.2f}"
        for cell, each in zip(cells, (rows_a_pair(128, ep, 8), 1.0), strict=True):
            sent = traffic(ep, round(pairs * each), pairs, 2048, 2, 2)
            assert cell == " + ".join(f"{sum(part) / 2**20:.0f}" for part in sent)
