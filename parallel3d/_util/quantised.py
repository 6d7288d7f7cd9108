"""Weights of other libraries that hold their values packed: torchao's NF4, bitsandbytes's 4-bit."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import get_local_tensor


def packed_kind(tensor: Tensor) -> str:
    """Returns the class name of a tensor whose values are packed in blocks (``"NF4Tensor"``), else ``""``.

    Such a tensor has no elements to cut or to store as a dense tensor. bitsandbytes keeps scales beside its
    packed bytes, in an attribute that a sharded Parameter has too; torchao has tensors inside a tensor.
    """
    if getattr(tensor, "quant_state", None) is not None:
        return "Params4bit"
    if isinstance(tensor, DTensor):
        return packed_kind(get_local_tensor(tensor))
    if not hasattr(tensor, "__tensor_flatten__"):
        return ""
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    whole = any((t.shape, t.dtype) == (tensor.shape, tensor.dtype) for t in inner)
    return "" if whole else type(tensor).__name__


def wrapper_kind(tensor: Tensor) -> str:
    """Returns the class name of a tensor without memory of its own, such as ``"OptimState8bit"`` of torchao's
    optimizers, else ``""``."""
    if isinstance(tensor, DTensor):
        return wrapper_kind(get_local_tensor(tensor))
    return type(tensor).__name__ if hasattr(tensor, "__tensor_flatten__") else ""
