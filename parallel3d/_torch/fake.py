"""Private torch names for dry runs: fake tensors and works of collectives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.distributed import ProcessGroup
from torch.utils.data import dataloader as _dataloader

# Raised by fake tensors where an operation needs values.
VALUE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

# Method of torch.amp.GradScaler that steps the optimizer unless a gradient is infinite, which it reads.
SCALED_STEP = "_maybe_opt_step"


class _FakeMode(FakeTensorMode):
    """Allows grouped matmuls in all dtypes; FakeTensorMode knows their shapes in bfloat16 only."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})
    ) -> Any:
        if func is _GROUPED_MM and args[0].dtype != torch.bfloat16:
            matrices = [each.to(torch.bfloat16) for each in args[:2]]
            kwargs = {**kwargs, "out_dtype": None}
            product: Any = super().__torch_dispatch__(func, types, (*matrices, *args[2:]), kwargs)
            return product.to(args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


_GROUPED_MM = torch.ops.aten._grouped_mm.default


def make_fake_mode() -> FakeTensorMode:
    """Returns a FakeTensorMode: operations in it make tensors without memory."""
    return _FakeMode(allow_non_fake_inputs=True)


def forget_conversions(mode: FakeTensorMode) -> None:
    """Drops weak references that ``mode`` keeps to tensors: ``swap_tensors``, by which modules change their
    parameters' dtype, raises for tensors with weak references."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def in_fake_mode() -> bool:
    """Whether a FakeTensorMode is active, such as DTensor's own when it propagates shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# A context in which neither modes nor subclasses see calls of torch's functions.
functions_unseen: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


def boxed(work: dist.Work) -> Any:
    """Returns ``work`` in the form in which c10d's operations return it."""
    return work.boxed()


def loader_iterators() -> tuple[type, ...]:
    return _dataloader._SingleProcessDataLoaderIter, _dataloader._MultiProcessingDataLoaderIter


def init_fake_group(rank: int, world_size: int) -> None:
    """Makes this process rank ``rank`` of a default process group that does not communicate."""
    # Importing the module registers the backend; init_process_group does so itself on 2.13 only.
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())


def add_fake_backend(group: ProcessGroup) -> None:
    fake = importlib.import_module("torch._C._distributed_c10d").FakeProcessGroup
    backend = fake._create_internal(group.rank(), group.size())
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)


def plain_group(store: dist.Store, rank: int, size: int) -> ProcessGroup:
    """Returns a process group with torch's fake backend, not registered in ``torch.distributed``."""
    group = ProcessGroup(store, rank, size)
    add_fake_backend(group)
    return group


cuda_sleep: Callable[[int], None] = torch.cuda._sleep
"""Keeps the current CUDA stream busy for a number of cycles of the GPU's clock."""
