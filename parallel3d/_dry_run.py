"""Whether this process is in a dry run: the one thing that the rest of the package must know of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

__all__ = ["active", "begin", "end", "real"]

_pauses: list[Callable[[], AbstractContextManager[None]]] = []


def active() -> bool:
    """Whether this process is in a dry run now: tensors have no values, other ranks aren't there."""
    return bool(_pauses)


def begin(pause: Callable[[], AbstractContextManager[None]]) -> None:
    """A dry run begins, which ``with pause():`` interrupts."""
    _pauses.append(pause)


def end() -> None:
    """It is over."""
    _pauses.pop()


@contextmanager
def real() -> Iterator[None]:
    """In a dry run: what is done in the body is done for real, and not recorded. Elsewhere it does nothing.

    For reading data, whose values decide how the program goes on.
    """
    if not _pauses:
        yield
        return
    with _pauses[-1]():
        yield
