"""The most memory that something needs, and a model of equal units to measure it by."""

import torch
from torch import nn

from _support.fsdp.lifetimes import NewStorages
from parallel3d.fsdp import fully_shard


class PeakBytes(NewStorages):
    """The most bytes that storages made in its body had at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            alive = (s for s in self._made.values() if not s.expired())
            self.peak = max(self.peak, sum(_nbytes(s) for s in alive))
        return result


def _nbytes(storage) -> int:
    found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return 0 if found.device.type == "meta" else found.nbytes()


def deep_model(mesh, layers: int = 8) -> nn.Module:
    """Equal layers, each a unit, under a root without parameters."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
