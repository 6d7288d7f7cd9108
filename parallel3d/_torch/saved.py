"""What autograd saves for a backward: private names of version counters and saved tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from parallel3d._torch.autograd import set_versions


def preserved_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Context manager that keeps the version counters of ``tensors``, so that autograd, which may have saved
    them, does not notice what its body writes to them."""
    # A tensor made in inference mode has no version, and can't be saved.
    counted = tuple(t for t in tensors if not t.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(counted)


# F.batch_norm writes buffers of these names without a change of their version counters.
WRITTEN_WITHOUT_VERSION = ("running_mean", "running_var")


@contextmanager
def noted_saves(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Context manager that calls ``note`` with each tensor that autograd saves, before other hooks."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def noted(tensor: torch.Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
        yield


def same_version_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the tensors share a version counter: an in-place change of one then counts for the other.

    Tensors on one storage may have separate counters: results of ``unsafe_chunk``, ``.data``.
    """
    version = one._version
    if other._version != version:
        return False
    set_versions((one,), (version + 1,))
    same = other._version != version
    set_versions((one,), (version,))
    return same


def saved_by(node: Any) -> Iterator[Callable[[], Any]]:
    """Yields functions, each of which reads a tensor that the graph's ``node`` has saved for backward. Those
    packed by hooks are left out, as unpacking may compute."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                raw = getattr(node, f"_raw_{name.lstrip('_')}", None)
            except RuntimeError:  # a backward has freed it
                continue
            saved = raw if isinstance(raw, (tuple, list)) else [raw]
            if all(each is not None and each.unpack_hook is None for each in saved):
                yield partial(getattr, node, name)


def version_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor that shares the version counter of ``tensor``, but not its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` detached, on the same memory and version counter, also in ``__torch_dispatch__``,
    where ``detach`` alone would give it a counter of its own."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
