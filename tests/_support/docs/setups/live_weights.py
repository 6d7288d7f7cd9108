"""What docs/checkpoints.md needs to hand weights over: a model, and an engine that checks what it gets."""

import torch
from _support.models import Lm
from torch import Tensor
from torch import distributed as dist

import parallel3d as p3d

mesh = p3d.build_mesh(p3d.MeshLayout(shard=4), device_type="cpu")
torch.manual_seed(0)
plain = dict(Lm().named_parameters())
torch.manual_seed(0)
model = p3d.parallelize(Lm(), mesh)


def send(name: str, tensor: Tensor) -> None:
    assert dist.get_rank() == 0
    assert torch.equal(tensor, plain[name].bfloat16())


def publish(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], values: Tensor) -> None:
    index = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    assert torch.equal(values, plain[name][index])
