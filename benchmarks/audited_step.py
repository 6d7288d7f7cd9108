"""What an audited step costs beside the same step unaudited: time and peak memory, of five models.

    python benchmarks/audited_step.py [--quick] [--json PATH]

Two gloo processes share each model (FSDP; one by cp). Steps take turns, audited and not; a step
is forward and backward of the slowest rank. Memory is the most bytes of tensors alive in the step on rank 0,
those that are there before it too. ``--quick`` leaves out the two blocks of an 8B model.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from measure import Claim, command_line, print_table
from memory import PeakMemory
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))
from llama import Llama, LlamaConfig

import parallel3d as p3d
from parallel3d.testing import GlooPool

ROUNDS = 3
MIB = 2**20


def llama(dim: int, layers: int, heads: int, ffn: int) -> nn.Module:
    return Llama(LlamaConfig(dim, layers, heads, heads // 4 or 1, ffn, 512, 4096))


def perceptron() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)])


class Causal(nn.Module):
    """Blocks of causal attention and a feed-forward, without positions."""

    def __init__(self, width: int = 256, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(512, width)
        self.blocks: Any = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 512)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            qkv = rearrange(
                block["qkv"](block["norm"](x)), "b s (n h d) -> n b h s d", n=3, h=self.heads
            )
            q, k, v = qkv
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](rearrange(y, "b h s d -> b s (h d)"))
            x = x + block["down"](F.gelu(block["up"](x)))
        return self.head(x)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4)


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(0))


def vectors(rows: int, length: int, width: int) -> torch.Tensor:
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], dict[str, int]]] = {
    "perceptron, 8 of 512": (perceptron, lambda: vectors(4, 64, 512), {"shard": 2}),
    "TransformerEncoder, 4 of 256": (encoder, lambda: vectors(4, 128, 256), {"shard": 2}),
    "Llama, 4 of 256": (lambda: llama(256, 4, 8, 768), lambda: ids(4, 128), {"shard": 2}),
    "causal attention, 4 of 256, cp": (Causal, lambda: ids(4, 257), {"cp": 2}),
    "Llama, 2 blocks of an 8B model": (
        lambda: llama(4096, 2, 32, 14336),
        lambda: ids(1, 128),
        {"shard": 2},
    ),
}


def measured(name: str, rounds: int) -> dict[str, float]:
    """On a rank: median seconds and most bytes, audited and not."""
    warnings.simplefilter("ignore")
    build, batch, sizes = MODELS[name]
    mesh = p3d.build_mesh(p3d.MeshLayout(**sizes), device_type="cpu")
    torch.manual_seed(0)
    model = p3d.parallelize(build(), mesh, checks=p3d.Checks(audit=True))
    inputs = batch()
    tokens = not inputs.is_floating_point()
    if "cp" in sizes:
        inputs, targets = p3d.cp.shard_batch((inputs[:, :-1], inputs[:, 1:]), mesh)
    elif tokens:
        inputs, targets = inputs[:, :-1], inputs[:, 1:]

    def step() -> None:
        output = model(inputs)
        if tokens:
            F.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
        else:
            output.square().mean().backward()

    step()  # the audit that is on by itself, and what is done once
    seconds: dict[bool, list[float]] = {False: [], True: []}
    peaks: dict[bool, int] = {}
    for number in range(rounds + 1):
        for audited in (False, True):
            model.zero_grad()
            if audited:
                p3d.audit.next_step(model)
            dist.barrier()
            if number == 0:
                with PeakMemory([]) as memory:
                    step()
                peaks[audited] = memory.peak
                continue
            began = time.perf_counter()
            step()
            dist.barrier()
            seconds[audited].append(time.perf_counter() - began)
    return {
        "step": statistics.median(seconds[False]),
        "audited": statistics.median(seconds[True]),
        "step MiB": peaks[False] / MIB,
        "audited MiB": peaks[True] / MIB,
    }


def run(quick: bool) -> tuple[list[Claim], Mapping[str, Any]]:
    """All models."""
    names = list(MODELS)[: -1 if quick else None]
    found: dict[str, dict[str, float]] = {}
    with GlooPool(2) as pool:
        for name in names:
            found[name] = pool.run(measured, name, ROUNDS, world_size=2, timeout=900.0)[0]
    print_table(
        "A step on two processes, audited and not",
        ["model", "step ms", "audited ms", "ratio", "step MiB", "audited MiB", "ratio "],
        [
            [
                name,
                row["step"] * 1e3,
                row["audited"] * 1e3,
                row["audited"] / row["step"],
                row["step MiB"],
                row["audited MiB"],
                row["audited MiB"] / row["step MiB"],
            ]
            for name, row in found.items()
        ],
    )
    return [], {"audited_step": found}


if __name__ == "__main__":
    command_line(__doc__, run)
