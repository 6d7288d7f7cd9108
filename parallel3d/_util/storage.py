"""Memory of tensors: views with a storage of their own, and copies."""

from contextlib import suppress

import torch

from parallel3d._torch.simulated import LocalTensor


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage begins and ends with it.

    So saving or copying one parameter doesn't drag the bucket; and torch pickles and deep-copies a
    DTensor rightly only if its local tensor has no storage offset.
    """
    if type(view) is not torch.Tensor or view.is_meta:  # simulated ranks, fake tensors
        return view
    return torch.from_dlpack(view)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of ``tensor`` that is equal bit for bit.

    A subclass may define ``clone`` so that it computes: torchao's NF4 quantizes again. So for a subclass with
    ``__tensor_flatten__`` the inner tensors are copied.
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
