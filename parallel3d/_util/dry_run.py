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
played: Any = None  # what ``accelerator`` returns


def active() -> bool:
    """Whether this process is in a dry run, where tensors have no values and there are no other ranks."""
    return _run is not None


def accelerator() -> Any:
    """Returns the stand-in for ``torch.cuda``'s streams in a dry run of GPUs, else None."""
    return played


def real() -> AbstractContextManager[None]:
    """Returns a context in which a dry run executes operations for real and doesn't record them."""
    return nullcontext() if _run is None else _run[1]()


@contextmanager
def running(accelerator: Any, unrecorded: Unrecorded) -> Iterator[None]:
    """Makes the body a dry run; the arguments are what ``accelerator()`` and ``real()`` return in it."""
    global _run, played
    _run, played = (accelerator, unrecorded), accelerator
    try:
        yield
    finally:
        _run = played = None
