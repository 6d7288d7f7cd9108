"""Tensors: views with a storage of their own, copies, and values that say that nobody has set a tensor."""

import math
from contextlib import suppress

import torch

from parallel3d._torch.simulated import LocalTensor


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the memory of ``view`` whose storage begins and ends with it.

    So saving or copying one parameter doesn't drag the bucket; and torch pickles and deep-copies a DTensor
    rightly only if its local tensor has no storage offset.
    """
    if type(view) is not torch.Tensor or view.is_meta:  # simulated ranks, fake tensors
        return view
    return torch.from_dlpack(view)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of ``tensor`` that is equal bit for bit.

    A subclass may define ``clone`` so that it computes: torchao's NF4 quantizes again. So the inner tensors
    of a subclass with ``__tensor_flatten__`` are copied.
    """
    if isinstance(tensor, LocalTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return tensor.clone(memory_format=torch.contiguous_format)
    new = None
    with suppress(
        Exception
    ):  # a method that is only written for torch.compile may take other arguments
        names, context = tensor.__tensor_flatten__()
        inner = {name: own_copy(getattr(tensor, name)) for name in names}
        stride = torch.empty(tensor.shape, device="meta").stride()
        new = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, stride)  # type: ignore[attr-defined]
    if type(new) is type(tensor):
        return new
    return tensor.clone(memory_format=torch.contiguous_format)  # or it inherits how to make another


_NO_BOOL = 85  # a byte that is no bool


def fill_unset(tensor: torch.Tensor) -> torch.Tensor:
    """Fills ``tensor`` with a value that ``unset_in`` recognises as not set, and returns it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(math.nan)
    if tensor.dtype == torch.bool:
        tensor.view(torch.uint8).fill_(_NO_BOOL)
        return tensor
    return tensor.fill_(torch.iinfo(tensor.dtype).min)


def unset_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the elements of ``tensor`` that were not set since ``fill_unset``."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.isnan(tensor)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8) == _NO_BOOL
    return tensor == torch.iinfo(tensor.dtype).min
