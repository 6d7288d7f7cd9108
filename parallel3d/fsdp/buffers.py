"""BufferCasts: a unit's floating-point buffers in another dtype during its forwards and backwards.

At rest each module has its own buffer. While the unit's parameters are shown it has a cast copy instead,
and what was written into the copy meanwhile is written back when they are hidden. A copy is kept as long
as the buffer's version counter stands still; modules that hold one buffer share one copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["BufferCasts"]

# F.batch_norm writes them behind the version counter's back.
_WRITTEN_UNSEEN = ("running_mean", "running_var")


class _Cast:
    """A copy of one buffer.

    Attributes:
        copy: the buffer in another dtype.
        of_version: the buffer's version that it holds; None where it is to be made anew.
        version: its own version since.
    """

    __slots__ = ("copy", "of_version", "version")

    def __init__(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        # Not in inference mode: a copy made there could not be trained with later.
        with torch.inference_mode(False), torch.no_grad():
            self.copy = buffer.to(dtype)
        self.note(buffer)

    def note(self, buffer: torch.Tensor) -> None:
        """The two hold the same."""
        self.of_version = _version(buffer)
        self.version = self.copy._version

    def is_of(self, buffer: torch.Tensor) -> bool:
        """Whether it is still ``buffer``'s copy."""
        version = self.of_version
        return (
            version is not None
            and version == _version(buffer)
            and self.copy.device == buffer.device
            and self.copy.shape == buffer.shape
        )


class _Shown(NamedTuple):
    """A place where a copy stands for a buffer."""

    module: nn.Module
    name: str
    buffer: torch.Tensor
    cast: _Cast


_casts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # buffer -> dtype -> _Cast


class BufferCasts:
    """See the module's docstring.

    Args:
        modules: the unit's, those of inner units left out.
        dtype: what their floating-point buffers are cast to.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._dtype = dtype
        self._shown: list[_Shown] = []

    def extend(self, other: BufferCasts) -> None:
        """Takes on the modules of ``other``."""
        self._modules += other._modules

    def show(self) -> None:
        """Puts the copies into the modules."""
        dtype = self._dtype
        for ref in self._modules:
            module = ref()
            if module is None or not module._buffers:
                continue
            for name, buffer in list(module._buffers.items()):
                if buffer is None or buffer.dtype == dtype or not buffer.is_floating_point():
                    continue
                cast = _cast_of(buffer, dtype)
                module._buffers[name] = cast.copy
                self._shown.append(_Shown(module, name, buffer, cast))

    def hide(self) -> None:
        """Puts the buffers back, with what was written into the copies."""
        shown, self._shown = self._shown, []
        for module, name, buffer, cast in shown:
            if name not in module._buffers:
                continue  # deleted meanwhile
            current = module._buffers[name]
            if current is cast.copy:
                _write_back(module, name, buffer, cast)
                module._buffers[name] = buffer
            elif current is not None and current.is_floating_point():
                # Another tensor was assigned.
                module._buffers[name] = current.to(buffer.dtype)


def _cast_of(buffer: torch.Tensor, dtype: torch.dtype) -> _Cast:
    by_dtype = _casts.setdefault(buffer, {})
    cast = by_dtype.get(dtype)
    if cast is None or not cast.is_of(buffer):
        cast = by_dtype[dtype] = _Cast(buffer, dtype)
    return cast


def _write_back(module: nn.Module, name: str, buffer: torch.Tensor, cast: _Cast) -> None:
    unseen = module.training and name in _WRITTEN_UNSEEN
    if cast.copy._version == cast.version and not unseen:
        return
    with torch.no_grad():
        if cast.copy._version == cast.version:
            # Maybe nothing was: what has not changed keeps the digits that the copy lacks.
            same = cast.copy == buffer.to(cast.copy.dtype)
            buffer.copy_(torch.where(same, buffer, cast.copy.to(buffer.dtype)))
        else:
            buffer.copy_(cast.copy)
    cast.note(buffer)
    if torch.promote_types(buffer.dtype, cast.copy.dtype) != buffer.dtype:
        cast.of_version = None  # the buffer has been rounded: what comes next begins with that


def _version(buffer: torch.Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version
