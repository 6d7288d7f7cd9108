"""What is kept for backward: a step and its memory on 4 gloo processes, ours beside torch's.

    python benchmarks/activations.py [--quick] [--json PATH]

4 blocks of attention and an MLP, 128 wide, 2 x 256 tokens on each rank; FSDP (1, 4, 1). Kinds: none; full
recomputation; selective (matmuls and attention are kept); offload. torch's side is its FSDP2 with its
``checkpoint_wrapper``, with a selective policy of the same operations, and its ``offload_wrapper``; the
variants take turns in one launch. A step takes as long as its slowest rank. Memory is that of all tensors
alive at the step's peak, on the rank with the most, less the pool of our offload; on CPUs the copies of
torch's offload are memory like any other, so that it has no figure.
"""

import copy
import statistics
import time
from functools import partial
from typing import Any

import torch
from measure import Claim, Rounds, command_line, no_gc, print_table, range_of
from memory import PeakMemory
from models import Stack, torchs
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.nn import functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import parallel3d as p3d
from parallel3d.activations.selective import keep_costly
from parallel3d.testing import GlooPool

RANKS, WIDTH, HEADS, DEPTH, TOKENS = 4, 128, 4, 4, (2, 256)
SETTINGS = p3d.ActivationOffload(pool_gib=1, min_kib=64)
KINDS: dict[str, Any] = {
    "none": False,
    "full": True,
    "selective": "selective",
    "offload": SETTINGS,
}


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def ours_of(model: Stack, mesh: Any, kind: str) -> nn.Module:
    """``model`` on our engine."""
    return p3d.parallelize(model, mesh, activation_checkpointing=KINDS[kind])


def torchs_of(model: Stack, mesh: Any, kind: str) -> nn.Module:
    """``model`` on torch's, its blocks wrapped as torchtitan wraps them."""
    wrap: Any = {
        "full": wrappers.checkpoint_wrapper,
        "selective": partial(
            wrappers.checkpoint_wrapper,
            context_fn=partial(create_selective_checkpoint_contexts, keep_costly),
        ),
        "offload": wrappers.offload_wrapper,
    }.get(kind)
    if wrap is not None:
        model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)
    return torchs(model, mesh)


def peak(model: nn.Module, x: torch.Tensor, kind: str) -> int:
    """Bytes of the tensors alive at the peak of a step; see above."""
    outside = []
    if isinstance(KINDS[kind], p3d.ActivationOffload):
        block: Any = model.blocks[0]
        outside = [block._parallel3d_offload.shared.pool.words]
    with PeakMemory(outside) as memory:
        for _ in range(2):
            memory.reset()
            model.zero_grad()
            model(x).square().mean().backward()
    model.zero_grad()
    return memory.peak


def worker(rounds: int) -> dict[str, tuple[list[float], int]]:
    """One rank: variant -> seconds of its steps, and its peak in bytes."""
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=RANKS), device_type="cpu")
    plain = Stack(Block, DEPTH, WIDTH)
    x = torch.randn(*TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {
        (side, kind): make(copy.deepcopy(plain), mesh, kind)
        for kind in KINDS
        for side, make in (("ours", ours_of), ("torch", torchs_of))
    }

    def step(model: nn.Module) -> float:
        dist.barrier()
        start = time.perf_counter()
        model(x).square().mean().backward()
        seconds = time.perf_counter() - start
        model.zero_grad()
        return seconds

    for model in models.values():
        for _ in range(2):
            step(model)
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in models}
    order = list(models)
    for _ in range(rounds):
        for name in order:
            with no_gc():
                seconds[name].append(step(models[name]))
        order.reverse()
    peaks = {
        (side, kind): 0 if (side, kind) == ("torch", "offload") else peak(model, x, kind)
        for (side, kind), model in models.items()
    }
    return {" ".join(name): (seconds[name], peaks[name]) for name in models}


def run(quick: bool) -> tuple[list[Claim], dict[str, Any]]:
    """All kinds on both sides."""
    with GlooPool(RANKS) as pool:
        by_rank = pool.run(worker, 3 if quick else 10, timeout=1800)
    names = list(by_rank[0])
    rounds = Rounds(
        {n: [max(each) for each in zip(*(r[n][0] for r in by_rank), strict=True)] for n in names}
    )
    peaks = {n: max(rank[n][1] for rank in by_rank) / 2**20 for n in names}
    rows, claims, results = [], [], {}
    for kind in KINDS:
        own, peer = f"ours {kind}", f"torch {kind}"
        ratios = rounds.ratios(own, peer)
        to_none = statistics.median(rounds.ratios(own, "ours none"))
        rows.append(
            [kind, rounds.median(own) * 1e3, rounds.median(peer) * 1e3, statistics.median(ratios)]
            + [to_none, peaks[own], peaks[peer] or ""]
        )
        results[kind] = {
            "seconds": {n: rounds.median(n) for n in (own, peer)},
            "mib": {n: peaks[n] for n in (own, peer)},
            "to_none": to_none,
        }
        claims.append(
            Claim(
                f"forward and backward with activations kept: {kind}",
                ours=rounds.median(own) * 1e3,
                peer=rounds.median(peer) * 1e3,
                unit="ms",
                against="FSDP2",
                bar=1.0,
                aim=0.9,
                ratio=statistics.median(ratios),
                spread=range_of(ratios),
            )
        )
    print_table(
        f"(1, {RANKS}, 1): milliseconds of forward and backward, MiB at the peak",
        ["kept", "ours", "torch", "ours / torch", "to none", "MiB, ours", "MiB, torch"],
        rows,
    )
    return claims, results


if __name__ == "__main__":
    command_line(__doc__, run)
