"""Pre-trains a small transformer on three axes, as README shows; "new" marks what a plain program lacks.

    torchrun --nproc-per-node 8 examples/minimal.py

prints:

    step 10: loss 2.99
    step 20: loss 0.38
    step 30: loss 0.01
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parallel3d as p3d


class Block(nn.Module):
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


layout = p3d.MeshLayout(replicate=2, shard=2, tp=2)  # new
mesh = p3d.build_mesh(layout)  # new
with torch.device("meta"):  # new: without values yet
    model = nn.Sequential(nn.Embedding(256, 128), Block(128, 4), Block(128, 4), nn.Linear(128, 256))
p3d.parallelize(model, mesh, tp_plan="auto")  # new
p3d.materialize(model, seed=0)  # new: the same values on every mesh
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.arange(16 * 65).view(16, 65) % 251  # 16 sequences
rank = torch.distributed.get_rank()  # new
data = data.chunk(layout.data_size)[layout.data_rank(rank)].to(mesh.device_type)  # new: its rows
for step in range(30):
    loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
    loss.backward()
    p3d.optim.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.2f}")
