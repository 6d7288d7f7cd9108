"""Values that say that nobody has set a tensor: NaN, the least integer, a byte that is no bool."""

import math

import torch

_NO_BOOL = 85  # a byte


def fill_unset(tensor: torch.Tensor) -> torch.Tensor:
    """Fills ``tensor`` with the value by which ``unset_in`` knows what was not written, and returns it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(math.nan)
    if tensor.dtype == torch.bool:
        tensor.view(torch.uint8).fill_(_NO_BOOL)
        return tensor
    return tensor.fill_(torch.iinfo(tensor.dtype).min)


def unset_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns which elements of ``tensor`` have a value that nobody has set."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.isnan(tensor)
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8) == _NO_BOOL
    return tensor == torch.iinfo(tensor.dtype).min
