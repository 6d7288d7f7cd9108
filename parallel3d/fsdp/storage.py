"""Buffers whose tensors and views stay while their storage comes and goes."""

import torch

from parallel3d._compat import inner_tensors

__all__ = ["allocate", "release"]


def release(tensor: torch.Tensor) -> None:
    """Frees the storage of ``tensor``; every view of it is dead until ``allocate``."""
    for inner in inner_tensors(tensor):
        inner.untyped_storage().resize_(0)


def allocate(tensor: torch.Tensor) -> None:
    """Gives a released ``tensor`` storage again, with undefined content."""
    for inner in inner_tensors(tensor):
        inner.untyped_storage().resize_(inner.numel() * inner.element_size())
