"""Moves between the GPU's memory and the CPU's, where a dry run's devices do not tell them apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parallel3d._util.dry_run import HOST_DEVICE
from parallel3d._util.streams import FakeStream
from parallel3d.tools.dryrun.races import RaceDetector

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
