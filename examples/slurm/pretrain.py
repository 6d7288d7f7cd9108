"""Trains a module of one's own under SLURM, which stops and requeues it; "new": what a plain program lacks.

    torchrun --nproc-per-node 2 examples/slurm/pretrain.py

prints:

    step 20: loss 3.86
    step 40: loss 2.32
    step 60: loss 1.19

`sbatch examples/slurm/pretrain.sbatch` starts it on two nodes. Before the time limit SLURM sends SIGUSR1: the
step ends, a last checkpoint is written, the job is put back into the queue, and goes on from there.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import parallel3d as p3d


class Block(nn.Module):
    """A layer of a causal transformer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Reads and predicts bytes."""

    def __init__(self, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(step: int, rows: int, length: int) -> Tensor:
    """(rows, length + 1) bytes, which depend on the step alone, so that a resume repeats none."""
    start = torch.randint(256, (rows, 1), generator=torch.Generator().manual_seed(step))
    return (start + 3 * torch.arange(length + 1)) % 256


parser = argparse.ArgumentParser()
parser.add_argument(
    "--out", default="out", help="folder of checkpoints, on a disk that all nodes share"
)
for name, value in {"steps": 60, "save-every": 20, "batch": 16, "dim": 64, "layers": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=value)
options = parser.parse_args()

# new: a copy of the model on each node, sharded over the node's ranks
nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
layout = p3d.MeshLayout(replicate=nodes, shard=-1)
mesh = p3d.build_mesh(layout)
layout = layout.resolve(mesh.size())
rank, device = dist.get_rank(), mesh.device_type
if options.batch % layout.data_size:
    parser.error(f"--batch {options.batch} is not a multiple of {layout.data_size} ranks")

with torch.device("meta"):  # new
    model = Model(options.dim, options.layers, heads=4)
p3d.parallelize(model, mesh)  # new
p3d.materialize(model, seed=0)  # new
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

start = 0
if p3d.checkpoint.latest(options.out):
    start = p3d.checkpoint.load(options.out, model, optimizer).step
    if rank == 0:
        print(f"goes on after step {start}", flush=True)
# new: a rank that fails ends all; a signal is noted, and read after the step
with p3d.guards.watch(), p3d.checkpoint.StopSignal() as stop:
    for step in range(start + 1, options.steps + 1):
        tokens = batch(step, options.batch, 32)
        tokens = tokens.chunk(layout.data_size)[layout.data_rank(rank)].to(device)  # new
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        p3d.optim.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item() / mesh.size():.2f}", flush=True)
        stopped = stop.on_any_rank()
        if stopped or step % options.save_every == 0 or step == options.steps:
            p3d.checkpoint.save(options.out, model, optimizer, step=step)
        if stopped:
            if rank == 0:
                print(f"stopped after step {step}, which is saved", flush=True)
            break
    else:
        if rank == 0:
            Path(
                options.out, "finished"
            ).touch()  # pretrain.sbatch requeues the job until it is there
dist.destroy_process_group()
