"""What docs/checkpoints.md needs: a run of which the last steps are left."""

import torch
from _support.models import Lm, lm_loss, tokens

import parallel3d as p3d

seed, step, steps, seen, run = 0, 98, 101, 0, "run"
mesh = p3d.build_mesh(p3d.MeshLayout(replicate=2, shard=2), device_type="cpu")
model = p3d.parallelize(Lm(), mesh)
optimizer = torch.optim.AdamW(model.parameters())


def train_one_step() -> None:
    lm_loss(model, tokens(step)).backward()
    optimizer.step()
    optimizer.zero_grad()
