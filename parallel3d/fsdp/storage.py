"""Buffers whose tensors and views stay while their storage comes and goes."""

import torch

from parallel3d._compat import inner_tensors

__all__ = ["allocate", "release", "with_own_storage"]


def release(tensor: torch.Tensor) -> None:
    """Frees the storage of ``tensor``; every view of it is dead until ``allocate``."""
    if type(tensor) is torch.Tensor:
        tensor.untyped_storage().resize_(0)
        return
    for inner in inner_tensors(tensor):
        inner.untyped_storage().resize_(0)


def allocate(tensor: torch.Tensor) -> None:
    """Gives a released ``tensor`` storage again, with undefined content."""
    if type(tensor) is torch.Tensor:
        tensor.untyped_storage().resize_(tensor.nbytes)
        return
    for inner in inner_tensors(tensor):
        inner.untyped_storage().resize_(inner.numel() * inner.element_size())


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage begins and ends with it.

    So saving or copying one parameter doesn't drag the bucket; and torch pickles and deep-copies a
    DTensor rightly only if its local tensor has no storage offset.
    """
    if type(view) is not torch.Tensor or view.is_meta:  # simulated ranks, fake tensors
        return view
    return torch.from_dlpack(view)
