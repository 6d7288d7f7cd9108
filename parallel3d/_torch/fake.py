"""Private torch names for dry runs: fake tensors and works of collectives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
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


def make_fake_mode() -> FakeTensorMode:
    """Returns a mode in which operations make tensors without memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def forget_conversions(mode: FakeTensorMode) -> None:
    """Drops the weak references that ``mode`` keeps to its tensors. ``swap_tensors``, by which a module
    changes the dtype of its parameters, raises for tensors with weak references."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def in_fake_mode() -> bool:
    """Whether a fake mode is active, such as DTensor's when it propagates shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# A context in which neither modes nor subclasses see calls of torch's functions.
functions_unseen: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


def boxed(work: dist.Work) -> Any:
    """Returns ``work`` as c10d's operations return it."""
    return work.boxed()


def loader_iterators() -> tuple[type, ...]:
    """Returns the classes of a DataLoader's iterators."""
    return _dataloader._SingleProcessDataLoaderIter, _dataloader._MultiProcessingDataLoaderIter


def init_fake_group(rank: int, world_size: int) -> None:
    """Makes this process rank ``rank`` of a default group that communicates nothing."""
    # Importing the module registers the backend; init_process_group does so itself on 2.13 only.
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())


def add_fake_backend(group: ProcessGroup) -> None:
    """Registers torch's fake backend for ``group``."""
    fake = importlib.import_module("torch._C._distributed_c10d").FakeProcessGroup
    backend = fake._create_internal(group.rank(), group.size())
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)


def plain_group(store: dist.Store, rank: int, size: int) -> ProcessGroup:
    """Returns a group on torch's fake backend that is not registered in ``torch.distributed``."""
    group = ProcessGroup(store, rank, size)
    add_fake_backend(group)
    return group


cuda_sleep: Callable[[int], None] = torch.cuda._sleep
"""Keeps the current CUDA stream busy for a number of cycles of the GPU's clock."""
