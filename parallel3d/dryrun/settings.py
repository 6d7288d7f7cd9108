"""What a program sets for its whole process: a dry run puts it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

__all__ = ["settings_kept"]


@contextmanager
def settings_kept(check_device: Callable[[Any], None]) -> Iterator[None]:
    """The defaults of dtype and device, the number of threads and the random numbers are afterwards as they
    were; ``check_device`` is called with each device that is made the default."""
    dtype, threads, device = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_default_device(),
    )
    set_device, changed = torch.set_default_device, False

    def set_default_device(device: Any) -> None:
        nonlocal changed
        check_device(device)
        set_device(device)
        changed = True

    try:
        with (
            patch.object(torch, "set_default_device", set_default_device),
            torch.random.fork_rng(devices=()),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        if changed:
            set_device(None if device == torch.device("cpu") else device)
