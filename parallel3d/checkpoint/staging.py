"""copy_to_host: a copy of the state to write from, while training changes the state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel3d._compat import foreach_copy_, get_local_tensor, make_dtensor, spec_of

__all__ = ["copy_to_host"]

_buffers: dict[str, Tensor] = {}
"""Of the last copy: memory that is there need not be asked for, and its pages are."""


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with the same layouts on the CPU, in memory of their own.

    The memory is used again by the next call: what was written from it must be done by then.
    """
    locals_ = {
        name: get_local_tensor(t) if isinstance(t, DTensor) else t for name, t in tensors.items()
    }
    for name in [name for name in _buffers if name not in locals_]:
        del _buffers[name]
    for name, local in locals_.items():
        known = _buffers.get(name)
        if known is None or known.shape != local.shape or known.dtype != local.dtype:
            pinned = local.device.type == "cuda"
            _buffers[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
    _copy([_buffers[name] for name in locals_], list(locals_.values()))
    return {
        name: make_dtensor(_buffers[name], spec_of(t)) if isinstance(t, DTensor) else _buffers[name]
        for name, t in tensors.items()
    }


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            pair = groups.setdefault((source.device, source.dtype), ([], []))
            pair[0].append(target)
            pair[1].append(source.detach())
        for (device, _), (to, of) in groups.items():
            if device.type == "cpu":
                foreach_copy_(to, of)
                continue
            for target, source in zip(to, of, strict=True):
                target.copy_(source, non_blocking=True)
        for kind in {device.type for device, _ in groups} - {"cpu"}:
            torch.get_device_module(kind).current_stream().synchronize()
