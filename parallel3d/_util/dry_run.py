"""Whether this process is in a dry run, for the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_active = False
_accelerator: Any = None
_unrecorded: Callable[[], AbstractContextManager[None]] = nullcontext


def active() -> bool:
    """Whether this process is in a dry run, where tensors have no values and there are no other ranks."""
    return _active


def accelerator() -> Any:
    """Returns the stand-in for ``torch.cuda``'s streams in a dry run of GPUs, else None."""
    return _accelerator


def real() -> AbstractContextManager[None]:
    """Returns a context in which a dry run executes operations for real and doesn't record them."""
    return _unrecorded()


@contextmanager
def running(
    accelerator: Any, unrecorded: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Makes the body a dry run; the arguments are what ``accelerator()`` and ``real()`` return in it."""
    global _active, _accelerator, _unrecorded
    _active, _accelerator, _unrecorded = True, accelerator, unrecorded
    try:
        yield
    finally:
        _active, _accelerator, _unrecorded = False, None, nullcontext
