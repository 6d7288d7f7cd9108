"""What the examples of docs/from_fsdp1.md take as given: a model with blocks, and ranks; sharded."""

import os

import torch
from _support.models import Lm as Model
from _support.models import lm_loss as loss_of
from _support.models import tokens
from torch import distributed as dist
from torch.distributed.fsdp import ShardingStrategy, StateDictType

import parallel3d as p3d

os.environ["LOCAL_WORLD_SIZE"] = "2"  # on nodes of two ranks
model = Model()
mesh = p3d.build_mesh(p3d.MeshLayout(shard=-1))
p3d.parallelize(model, mesh)
optimizer = torch.optim.AdamW(model.parameters())
first, second = tokens(0), tokens(1)
