"""How exact reduced gradients are: summed in bf16, in fp32, and in fp32 of what was sent in bf16.

    python benchmarks/wire_error.py [--ranks 8 16 32 64]

Simulated ranks, a language model of two layers, other tokens on each rank. The error is the norm of a
gradient's difference from the mean, in float64, of what autograd has given each rank, relative to that mean's
norm: so it has no rounding of forward and backward in it. Bytes are those that a rank sends a step in
reductions: (n - 1) / n of a reduce-scatter's, an all-to-all's or an all-gather's, twice that of an
all-reduce's.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh
from parallel3d.fsdp import fully_shard
from parallel3d.testing import LocalWorld, Recorder, local_world, record_collectives, shards_of

BF16, FP32 = torch.bfloat16, torch.float32
VOCAB, WIDTH, HIDDEN, TOKENS = 211, 48, 96, 64

WAYS: dict[str, dict[str, Any]] = {
    "summed in bf16": {"reduce_dtype": BF16},
    "summed in fp32": {"reduce_dtype": FP32},
    "sent in bf16, summed in fp32": {"reduce_dtype": FP32, "wire_dtype": BF16},
}


class Lm(nn.Module):
    """Embedding, two residual blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x[:-1]).float(), ids[1:])


def build() -> Lm:
    torch.manual_seed(0)
    return Lm()


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(rank))


def exact(ranks: int, compute: torch.dtype) -> dict[str, torch.Tensor]:
    """The mean of the ranks' own gradients in float64, by parameter."""
    model = build().to(compute)
    total = {
        name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()
    }
    for rank in range(ranks):
        model(tokens(rank)).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] += p.grad.double() / ranks
        model.zero_grad()
    return total


def sent(recorder: Recorder) -> float:
    """Bytes that a rank sends in the recorded backward's reductions."""
    times = {"reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
    total = 0.0
    for call in recorder.calls:
        of_sums = call.op == "all_gather" and call.axis == "replicate"
        n = call.group_size
        total += call.bytes * (1 if of_sums else times.get(call.op, 0)) * (n - 1) / n
    return total


def reduced(
    world: LocalWorld, layout: MeshLayout, policy: MixedPrecisionPolicy
) -> tuple[dict[str, torch.Tensor], float]:
    """The whole gradients, and the bytes that a rank has sent for them."""
    with world.paused():
        model = build()
    mesh = build_mesh(layout, device_type="cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    loss = model(world.map(lambda rank: tokens(layout.data_rank(rank))))
    with record_collectives(mesh) as recorder:
        loss.backward()
    with world.paused():
        found = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            assert p.grad is not None
            for _, box, part in shards_of(p.grad):
                found[name][box] = part
    return found, sent(recorder)


def error(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, relative."""
    squares = sum(float((found[name].double() - want[name]).square().sum()) for name in want)
    return (squares / sum(float(w.square().sum()) for w in want.values())) ** 0.5


def rows(ranks: int) -> list[tuple[str, ...]]:
    """For each mesh and dtype of gradients: the error and bytes of each way."""
    found = []
    for compute in (BF16, FP32):
        want = exact(ranks, compute)
        for sizes in ((1, ranks), (ranks // 4, 4), (ranks, 1)):
            cells = []
            for dtypes in WAYS.values():
                with local_world(ranks) as world:
                    policy = MixedPrecisionPolicy(param_dtype=compute, **dtypes)
                    got, size = reduced(world, MeshLayout(*sizes), policy)
                cells.append(f"{error(got, want):.1e} ({size / 1024:,.0f} KiB)")
            found.append((f"{sizes[0]} x {sizes[1]}", str(compute)[6:], *cells))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    given = parser.parse_args(arguments)
    print(f"| replicate x shard | gradients | {' | '.join(WAYS)} |")
    print("|---" * 5 + "|")
    for ranks in given.ranks:
        for row in rows(ranks):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
