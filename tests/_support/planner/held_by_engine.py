"""What the engine holds while it works: every storage that it makes or is handed, followed by identity."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.fsdp import reduction
from parallel3d.fsdp.collectives import ScatterWork
from parallel3d.fsdp.gradients import BucketGradients, ReduceInput
from parallel3d.fsdp.inspect import Bucket, units_of
from parallel3d.fsdp.options.merged import MergedBucket


def is_result(bucket: Bucket) -> bool:
    """Whether what the gradients of ``bucket`` are packed into becomes their ``.grad``."""
    return bucket.num_shards == 1 and bucket.precision.reduce_dtype is bucket.dtype


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Held(TorchDispatchMode):
    """Within its body, after each operation: bytes of

    - ``unsharded``: the buckets' unsharded parameters,
    - ``buffers``: their gather buffers; what the comms' methods and the gradients' arrival have made; and
      gradients from the moment at which autograd hands them to the engine, as long as anybody holds them,
    - ``reduced``: results of reductions and gradients at rest.

    Attributes:
        peak: the most of the first two together. most_reduced: of the third.
        gathered: bytes of the gather buffers alone, now.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.inside = 0
        self.active = False
        self.made: dict[int, StorageWeakRef] = {}
        self.results: dict[int, StorageWeakRef] = {}
        self.peak = self.most_reduced = self.unsharded = self.gathered = 0
        self.into = "made"
        # The planner counts gradients in the parameters' dtype. Since 2.15 torch hands over a norm's in fp32.
        patch.setattr(Bucket, "takes_wider_gradients", False)
        for name in ("issue_gather", "finish_gather", "reduce", "finish", "free_inputs", "drain"):
            self._wrap(patch, reduction.CpuComm, name)
        self._wrap(patch, BucketGradients, "accept", takes=lambda args: [args[2]])
        self._wrap(patch, ReduceInput, "pack")
        self._wrap(patch, BucketGradients, "put", into="results")
        self._wrap(patch, MergedBucket, "memory", into="results")
        self._wrap(
            patch, Bucket, "reduce_input", into=lambda b: "results" if is_result(b) else "made"
        )
        self._wrap(patch, reduction.Reducer, "reduce_scatter", into="results")
        self._wrap(patch, ScatterWork, "wait", into="results")

    def _wrap(self, patch, owner, name, takes=lambda args: [], into="made") -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def wrapper(*args, **kwargs):
            if not self.active:
                return inner(*args, **kwargs)
            for grad in takes(args):
                if grad is not None:
                    self._add(self.made, local_of(grad))
            self.sample()
            before, self.into = self.into, into(args[0]) if callable(into) else into
            self.inside += 1
            try:
                return inner(*args, **kwargs)
            finally:
                self.inside -= 1
                self.into = before
                del args, kwargs
                self.sample()

        patch.setattr(owner, name, wrapper)

    def begin_backward(self) -> int:
        """Forgets forward's peak; returns the bytes of unsharded parameters that are there."""
        self.peak = 0
        self.sample()
        return self.unsharded

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """The engine of ``model``, which has made a step."""
        self.units = list(units_of(model, recurse=True))
        self.buckets = [bucket for unit in self.units for bucket in unit.group.buckets]
        self.comm = self.units[0].ready_context().comm
        self.at_rest = [_storage(bucket.flat) for bucket in self.buckets]
        self.active = True
        with self:
            yield
        self.active = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        given = {_storage(t).cdata for t in _tensors((args, kwargs))} if self.inside else ()
        result = func(*args, **(kwargs or {}))
        if self.inside:
            for tensor in _tensors(result):
                if _storage(tensor).cdata not in given:
                    self._add(self.made if self.into == "made" else self.results, tensor)
            if self.active:
                self.sample()
        return result

    def _add(self, where: dict[int, StorageWeakRef], tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        where[storage.cdata] = storage

    def sample(self) -> None:
        """Takes note of what there is."""
        merged = {bucket.grads.merged for bucket in self.buckets} - {None}
        sums = [each.flat for each in merged]
        grads = [p.sharded.grad for bucket in self.buckets for p in bucket.params]
        results = [local_of(t) for t in (*sums, *grads) if t is not None]
        jobs = [running.job for running in (*self.comm.holding, *self.comm.reducing)]
        results += [job.tensor for job in jobs if not job.inputs and hasattr(job, "tensor")]
        for tensor in results:
            self._add(self.results, tensor)
        owned = [b for b in self.buckets if b.precision.has_own_unsharded]
        unsharded = {
            _storage(b.precision.unsharded).cdata: _storage(b.precision.unsharded) for b in owned
        }
        gathered = [
            b.precision.gathered for b in owned if b.precision.gathered is not b.precision.unsharded
        ]
        buffers = {_storage(t).cdata: _storage(t) for t in gathered}
        self.gathered = sum(map(_nbytes, buffers.values()))
        buffers.update(_alive(self.made))
        reduced = _alive(self.results)
        for each in (*self.at_rest, *reduced.values(), *unsharded.values()):
            buffers.pop(each.cdata, None)
        for each in self.at_rest:
            reduced.pop(each.cdata, None)
            unsharded.pop(each.cdata, None)
        u, b, r = (sum(map(_nbytes, s.values())) for s in (unsharded, buffers, reduced))
        self.unsharded, self.most_reduced = u, max(self.most_reduced, r)
        self.peak = max(self.peak, u + b)


def _alive(storages: dict[int, StorageWeakRef]) -> dict[int, StorageWeakRef]:
    for key in [key for key, storage in storages.items() if storage.expired()]:
        del storages[key]
    return dict(storages)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [
        t
        for t in tree_leaves(value)
        if isinstance(t, torch.Tensor) and not isinstance(t, DTensor) and t.device.type != "meta"
    ]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _nbytes(storage: StorageWeakRef) -> int:
    return torch.UntypedStorage._new_with_weak_ptr(storage.cdata).nbytes()
