"""How much memory floating-point tensors have, seen from outside: real ones and fake ones alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d._torch.fake import FakeTensor, in_fake_mode

_QUESTIONS = ("prim::device", "aten::is_pinned")  # which fake tensors ask, or do not


class FloatMemory(TorchDispatchMode):
    """Follows every storage that an operation in the body reads or writes.

    Attributes:
        series: after each operation, its name and the bytes alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.series: list[tuple[str, int]] = []
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor's own dispatch works on its local tensor, seen here
        result = func(*args, **(kwargs or {}))
        if in_fake_mode():
            return result  # DTensor asks what shapes come out; those tensors have no memory
        for tensor in tree_leaves((args, kwargs, result)):
            if _counts(tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                self._known[storage.cdata] = storage
        del args, kwargs
        if func._schema.name not in _QUESTIONS:
            self.series.append((func._schema.name, self.now()))
        return result

    def now(self) -> int:
        """Bytes alive."""
        for key in [key for key, each in self._known.items() if each.expired()]:
            del self._known[key]
        alive = [torch.UntypedStorage._new_with_weak_ptr(e.cdata) for e in self._known.values()]
        places = sorted((s.data_ptr(), s.nbytes()) for s in alive if s.device.type != "meta")
        total, end = sum(s.nbytes() for s in alive if s.device.type == "meta"), 0
        for begin, size in places:  # the engine makes storages within the memory of another
            total += max(begin + size - max(begin, end), 0)
            end = max(end, begin + size)
        return total

    def most(self) -> int:
        """The most after any operation."""
        return max(size for _, size in self.series)


def _counts(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and (isinstance(value, FakeTensor) or value.device.type != "meta")
    )
