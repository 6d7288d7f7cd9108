"""Peak host memory of loading a model and of exporting it, beside the bound: 1.5 local shards + one tensor.

    python benchmarks/checkpoint_memory.py [--quick] [--json PATH]

A Llama of 220 MB on 4 gloo processes, in Hugging Face's form and in ours. What counts is the growth of a
process's resident memory (Linux: VmHWM, reset before each operation), pages of files included that it maps;
not what it had before the model had memory. ``load_hf`` begins with a model on meta, so its peak includes
the shard; to the growth of the others the shard is added. The largest of the ranks' peaks is shown.
"""

import ctypes
import gc
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import MIB, Claim, command_line, print_rows
from torch import nn

import parallel3d as p3d
from parallel3d.checkpoint import load_hf, save_hf
from parallel3d.checkpoint.pieces import pieces_of
from parallel3d.testing import GlooPool

BAR = 1.5  # local shards, plus the largest tensor
MESHES = [(1, 4, 1), (1, 2, 2), (2, 1, 2)]
SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192}
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
LAYERS, HEADS = 3, 8


@dataclass(frozen=True)
class Operation:
    """What is measured.

    Attributes:
        run: given a parallel model and a folder.
        from_meta: the model is on meta before it; else it has values.
    """

    run: Callable[[nn.Module, str], Any]
    from_meta: bool


OPERATIONS = {
    "load_hf": Operation(lambda model, folder: load_hf(f"{folder}/in", model), from_meta=True),
    "save_hf": Operation(lambda model, folder: save_hf(f"{folder}/out", model), from_meta=False),
    "save_hf, a file for each rank": Operation(
        lambda model, folder: save_hf(f"{folder}/out", model, max_shard_size="60MB"),
        from_meta=False,
    ),
    "save": Operation(
        lambda model, folder: p3d.checkpoint.save(f"{folder}/run", model, step=1), from_meta=False
    ),
    "load": Operation(
        lambda model, folder: p3d.checkpoint.load(f"{folder}/run", model), from_meta=False
    ),
}


def llama(sizes: dict[str, Any]) -> nn.Module:
    """On meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, **sizes
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def parallel(sizes: dict[str, Any], mesh: tuple[int, int, int]) -> nn.Module:
    built = p3d.build_mesh(p3d.MeshLayout(*mesh), device_type="cpu")
    return p3d.parallelize(llama(sizes), built, tp_plan="auto" if mesh[2] > 1 else None)


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def growth(function: Callable[[], Any]) -> int:
    """By how many bytes resident memory is larger at its peak in ``function`` than before."""
    gc.collect()
    with suppress(OSError, AttributeError):  # free pages that the allocator keeps would hide growth
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


def on_ranks(mesh: tuple[int, int, int], root: str) -> dict[str, dict[str, int]]:
    """By operation: this rank's shard and peak, in bytes."""
    found = {}
    for name, operation in OPERATIONS.items():
        for sizes, folder in ((SMALL, f"{root}/small"), (SIZES, f"{root}/large")):
            model = parallel(sizes, mesh)
            if not operation.from_meta:
                load_hf(f"{folder}/in", model)
            peak = growth(partial(operation.run, model, folder))
            shard = sum(p.local.nbytes for t in model.parameters() for p in pieces_of(t))
            del model
        found[name] = {
            "shard_bytes": shard,
            "peak_bytes": peak if operation.from_meta else peak + shard,
        }
    return found


def case(
    pool: GlooPool, mesh: tuple[int, int, int], root: str, largest: int
) -> list[dict[str, Any]]:
    """A row for each operation."""
    found = pool.run(on_ranks, mesh, root, world_size=mesh[0] * mesh[1] * mesh[2])
    rows = []
    for name in OPERATIONS:
        worst = max((rank[name] for rank in found), key=lambda row: row["peak_bytes"])
        row = {"what": name, "mesh": str(mesh), **worst, "largest_bytes": largest}
        row["bound_bytes"] = int(BAR * row["shard_bytes"]) + largest
        rows.append(row)
    return rows


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """All meshes, or one; each in processes of its own."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for name, sizes in (("small", SMALL), ("large", SIZES)):
            model = p3d.materialize(llama(sizes), device="cpu")
            save_hf(f"{root}/{name}/in", model)
            largest = max(p.nbytes for p in model.parameters())
        del model
        for mesh in MESHES[:1] if quick else MESHES:
            with GlooPool(4) as pool:
                rows += case(pool, mesh, root, largest)
    columns = {
        "operation": "what",
        "ranks": "mesh",
        "shard": "shard_bytes",
        "largest tensor": "largest_bytes",
        "peak": "peak_bytes",
        "bound": "bound_bytes",
    }
    print_rows("peak host memory of 4 gloo processes, MiB", columns, rows)
    against = f"{BAR} shards + a tensor"
    claims = [
        Claim(
            f"peak host memory, {row['what']}, {row['mesh']}",
            row["peak_bytes"] / MIB,
            row["bound_bytes"] / MIB,
            "MiB",
            against,
            bar=1.0,
        )
        for row in rows
    ]
    return claims, {"checkpoint_memory": rows}


if __name__ == "__main__":
    command_line(__doc__, run)
