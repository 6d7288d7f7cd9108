"""A CUDA graph's stand-in on the CPU: a list of operations, with the tensors and numbers of the recording."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist

from parallel3d._torch.autograd import TorchDispatchMode
from parallel3d._torch.saved import preserved_versions
from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d.optim.capture import CudaGraph

_COMMUNICATES = ("c10d", "_c10d_functional")
_NO_WORK = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_")


class RecordedGraph(CudaGraph):
    """Records what a call does, and undoes it: as in a capture, nothing was executed. A replay does it again
    in the same memory, unseen by Python and by version counters.

    Attributes:
        runs: how often a call was made eagerly. recorded, replayed: how often.
        syncs: what ``watch`` returns.
        error: what ``record`` raises at its end; or None.
    """

    def __init__(self) -> None:
        self.runs = self.recorded = self.replayed = 0
        self.syncs: list[str] = []
        self.error: Exception | None = None
        self._steps: list[Callable[[], Any]] = []
        self._kept: list[Any] = []

    def run(self, call: Callable[[], Any]) -> Any:
        self.runs += 1
        return call()

    def watch(self, call: Callable[[], Any]) -> tuple[Any, list[str]]:
        return self.run(call), self.syncs

    def record(self, call: Callable[[], Any]) -> Any:
        self.recorded += 1
        self._steps, self._kept = [], []
        mode = _Recording(self._steps, self._kept)
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            mode.save(storage)
            self._steps.append(lambda: resize(storage, size))
            return resize(storage, size)

        try:
            with mode, patch.object(torch.UntypedStorage, "resize_", resized):
                result = call()
        finally:
            mode.undo()
        if self.error is not None:
            raise self.error
        return result

    def replay(self) -> None:
        self.replayed += 1
        with torch.no_grad():
            for step in self._steps:
                step()


class _Recording(TorchDispatchMode):
    def __init__(self, steps: list[Callable[[], Any]], kept: list[Any]) -> None:
        super().__init__()
        self.steps, self.kept = steps, kept
        self._saved: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a DTensor runs on its local tensors
        kwargs = kwargs or {}
        writes = func._schema.is_mutable or func.namespace in _COMMUNICATES
        for tensor in tensors_in(
            (args, kwargs)
        ):  # all: batch norms write to buffers without saying so
            self.save(tensor.untyped_storage())
        out = func(*args, **kwargs)
        if func.namespace != "profiler" and func.overloadpacket.__name__ not in _NO_WORK:
            given, known, made = (map_tensors(_alias, each) for each in (args, kwargs, out))
            self.kept.append((args, kwargs, out))
            self.steps.append(lambda: _again(func, given, known, made, writes=writes))
        else:
            self.kept.append(out)
        return out

    def save(self, storage: torch.UntypedStorage) -> None:
        """Keeps what is in ``storage``, unless it was kept."""
        if storage.device.type == "meta":
            return
        if storage._cdata not in self._saved and storage.nbytes():
            self._saved[storage._cdata] = storage, _bytes(storage).clone()

    def undo(self) -> None:
        for storage, before in self._saved.values():
            if storage.nbytes() == before.numel():
                _bytes(storage).copy_(before)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, whatever becomes of the tensor object."""
    with torch.no_grad():
        return tensor.detach()


def _again(func: Any, args: Any, kwargs: Any, made: Any, *, writes: bool) -> None:
    written = list(tensors_in((args, kwargs))) if writes else []
    with preserved_versions(written) if written else nullcontext():
        out = func(*args, **kwargs)
    for item in out if isinstance(out, tuple) else (out,):
        if isinstance(item, torch.ScriptObject):
            dist.Work.unbox(item).wait()
    for new, old in zip(tensors_in(out), tensors_in(made), strict=True):
        if func.namespace == "_c10d_functional":
            new = torch.ops._c10d_functional.wait_tensor(new)
        if new.untyped_storage()._cdata != old.untyped_storage()._cdata:
            old.copy_(new)
