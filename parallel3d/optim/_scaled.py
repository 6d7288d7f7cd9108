"""Which backwards are of a loss that our GradScaler has scaled."""

from __future__ import annotations

import torch

from parallel3d._compat import backward_id

__all__ = ["is_scaled", "mark_scaled"]

_last = -1


def _note(_: torch.Tensor) -> None:
    global _last
    _last = backward_id()


def mark_scaled(loss: torch.Tensor) -> None:
    """Lets a backward from ``loss`` be known by its ``backward_id`` from the beginning."""
    if loss.requires_grad:
        loss.register_hook(_note)


def is_scaled(backward: int) -> bool:
    """Whether ``backward`` is one."""
    return backward != -1 and backward == _last
