"""BufferCasts: a unit's floating-point buffers in another dtype during its forwards and backwards.

At rest each module has its own buffer. While the unit's parameters are shown it has a cast copy instead,
and what was written into the copy meanwhile is written back when they are hidden. A copy is kept as long
as the buffer's version counter stands still; modules that hold one buffer share one copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

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


class _Place:
    """One name in a module, where a copy stands for its buffer.

    Attributes:
        units: how many have put it there: a module without parameters may be of several.
    """

    __slots__ = ("buffer", "cast", "units")

    def __init__(self, buffer: torch.Tensor, cast: _Cast) -> None:
        self.buffer, self.cast, self.units = buffer, cast, 0


_casts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # buffer -> dtype -> _Cast
_places: weakref.WeakKeyDictionary[nn.Module, dict[str, _Place]] = weakref.WeakKeyDictionary()


class BufferCasts:
    """See the module's docstring.

    Args:
        modules: the unit's, those of inner units left out.
        dtype: what their floating-point buffers are cast to.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._dtype = dtype
        self._shown: list[tuple[weakref.ref[nn.Module], str, _Place]] = []

    def extend(self, other: BufferCasts) -> None:
        """Takes on the modules of ``other``."""
        self._modules += other._modules

    def show(self) -> None:
        """Puts the copies into the modules."""
        for ref in self._modules:
            module = ref()
            if module is None or not module._buffers:
                continue
            places = _places.setdefault(module, {})
            for name, buffer in list(module._buffers.items()):
                place = places.get(name)
                if place is None or buffer is not place.cast.copy:
                    if buffer is None or not self._concerns(buffer):
                        continue
                    place = places[name] = _Place(buffer, _cast_of(buffer, self._dtype))
                    module._buffers[name] = place.cast.copy
                place.units += 1
                self._shown.append((ref, name, place))

    def _concerns(self, buffer: torch.Tensor) -> bool:
        return buffer.is_floating_point() and buffer.dtype != self._dtype

    def hide(self) -> None:
        """Puts the buffers back, with what was written into the copies."""
        shown, self._shown = self._shown, []
        for ref, name, place in shown:
            place.units -= 1
            module = ref()
            if module is None or place.units or _places[module].get(name) is not place:
                continue
            del _places[module][name]
            if name in module._buffers:  # not deleted meanwhile
                _put_back(module, name, place)


def _put_back(module: nn.Module, name: str, place: _Place) -> None:
    current, buffer = module._buffers[name], place.buffer
    if current is place.cast.copy:
        _write_back(module, name, buffer, place.cast)
        module._buffers[name] = buffer
    elif current is not None and current.is_floating_point():
        module._buffers[name] = current.to(buffer.dtype)  # another tensor was assigned


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
