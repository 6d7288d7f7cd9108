"""The private torch names that dry runs need (fake tensors, works of collectives), in one place.

Checked on torch 2.13.0 by the tests; on 2.11 by reading. ``_compat.py`` has all others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils.data import dataloader as _dataloader

__all__ = [
    "SCALED_STEP",
    "VALUE_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "as_fake",
    "boxed",
    "forget_conversions",
    "functions_unseen",
    "in_fake_mode",
    "loader_iterators",
    "make_fake_mode",
]

# What fake tensors raise where an operation needs values.
VALUE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


# Of torch.amp.GradScaler: steps the optimizer unless a gradient is infinite, which it reads.
SCALED_STEP = "_maybe_opt_step"


def make_fake_mode() -> FakeTensorMode:
    """A mode under which operations make tensors without memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """``meta``, a tensor on the meta device, as a fake one on ``device``."""
    return FakeTensor(mode, meta, device)


def forget_conversions(mode: FakeTensorMode) -> None:
    """``mode`` keeps weak references to the tensors it has made, and a module that has such parameters can't
    change their dtype (``swap_tensors`` refuses)."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def in_fake_mode() -> bool:
    """Whether operations run under a fake mode now, such as DTensor's when it propagates shapes."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# Within it neither modes nor subclasses see calls of torch's functions.
functions_unseen: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


def boxed(work: dist.Work) -> Any:
    """``work`` as the operations of c10d return it."""
    return work.boxed()


def loader_iterators() -> tuple[type, ...]:
    """The classes of a DataLoader's iterators, whose ``__init__`` and ``__next__`` read data."""
    return (
        _dataloader._SingleProcessDataLoaderIter,
        _dataloader._MultiProcessingDataLoaderIter,
    )
