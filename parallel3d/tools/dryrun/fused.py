"""Kernels that a GPU runs as one where a CPU runs several operations, and keeps more: RMS norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d.tools.dryrun.place import Place

__all__ = ["as_on_gpu", "rms_norm"]


@contextmanager
def as_on_gpu(place: Place) -> Iterator[None]:
    """RMS norms of plain tensors are the kernels that they are on a GPU, in the body and its backward."""
    plain = torch.rms_norm

    def norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run = plain if place.paused or isinstance(input, DTensor) else rms_norm
        return run(input, *args, **kwargs)

    with patch.object(torch, "rms_norm", norm), patch.object(F, "rms_norm", norm):
        yield


def rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """What ``F.rms_norm`` moves and keeps on a GPU, without its values: one kernel forward, one backward."""
    rows = input.shape[: input.ndim - len(normalized_shape)]
    return _RmsNorm.apply(input, weight, rows)


class _RmsNorm(torch.autograd.Function):
    """Keeps the input and, in fp32, a number a row. Forward reads and writes the input once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: torch.Size) -> Tensor:
        scale = torch.empty(*rows, 1, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, scale)
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        grad = None if weight is None else torch.zeros_like(weight)
        return grads[0] + x, grad, None  # reads two, writes one
