"""What is alive: weak references to all that a parallel model consists of, and storages by step."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Imported with the first DTensor, it keeps the frames that led there, and so the first model, until a
# collection (torch/fx/_symbolic_trace.py, wrap: a frame that refers to itself).
import torch._dynamo
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._torch.simulated import inner_tensors
from parallel3d.fsdp import fully_shard
from parallel3d.fsdp.inspect import unit_of

References = dict[str, weakref.ref]
"""By name."""


@contextmanager
def collector_off() -> Iterator[None]:
    """What is freed in the body is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def references(model: nn.Module, **others: Any) -> References:
    """Weak references to modules, Parameters, buffers, units and the engine's tensors."""
    found: dict[str, Any] = dict(others)
    for name, module in model.named_modules():
        name = name or "root"
        found[f"module {name}"] = module
        unit = unit_of(module)
        if unit is None:
            continue
        found[f"unit {name}"] = unit
        found[f"group {name}"] = unit.group
        if unit.context is not None:
            found[f"context {name}"] = unit.context
        for index, bucket in enumerate(unit.group.buckets):
            where = f"{name}, bucket {index}"
            found[where] = bucket
            found[f"flat of {where}"] = bucket.flat
            for tensor in ("unsharded", "gathered"):
                found[f"{tensor} of {where}"] = getattr(bucket.precision, tensor)
            for param, compute in zip(bucket.params, bucket.precision.compute_params, strict=True):
                found[f"unsharded {param.name} of {where}"] = compute
    for name, param in model.named_parameters():
        found[f"parameter {name}"] = param
        if param.grad is not None:
            found[f"gradient {name}"] = param.grad
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer
    return {name: weakref.ref(value) for name, value in found.items()}


class NewStorages(TorchDispatchMode):
    """Counts storages that ops in its body made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        for kind in types:  # a DTensor: its own dispatch runs ops on its local tensor, seen here
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        inputs = {_storage(t).cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = _storage(tensor)
            if storage.cdata not in inputs and self.counts(tensor):
                self._made[storage.cdata] = storage
        return result

    def counts(self, tensor: torch.Tensor) -> bool:
        return True

    def alive(self) -> int:
        """How many."""
        return sum(not storage.expired() for storage in self._made.values())


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from inner_tensors(value)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class PeakBytes(NewStorages):
    """The most bytes that storages made in its body had at one time, but for single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def counts(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0

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
