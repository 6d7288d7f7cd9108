"""What the examples of docs/from_fsdp1.md take as given: a model with blocks, and ranks."""

import torch
from models import Lm as Model
from models import tokens

import parallel3d as p3d

model = Model()
mesh = p3d.build_mesh(p3d.MeshLayout(shard=-1))
p3d.parallelize(model, mesh)
optimizer = torch.optim.AdamW(model.parameters())
first, second = tokens(0), tokens(1)
