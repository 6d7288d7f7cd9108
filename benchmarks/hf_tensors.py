"""``checkpoint.hf_tensors`` beside torch's ``full_tensor()`` of each parameter in turn: GB/s.

    python benchmarks/hf_tensors.py [--quick] [--json PATH]

A Llama of 220 MB in float32 on 4 gloo processes; the two take turns in one launch. Ours includes the call,
which plans and compares the ranks. ``to=0`` gives the tensors to one rank, for which torch has no equal.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from checkpoint_memory import SIZES, SMALL, parallel
from measure import Claim, alternate, command_line, print_rows, range_of
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import parallel3d as p3d
from parallel3d.checkpoint import hf_tensors
from parallel3d.testing import GlooPool

MESHES = [(1, 4, 1), (2, 2, 1), (1, 2, 2)]


def on_ranks(mesh: tuple[int, int, int], rounds: int, small: bool) -> dict[str, Any]:
    """A row, the same on all ranks but for the noise of their clocks."""
    model = p3d.materialize(parallel(SMALL if small else SIZES, mesh), device="cpu")
    weights = [*model.parameters()]

    def ours(to: Any) -> None:
        for pair in hf_tensors(model, to=to):
            del pair

    def torchs() -> None:
        for weight in weights:
            if isinstance(weight, DTensor):
                weight.full_tensor()

    def timed(function: Callable[[], None]) -> Callable[[], float]:
        def step() -> float:
            dist.barrier()
            start = time.perf_counter()
            function()
            dist.barrier()  # until the last rank is done
            return time.perf_counter() - start

        return step

    steps = {
        "ours": timed(lambda: ours("all")),
        "to_0": timed(lambda: ours(0)),
        "torch": timed(torchs),
    }
    taken = alternate(steps, rounds=rounds, steps_per_round=1, warmup=1)
    ratios = taken.ratios("ours", "torch")
    size = sum(weight.numel() * weight.itemsize for weight in weights)
    return {
        "mesh": str(mesh),
        **{f"{name}_gb_s": size / taken.median(name) / 1e9 for name in steps},
        **{f"{name}_ms": taken.median(name) * 1e3 for name in steps},
        "ratio": statistics.median(ratios),
        "ratio_range": range_of(ratios),
    }


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """All meshes, or one with a small model."""
    rows = []
    with GlooPool(4) as pool:
        for mesh in MESHES[:1] if quick else MESHES:
            rows.append(pool.run(on_ranks, mesh, 3 if quick else 9, quick, timeout=600.0)[0])
    columns = {
        "ranks": "mesh",
        "ours, GB/s": "ours_gb_s",
        "to=0": "to_0_gb_s",
        "full_tensor": "torch_gb_s",
        "ratio of times": "ratio",
        "middle half": "ratio_range",
    }
    print_rows("whole tensors of 4 gloo processes", columns, rows)
    claims = [
        Claim(
            f"hf_tensors, {row['mesh']}",
            row["ours_ms"],
            row["torch_ms"],
            "ms",
            "full_tensor()",
            bar=1.2,
            aim=1.0,
            ratio=row["ratio"],
            spread=row["ratio_range"],
        )
        for row in rows[
            :1
        ]  # with replicas or tp, whole tensors of FSDP2 travel other ways: shown only
    ]
    return claims, {"hf_tensors": rows}


if __name__ == "__main__":
    command_line(__doc__, run)
