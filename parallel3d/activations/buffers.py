"""Buffers that a block's forward changes, such as BatchNorm's statistics, where the block is recomputed.

A recomputation starts with the values that the buffers had when the block's forward began, and afterwards the
buffers are as before it. So outputs, gradients and buffers are those of a block without recomputation. A
change is detected by a buffer's version counter, or if another tensor has replaced it. Small buffers are
copied before each forward; larger ones before the first, and later only if a forward has changed them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._torch.autograd import WRITTEN_WITHOUT_VERSION, preserved_versions
from parallel3d._util.recompute import paused
from parallel3d.errors import StateError

SMALL = 1 << 16
"""Bytes; a mask or a table of a block's own may have many, and nobody changes it."""

# Module -> name of a large buffer -> whether a forward has changed it.
_changes: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Before:
    """A buffer before a forward; ``value``: a copy of it, or None."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor | None

    def has_changed(self) -> bool:
        """Whether it may have changed since."""
        return (
            self.name in WRITTEN_WITHOUT_VERSION
            or self.module._buffers.get(self.name) is not self.buffer
            or self.buffer._version != self.version
        )

    def is_large(self) -> bool:
        """Whether it is copied only if forwards are known to change it."""
        return self.buffer.nbytes > SMALL and self.name not in WRITTEN_WITHOUT_VERSION


class Buffers:
    """The buffers of a block as they were before a forward."""

    def __init__(self, before: list[_Before]) -> None:
        self._before = before
        for each in before:
            if not each.is_large() or _changes.get(each.module, {}).get(each.name, True):
                each.value = each.buffer.detach().clone()

    def forward(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``block``, and notes which large buffers that changes."""
        output = block(*args, **kwargs)
        for each in self._before:
            if each.is_large():
                known = _changes.setdefault(each.module, {})
                known[each.name] = each.has_changed() or known.get(each.name, False)
                if not known[each.name]:
                    each.value = None
        return output

    def recompute(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``block`` with the buffers as they were before ``forward``; restores what they are now."""
        with self._restored():
            return block(*args, **kwargs)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        changed = [each for each in self._before if each.has_changed()]
        for each in changed:
            if each.value is None and each.buffer._version != each.version:
                raise StateError(
                    f"buffer {each.name} of a {type(each.module).__name__}, {tuple(each.buffer.shape)}, was "
                    "changed in place since its block's forward began, which earlier forwards had not done: "
                    "there is no copy of it from which backward could recompute the block. Change it "
                    "outside of the block, between steps, or use activation_checkpointing=False"
                )
        now: list[tuple[_Before, Tensor | None, Tensor | None]] = []
        with preserved_versions([each.buffer for each in changed]):
            try:
                with paused(), torch.no_grad():
                    for each in changed:
                        value = None if each.value is None else each.buffer.detach().clone()
                        now.append((each, each.module._buffers.get(each.name), value))
                        each.module._buffers[each.name] = each.buffer
                        if each.value is not None:
                            each.buffer.copy_(each.value)
                yield
            finally:
                with paused(), torch.no_grad():
                    for each, buffer, value in reversed(now):
                        if value is not None:
                            each.buffer.copy_(value)
                        each.module._buffers[each.name] = buffer


def buffers_of(block: nn.Module) -> Buffers | None:
    """Returns the buffers of ``block`` and the modules inside, before a forward; None if there are none."""
    found: list[_Before] = []
    waiting: list[nn.Module | None] = [block]
    while waiting:
        module = waiting.pop()
        if module is not None:
            waiting += module._modules.values()
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    found.append(_Before(module, name, buffer, buffer._version, None))
    if not found:
        return None
    with paused():
        return Buffers(found)
