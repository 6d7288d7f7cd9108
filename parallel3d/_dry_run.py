"""Whether this process is in a dry run: the one thing that the rest of the package must know of it."""

__all__ = ["active", "set_active"]

_active = 0


def active() -> bool:
    """Whether this process is in a dry run now: tensors have no values, other ranks aren't there."""
    return _active > 0


def set_active(more: int) -> None:
    """One dry run more (1) or less (-1)."""
    global _active
    _active += more
