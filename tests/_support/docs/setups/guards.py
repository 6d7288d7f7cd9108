"""What docs/guards.md needs: something to train."""

import torch
from _support.models import Lm, lm_loss, tokens

import parallel3d as p3d

model = p3d.parallelize(Lm(), p3d.build_mesh(p3d.MeshLayout(shard=2), device_type="cpu"))
optimizer = torch.optim.AdamW(model.parameters())
batches = [tokens(0), tokens(1)]


def train_step(batch: torch.Tensor) -> None:
    lm_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def time_to_save() -> bool:
    return True
