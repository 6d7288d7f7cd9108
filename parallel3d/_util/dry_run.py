"""Whether this process is in a dry run: the one thing that the rest of the package must know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_active = False
_accelerator: Any = None
_unrecorded: Callable[[], AbstractContextManager[None]] = nullcontext


def active() -> bool:
    """Whether this process is in a dry run now: tensors have no values, other ranks aren't there."""
    return _active


def accelerator() -> Any:
    """In a dry run of GPUs what ``torch.cuda`` is on them, as far as streams go; elsewhere None."""
    return _accelerator


def real() -> AbstractContextManager[None]:
    """In a dry run: what is done in the body is done for real, and is not recorded."""
    return _unrecorded()


@contextmanager
def running(
    accelerator: Any, unrecorded: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """The body is a dry run; ``accelerator`` and ``unrecorded`` are what the functions of this file give."""
    global _active, _accelerator, _unrecorded
    _active, _accelerator, _unrecorded = True, accelerator, unrecorded
    try:
        yield
    finally:
        _active, _accelerator, _unrecorded = False, None, nullcontext
