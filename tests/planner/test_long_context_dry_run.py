"""8B with sequences of 128k tokens, on cp 1 and on cp 8: what a dry run holds, and what the planner says."""

import sys
from dataclasses import replace
from pathlib import Path

import llama
import pytest

from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Workload, predict, spec_from_hf_config
from parallel3d.tools.dryrun import record
from parallel3d.tools.dryrun.world import script

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama"
sys.path.append(str(EXAMPLE))

LENGTH, LAYERS = 131072, 8


def dry_run(cp: int, checkpointing: str):
    """The first step, of one sequence for each data rank."""
    mesh = ["--shard", str(8 // cp), "--cp", str(cp), "--cp-attention", "ulysses"]
    words = ["--size", "8b", "--seq-len", str(LENGTH), "--batch", str(8 // cp)]
    more = ["--mixed-precision", "--loss-parallel", "chunked"]
    more += ["--activation-checkpointing", checkpointing]
    return record(script(EXAMPLE / "train.py", [*mesh, *words, *more]), 8, 0, steps=1)


def planned(cp: int, checkpointing: str):
    """Of as many layers."""
    model = spec_from_hf_config("llama-3.1-8b")
    units = [replace(u, count=LAYERS) if u.kind == "block" else u for u in model.units]
    work = Workload(
        seq_len=LENGTH,
        micro_batch=1,
        checkpointing=checkpointing,
        chunked_loss=True,
        cp_attention="ulysses",
    )
    layout = MeshLayout(1, 8 // cp, 1, cp=cp)
    return predict(replace(model, units=tuple(units)), layout, Cluster.of("h100"), work)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_the_activations_are_an_eighth(checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is of parameters is the same, as they lie on shard x cp. The planner says so within 8 %."""
    monkeypatch.setitem(llama.SIZES, "8b", replace(llama.SIZES["8b"], n_layers=LAYERS))
    runs = {cp: dry_run(cp, checkpointing) for cp in (1, 8)}
    for cp, run in runs.items():
        assert run.mesh.get("cp", 1) == cp and run.steps == 1
        memory = planned(cp, checkpointing).memory
        first_step = memory.allocated - memory.terms["optimizer"].value  # there is no state yet
        assert run.peak.bytes == pytest.approx(first_step, rel=0.08)
    held = {cp: run.peak.by_kind for cp, run in runs.items()}
    # Selectively, what cp's collectives have received is kept too, so that nothing is sent again.
    ratio = 8 if checkpointing == "full" else 6.92
    assert held[1]["activations"] / held[8]["activations"] == pytest.approx(ratio, rel=0.02)
    assert held[1]["parameters"] == held[8]["parameters"]
