"""What the examples of docs/from_fsdp1.md take as given: a model with blocks, and ranks."""

import os

from models import Lm as Model

import parallel3d as p3d

os.environ["LOCAL_WORLD_SIZE"] = "2"  # on nodes of two ranks
model = Model()
mesh = p3d.build_mesh(p3d.MeshLayout(shard=-1))
