"""Private operations that work on many tensors in one call."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from parallel3d._torch.dtensor import DTensorSpec

foreach_copy_: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
"""``foreach_copy_(targets, sources)`` copies each source into its target, casting, in few kernels."""

chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat
"""``chunk_cat(tensors, dim=0, num_chunks=n, out=out)`` cuts each tensor into n chunks along dim 0, the last
padded with zeros; row i of ``out``, (n, elements), gets the i-th chunk of each, one after another, cast."""

views_like: Callable[[torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]] = (
    torch._C._nn.unflatten_dense_tensors
)
"""``views_like(flat, templates)`` returns views of ``flat``, (S,), of the templates' shapes, in order."""

_read_local = attrgetter("_local_tensor")


def local_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``get_local_tensor`` of each of ``tensors``, all DTensors, without a Python call for each."""
    return list(map(_read_local, tensors))


def specs_of(tensors: Iterable[torch.Tensor | None]) -> list[DTensorSpec | None]:
    """``spec_of`` of each of ``tensors``, None of None. AttributeError if one is no DTensor."""
    return [None if tensor is None else tensor._spec for tensor in tensors]  # type: ignore[attr-defined]


def foreach_lerp_(targets: list[torch.Tensor], sources: list[torch.Tensor], weight: float) -> None:
    """Moves each target towards its source, of the same dtype, by ``weight``, in few kernels."""
    torch._foreach_lerp_(targets, sources, weight)


def foreach_mul_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors of one dtype by a single number of that dtype, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def foreach_norm(
    tensors: list[torch.Tensor], p: float, dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """The ``p``-norm of each tensor, computed in ``dtype``, in few kernels."""
    return torch._foreach_norm(tensors, p, dtype)


def foreach_zero_(tensors: list[torch.Tensor]) -> None:
    """Zeroes the tensors, in few kernels."""
    torch._foreach_zero_(tensors)


def unscale_(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiplies ``grads`` of one dtype by ``inv_scale``; ``found_inf`` becomes 1 if one is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
