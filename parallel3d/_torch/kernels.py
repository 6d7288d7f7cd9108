"""Private operations that work on many tensors in one call."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from parallel3d._torch.dtensor import DTensorSpec, local_tensor_of

foreach_copy_: Callable[[list[torch.Tensor], list[torch.Tensor]], Any] = torch._foreach_copy_
"""``foreach_copy_(targets, sources)`` copies each source into its target, casting, in few kernels."""

split_copy: Callable[..., Any] = torch.split_with_sizes_copy
"""``split_copy(rows, sizes, dim=1, out=views)`` copies columns of ``rows``, ``sizes`` wide, to the views."""

chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat
"""``chunk_cat(tensors, dim=0, num_chunks=n, out=out)`` cuts each tensor into n chunks along dim 0, the last
padded with zeros; row i of ``out``, (n, elements), gets the i-th chunk of each, one after another, cast."""

views_like: Callable[[torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]] = (
    torch._C._nn.unflatten_dense_tensors
)
"""``views_like(flat, templates)`` returns views of ``flat``, (S,), of the templates' shapes, in order."""


def local_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the local tensors of DTensors, without a Python call for each."""
    return list(map(local_tensor_of, tensors))


def specs_of(tensors: Iterable[torch.Tensor | None]) -> list[DTensorSpec | None]:
    """Returns the DTensorSpecs of ``tensors``, None for None; AttributeError if one is no DTensor."""
    return [None if tensor is None else tensor._spec for tensor in tensors]  # type: ignore[attr-defined]


foreach_lerp_: Callable[[list[torch.Tensor], list[torch.Tensor], float], Any] = torch._foreach_lerp_
"""``foreach_lerp_(targets, sources, weight)`` moves each target towards its source, of the same dtype."""

foreach_mul_: Callable[[list[torch.Tensor], torch.Tensor], Any] = torch._foreach_mul_
"""``foreach_mul_(tensors, factor)`` multiplies tensors of one dtype by a single number of that dtype."""

foreach_norm: Callable[[list[torch.Tensor], float, torch.dtype], Sequence[torch.Tensor]]
"""``foreach_norm(tensors, p, dtype)`` returns the p-norm of each tensor, computed in ``dtype``."""
foreach_norm = torch._foreach_norm

foreach_zero_: Callable[[list[torch.Tensor]], Any] = torch._foreach_zero_

unscale_: Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], Any]
"""``unscale_(grads, found_inf, inv_scale)`` multiplies gradients of one dtype; ``found_inf`` becomes 1 if one
is not finite."""
unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
