"""Whether this process is in a dry run: the one thing that the rest of the package must know of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

__all__ = ["active", "real", "set_active"]

_active = 0


def active() -> bool:
    """Whether this process is in a dry run now: tensors have no values, other ranks aren't there."""
    return _active > 0


def real() -> AbstractContextManager[None]:
    """In a dry run: what is done in the body is done for real, and is not recorded."""
    if not active():
        return nullcontext()
    from parallel3d.dryrun.record import real as unrecorded

    return unrecorded()


def set_active(more: int) -> None:
    """One dry run more (1) or less (-1)."""
    global _active
    _active += more
