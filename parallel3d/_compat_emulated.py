"""The private torch names of the emulated network, in a file of their own; checked on torch 2.13.0."""

import importlib

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["add_fake_backend", "cuda_sleep", "plain_group"]


def add_fake_backend(group: ProcessGroup) -> None:
    """Lets torch's fake backend carry what is called on ``group``."""
    fake = importlib.import_module("torch._C._distributed_c10d").FakeProcessGroup
    backend = fake._create_internal(group.rank(), group.size())
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)


def plain_group(store: dist.Store, rank: int, size: int) -> ProcessGroup:
    """A group on torch's fake backend that ``torch.distributed`` doesn't know of."""
    group = ProcessGroup(store, rank, size)
    add_fake_backend(group)
    return group


def cuda_sleep(cycles: int) -> None:
    """Keeps the current CUDA stream busy for ``cycles`` of the GPU's clock, and nothing else of the GPU."""
    torch.cuda._sleep(cycles)
