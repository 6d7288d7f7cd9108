"""What a GPU does in another way than a dry run's CPU: RMS norms as one kernel, and a memory of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from parallel3d._util.dry_run import HOST_DEVICE
from parallel3d._util.streams import FakeStream
from parallel3d.tools.dryrun.place import Place
from parallel3d.tools.dryrun.races import RaceDetector

# Kernels that a GPU runs as one where a CPU runs several operations, and keeps more: RMS norms.


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
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
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


# Moves between the GPU's memory and the CPU's, where a dry run's devices do not tell them apart.

_CPU = torch.device("cpu")
_TORCHS = "torch.distributed.fsdp"
_cpu, _to, _pin_memory, _is_pinned = Tensor.cpu, Tensor.to, Tensor.pin_memory, Tensor.is_pinned


@contextmanager
def moves_played(races: RaceDetector) -> Iterator[None]:
    """Plays copies to the CPU's memory, and ``record_stream``, for the race detector.

    In a dry run "cpu" is the GPU's memory, and ``HOST_DEVICE`` the CPU's. Where torch's ``fully_shard``
    offloads to "cpu" it means the CPU's. (Functions in backward are not seen by a TorchFunctionMode.)
    """

    def record_stream(tensor: Tensor, stream: FakeStream) -> None:
        races.record_stream(tensor, stream)

    with ExitStack() as stack:
        for function in (record_stream, cpu, to, pin_memory, is_pinned):
            stack.enter_context(patch.object(Tensor, function.__name__, function))
        yield


def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.cpu``."""
    return _to(tensor, HOST_DEVICE) if _in_torchs() else _cpu(tensor, *args, **kwargs)


def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.to``."""
    if args and args[0] == _CPU and tensor.device == _CPU and _in_torchs():
        return _to(tensor, HOST_DEVICE, *args[1:], **kwargs)
    return _to(tensor, *args, **kwargs)


def pin_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.pin_memory``."""
    return _to(tensor, HOST_DEVICE) if _in_torchs() else _pin_memory(tensor, *args, **kwargs)


def is_pinned(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """``Tensor.is_pinned``."""
    return tensor.device == HOST_DEVICE if _in_torchs() else _is_pinned(tensor, *args, **kwargs)


def _in_torchs() -> bool:
    """Whether torch's ``fully_shard`` makes the call."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(_TORCHS)
