"""Peak host memory of load_hf and save_hf: measured, below 1.5 of the local shard and the largest tensor."""

from pathlib import Path

import pytest

from parallel3d import materialize
from parallel3d.checkpoint import save_hf
from parallel3d.testing import GlooPool

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.full  # benchmarks/checkpoint_memory.py measures it, too
def test_peak_memory(gloo_pool: GlooPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import checkpoint_memory as script

    for name, sizes in (("small", script.SMALL), ("large", script.SIZES)):
        model = materialize(script.llama(sizes), device="cpu")
        save_hf(tmp_path / name / "in", model)
    largest = max(p.nbytes for p in model.parameters())
    del model
    rows = script.case(gloo_pool, (1, 4, 1), str(tmp_path), largest)
    assert {row["what"] for row in rows} >= {"load_hf", "save_hf"}
    for row in rows:
        bound = 1.5 * row["shard_bytes"] + row["largest_bytes"]
        assert row["shard_bytes"] <= row["peak_bytes"] <= bound, row
