"""Wrapping a model of 70 billion parameters on the meta device, as one of 1,024 ranks, beside torch.

    python benchmarks/wrapping.py [--quick] [--json PATH]

Llama-70B's shapes: 80 blocks of 9 parameters, 8192 wide. Every block is a unit, the embedding is one, the
final norm and the head are one together, then the root; on both sides the same. With tensor parallelism 8:
``parallelize`` beside torch's ``parallelize_module`` and ``fully_shard``. Each figure is of a fresh process
on a fake process group (nothing is sent), the sides taking turns; the mesh's groups exist before, and what is
imported is.

- wrap: CPU seconds of ``fully_shard`` over all units (or ``parallelize``), and how much the process grew.
- first: what the first forward does once, before it computes; after ``to_empty``.
- state dict: seconds of one ``model.state_dict()``.
"""

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from measure import Claim, command_line, print_table, range_of
from torch import nn
from torch.distributed import DeviceMesh, fsdp
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world

WORLD = 1024
MEBIBYTE = 2**20
LIMIT = 0.6 * 1024
"""MiB that the process may grow by."""

CASES = {
    "fsdp": ("(1, 1024, 1)", MeshLayout(shard=WORLD)),
    "hsdp": ("(8, 128, 1)", MeshLayout(replicate=8, shard=128)),
    "tp": ("(1, 128, 8)", MeshLayout(shard=128, tp=8)),
}

PLAN = {
    "blocks.*.{wq,wk,wv,w1,w3}": "colwise",
    "blocks.*.{wo,w2}": "rowwise",
}


class Block(nn.Module):
    """A block's parameters; it is wrapped and never run."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        kv = width // heads * kv_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wo = _linear(width, width), _linear(width, width)
        self.wk, self.wv = _linear(width, kv), _linear(width, kv)
        self.w1, self.w3 = _linear(width, hidden), _linear(width, hidden)
        self.w2 = _linear(hidden, width)


class Llama(nn.Module):
    """The whole model."""

    def __init__(self, layers: int = 80, vocabulary: int = 128256, width: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 28672, 64, 8) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), _linear(width, vocabulary)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


# ---- the two sides ----


def ours(model: Llama, mesh: DeviceMesh) -> None:
    """Ours: unit by unit, or with tensor parallelism in the one call."""
    if mesh["tp"].size() > 1:
        parallelize(model, mesh, tp_plan=PLAN)
        return
    _shard(fully_shard, model, mesh)


def torchs(model: Llama, mesh: DeviceMesh) -> None:
    """torch's."""
    if mesh["tp"].size() > 1:
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        plan = {}
        for pattern, style in PLAN.items():
            before, _, names = pattern.partition("{")
            for name in names.rstrip("}").split(","):
                plan[before + name] = styles[style]()
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    data = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    _shard(fsdp.fully_shard, model, data)


def _shard(fully: Callable[..., Any], model: Llama, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully(block, mesh=mesh)
    fully(model.embedding, mesh=mesh)
    fully([model.norm, model.head], mesh=mesh)
    fully(model, mesh=mesh)


def _first(side: str, model: Any) -> None:
    """What the root's first forward begins with."""
    fully: Any = fully_shard if side == "ours" else fsdp.fully_shard
    fully.state(model)._lazy_init()


# ---- one process ----


def child(side: str, case: str, layers: int) -> dict[str, float]:
    """Seconds (CPU) and MiB of one side in this process."""
    with fake_world(rank=3, world_size=WORLD):
        mesh = build_mesh(CASES[case][1].resolve(WORLD), device_type="cpu")
        for name in ("replicate", "shard", "tp"):
            mesh.get_group(name)
        with torch.device("meta"):
            model = Llama(layers)
        wrap = ours if side == "ours" else torchs
        found = {}
        gc.collect()
        before = _resident()
        found["wrap"] = _seconds(lambda: wrap(model, mesh))
        found["grown"] = _resident() - before
        found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if side == "ours":  # ``to_empty`` would do it
            found["first"] = _seconds(lambda: _first(side, model))
        model.to_empty(device="cpu")
        if side == "torch":  # which refuses meta parameters
            found["first"] = _seconds(lambda: _first(side, model))
        found["state_dict"] = _seconds(model.state_dict)
        return found


def _seconds(action: Callable[[], Any]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def _resident() -> float:
    """This process's memory, MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MEBIBYTE


# ---- all of them ----

_KEYS = {
    "wrap": "wrap, s",
    "grown": "grown, MiB",
    "peak": "process, MiB",
    "first": "first, ms",
    "state_dict": "state dict, ms",
}


def measured(side: str, case: str, layers: int) -> dict[str, float]:
    """``child`` in a fresh process."""
    command = [sys.executable, __file__, "--child", side, case, str(layers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(quick: bool) -> tuple[list[Claim], Mapping[str, Any]]:
    """The claims and everything measured; prints the table."""
    rounds, layers = (1, 80) if quick else (5, 80)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    claims, rows = [], []
    for case, (name, _) in CASES.items():
        sides = found[case] = {"ours": [], "torch": []}
        order = list(sides)
        for _ in range(rounds):
            for side in order:
                sides[side].append(measured(side, case, layers))
            order.reverse()
        middle = {
            side: {key: statistics.median(r[key] for r in results) for key in _KEYS}
            for side, results in sides.items()
        }
        for side, values in middle.items():
            rows.append([f"{name} {side}", *(_shown(key, values[key]) for key in _KEYS)])
        ratios = [a["wrap"] / b["wrap"] for a, b in zip(sides["ours"], sides["torch"], strict=True)]
        claims += [
            Claim(
                f"wrapping 70B, {name}",
                middle["ours"]["wrap"],
                middle["torch"]["wrap"],
                "s",
                "FSDP2 + TP" if case == "tp" else "FSDP2",
                bar=2.0,
                aim=1.0,
                ratio=statistics.median(ratios),
                spread=range_of(ratios),
            ),
            Claim(
                f"process memory of it, {name}",
                middle["ours"]["grown"],
                LIMIT,
                "MiB",
                "fixed limit",
                bar=1.0,
                aim=middle["torch"]["grown"] / LIMIT,
            ),
        ]
    print_table(
        f"wrapping, {layers} blocks, medians of {rounds} processes a side",
        ["mesh (replicate, shard, tp)", *_KEYS.values()],
        rows,
    )
    return claims, {"rounds": rounds, "layers": layers, "processes": found}


def _shown(key: str, value: float) -> object:
    if key in ("first", "state_dict"):
        return f"{1e3 * value:.1f}"
    return f"{value:.2f}" if key == "wrap" else f"{value:.0f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--child", nargs=3)
        side, case, layers = parser.parse_args().child
        torch.set_num_threads(1)
        print(json.dumps(child(side, case, int(layers))))
    else:
        command_line(__doc__, run)
