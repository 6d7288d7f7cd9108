"""Autocast around attention: its inputs are cast, what it computes is not."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def cast_by_autocast(x: Tensor) -> Tensor:
    """Returns ``x`` in autocast's dtype, as ``F.scaled_dot_product_attention`` takes it."""
    if not _is_on(x) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Returns a context without autocast on the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if _is_on(x) else nullcontext()


def _is_on(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
