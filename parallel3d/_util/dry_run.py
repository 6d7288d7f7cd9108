"""Whether this process is in a dry run, for the rest of the package; and what no CUDA graph can capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

HOST_DEVICE = torch.device("cpu", 0)
"""The CPU's memory in a dry run of GPUs, whose own memory is that of the device "cpu"."""

Unrecorded = Callable[[], AbstractContextManager[None]]


class Watcher(Protocol):
    """Receives events of a dry run: what the program does that would matter on a real GPU."""

    is_open: bool  # whether the program is in a step that is to be captured in a CUDA graph

    def reads(self, what: str) -> None:
        """The program reads a tensor's value, which a dry run does not have, on the host; ``what``: why."""

    def seeds(self, what: str) -> None:
        """The program seeds a random generator; ``what``: for what."""

    def captured(self, batch: Any) -> AbstractContextManager[None]:
        """Returns a context manager for a step on ``batch`` that is to be captured in a CUDA graph."""


_run: tuple[Any, Unrecorded, Watcher | None] | None = None  # what ``running`` was given
played: Any = None
"""The stand-in for ``torch.cuda``'s streams in a dry run of GPUs, else None."""


def active() -> bool:
    """Whether this process is in a dry run, where tensors have no values and there are no other ranks."""
    return _run is not None


def real() -> AbstractContextManager[None]:
    """Returns a context manager in which a dry run executes operations for real, without recording them."""
    return nullcontext() if _run is None else _run[1]()


def reads(what: str) -> None:
    """Tells the dry run's watcher, if there is one, that the host reads a value here; ``what``: for what."""
    if _run is not None and _run[2] is not None:
        _run[2].reads(what)


def seeds(what: str) -> None:
    """Tells the dry run's watcher, if there is one, that a generator is seeded here; ``what``: for what."""
    if _run is not None and _run[2] is not None:
        _run[2].seeds(what)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream, or a dry run plays such a capture."""
    if _run is not None:
        return _run[2] is not None and _run[2].is_open
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def captured(batch: Any) -> AbstractContextManager[None]:
    """Returns the watcher's context manager for a step on ``batch`` that is captured in a CUDA graph."""
    return nullcontext() if _run is None or _run[2] is None else _run[2].captured(batch)


@contextmanager
def running(
    accelerator: Any, unrecorded: Unrecorded, watcher: Watcher | None = None
) -> Iterator[None]:
    """Context manager that makes the body a dry run. ``accelerator``: value of ``played``; ``unrecorded``:
    makes the context manager that ``real()`` returns; ``watcher``: receives events."""
    global _run, played
    _run, played = (accelerator, unrecorded, watcher), accelerator
    try:
        yield
    finally:
        _run = played = None


Obstacle = Callable[[nn.Module, Any], str | None]
"""(model, a batch of it) -> why a step can't be captured; None if nothing is against it."""

_T = TypeVar("_T", bound=Obstacle)
_obstacles: list[Obstacle] = []


def note_obstacle(found: _T) -> _T:
    """Decorator: registers ``found``, which says why a step can't be captured in a CUDA graph."""
    _obstacles.append(found)
    return found


def first_obstacle(model: nn.Module, batch: Any) -> str | None:
    """Returns the first reason of ``note_obstacle``'s functions against capturing a step; or None."""
    reasons = (found(model, batch) for found in _obstacles)
    return next((reason for reason in reasons if reason is not None), None)
