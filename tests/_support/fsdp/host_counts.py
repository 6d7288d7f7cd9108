"""What the host does in a step on an accelerator, counted on a stand-in for its streams: ours and torch's."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group
from torch.distributed.fsdp._fully_shard import _fsdp_state as _state
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d._torch import groups
from parallel3d._util import dry_run
from parallel3d._util.streams import Clock, FakeEvent, FakeStream, Streams
from parallel3d._util.trees import tensors_in

COUNTED = (
    "kernels",
    "collectives",
    "asynchronous",
    "events",
    "waits",
    "stream changes",
    "current stream",
    "allocations",
    "Python calls",
)
"""``asynchronous``: collectives that have a work. ``current stream``: questions which it is."""


class CountedStreams(Streams):
    """Stands for ``torch.cuda``; ``counts`` has what a program has asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def make_event(self, stream: FakeStream) -> FakeEvent:
        return _Event(self, stream)

    def Event(self, *_: Any, **__: Any) -> FakeEvent:
        return _Event(self)

    def waits(self, stream: FakeStream, clock: Clock) -> None:
        self.counts["waits"] += 1
        super().waits(stream, clock)

    def current_stream(self, device: Any = None) -> FakeStream:
        self.counts["current stream"] += 1
        return super().current_stream(device)

    def set_stream(self, stream: FakeStream) -> None:
        self.counts["stream changes"] += 1
        super().set_stream(stream)

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        """As that of ``torch.cuda``: asks for the current stream, and changes it twice."""
        before = self.current_stream()
        self.set_stream(before if stream is None else stream)
        try:
            yield
        finally:
            self.set_stream(before)


class _Event(FakeEvent):
    def record(self, stream: FakeStream | None = None) -> None:
        self.streams.counts["events"] += 1  # type: ignore[attr-defined]
        super().record(stream)


@contextmanager
def on_streams(streams: Streams) -> Iterator[None]:
    """Both engines take ``streams`` for the accelerator's, and their process groups for NCCL's."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(dry_run, "played", streams))
        stack.enter_context(patch.object(groups, "pretended_backend", "nccl"))
        stack.enter_context(
            patch.object(torch.accelerator, "current_stream", streams.current_stream)
        )
        for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _state):
            stack.enter_context(patch.object(module, "_get_device_handle", lambda _: streams))
        yield


# -- kernels ----------------------------------------------------------------------------------------------

ATEN = torch.ops.aten


def is_fused(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether CUDA runs an operation on a list of tensors as one kernel, and not as one for each.

    The conditions are those of torch 2.11 to 2.15; where a dtype is not named, it does not matter.
    """
    if name == "_foreach_copy_":
        targets, sources = args[:2]
        alike = all(
            a.shape == b.shape and a.stride() == b.stride() and _is_dense(a)
            for a, b in zip(targets, sources, strict=True)
        )
        return alike and _one_dtype(targets) and _one_dtype(sources)
    if name == "split_with_sizes_copy":
        whole, outs = args[0], kwargs["out"]
        return all(_is_dense(t) and t.dtype == whole.dtype for t in (whole, *outs))
    if name in ("_chunk_cat", "chunk_cat"):
        tensors, out = args[0], kwargs["out"]
        dtypes = tensors[0].dtype, out.dtype
        casts = dtypes in ((dtypes[0], dtypes[0]), (torch.bfloat16, torch.float32))
        return casts and _one_dtype(tensors) and all(t.is_contiguous() for t in (*tensors, out))
    if name.startswith("_foreach_"):
        lists = [each for each in args if isinstance(each, (list, tuple)) and each]
        return all(_is_dense(t) for each in lists for t in each if isinstance(t, Tensor))
    return False


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie without gaps, each once."""
    expected = 1
    for size, step in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda e: e[::-1]
    ):
        if size == 1:
            continue
        if step != expected:
            return not tensor.numel()
        expected *= size
    return True


def _one_dtype(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.dtype for tensor in tensors}) <= 1


_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
_NO_KERNEL |= {"detach", "lift_fresh", "_reshape_alias", "set_", "wait_tensor"}
_LISTS = ("split_with_sizes_copy", "_chunk_cat", "chunk_cat", "all_gather_copy_in")


class Counted(TorchDispatchMode):
    """Counts the operations of its body: kernels, collectives and allocations.

    Attributes:
        counts: what of ``COUNTED`` it sees.
        lists: (name, whether it is one kernel) of each operation on a list of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.lists: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor's operations on local tensors come here too
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            self._collective(func, args, kwargs)
        elif not func.is_view and name not in _NO_KERNEL and func.namespace != "profiler":
            self.counts["kernels"] += self._kernels(name, args, kwargs)
        result = func(*args, **kwargs)
        made = (t for t in tensors_in(result) if not hasattr(t, "__tensor_flatten__"))
        new = [t for t in made if t.untyped_storage()._cdata not in given]
        self.counts["allocations"] += sum(t.numel() > 0 for t in new)
        return result

    def _collective(self, func: Any, args: Any, kwargs: Any) -> None:
        self.counts["collectives"] += 1
        names = [argument.name for argument in func._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        if func.namespace != "c10d" or values.get("async_op", True):
            self.counts["asynchronous"] += 1

    def _kernels(self, name: str, args: Any, kwargs: Any) -> int:
        if name not in _LISTS and not name.startswith("_foreach_"):
            return 1
        tensors = kwargs["out"] if name == "split_with_sizes_copy" else args[0]
        fused = name == "all_gather_copy_in" or is_fused(name, args, kwargs)
        self.lists.append((name, fused))
        return 1 if fused else len(tensors)


@contextmanager
def _storages(counts: Counter[str]) -> Iterator[None]:
    """Counts storages that get memory again: an allocation that is no operation."""
    resize = torch.UntypedStorage.resize_

    def counting(storage: torch.UntypedStorage, size: int) -> Any:
        counts["allocations"] += size > storage.size()
        return resize(storage, size)

    with patch.object(torch.UntypedStorage, "resize_", counting):
        yield


# -- a step -----------------------------------------------------------------------------------------------


def counted(
    make: Callable[[], nn.Module], x: Tensor, streams: CountedStreams
) -> tuple[Counter[str], list[tuple[str, bool]]]:
    """Counts of a forward and backward, the third of a model; and ``Counted.lists``."""
    with on_streams(streams):
        model = make()

        def step() -> None:
            model(x).sum().backward()
            for param in model.parameters():
                param.grad = None

        for _ in range(2):
            step()
        seen = Counted()
        streams.counts.clear()
        with seen, _storages(seen.counts):
            step()
        counts = seen.counts + streams.counts
        counts["Python calls"] = _calls(step)
    return counts, seen.lists


def _calls(step: Callable[[], None]) -> int:
    """Calls of Python and C functions in ``step``."""
    found = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    gc.collect()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found
