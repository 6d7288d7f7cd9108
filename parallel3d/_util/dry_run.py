"""Whether this process is in a dry run, for the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

HOST_DEVICE = torch.device("cpu", 0)
"""The CPU's memory in a dry run of GPUs, whose own memory is that of the device "cpu"."""

Unrecorded = Callable[[], AbstractContextManager[None]]
_run: tuple[Any, Unrecorded] | None = None  # what ``running`` was given


def active() -> bool:
    """Whether this process is in a dry run, where tensors have no values and there are no other ranks."""
    return _run is not None


def accelerator() -> Any:
    """Returns the stand-in for ``torch.cuda``'s streams in a dry run of GPUs, else None."""
    return None if _run is None else _run[0]


def has_streams(device_type: str) -> bool:
    """Returns whether work on the device type is put on streams: an accelerator's, or a dry run's of one."""
    return device_type not in ("cpu", "meta") or accelerator() is not None


def real() -> AbstractContextManager[None]:
    """Returns a context in which a dry run executes operations for real and doesn't record them."""
    return nullcontext() if _run is None else _run[1]()


@contextmanager
def running(accelerator: Any, unrecorded: Unrecorded) -> Iterator[None]:
    """Makes the body a dry run; the arguments are what ``accelerator()`` and ``real()`` return in it."""
    global _run
    _run = accelerator, unrecorded
    try:
        yield
    finally:
        _run = None
