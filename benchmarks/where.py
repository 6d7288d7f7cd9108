"""Where the calling thread is during forward and backward: in collectives, waits, copies."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import distributed as dist

from parallel3d._torch.autograd import TorchDispatchMode

__all__ = ["Where", "where_the_thread_is"]

# Kernels that only move, cast or scale. A stack of linears, norms and gelus runs none of them by itself.
_MOVING = {
    "_chunk_cat",
    "_foreach_copy_",
    "_foreach_div_",
    "_foreach_mul_",
    "_to_copy",
    "cat",
    "clone",
    "copy_",
    "div_",
    "mul_",
    "split_with_sizes_copy",
    "zero_",
}


@dataclass
class Where:
    """Seconds of wall time on the calling thread.

    Attributes:
        issuing: inside c10d's calls, but for waits within them.
        waiting: inside ``Work.wait``.
        copying: inside kernels that move, cast or scale what is communicated, or sum what ranks sent.
    """

    issuing: float = 0.0
    waiting: float = 0.0
    copying: float = 0.0


@contextmanager
def where_the_thread_is() -> Iterator[Where]:
    """Measures the body, which gets slower by it: not for rounds whose time counts."""
    found = Where()
    original = dist.Work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            found.waiting += time.perf_counter() - start

    setattr(dist.Work, "wait", wait)  # noqa: B010 - a method, to mypy
    try:
        with _Timing(found):
            yield found
    finally:
        setattr(dist.Work, "wait", original)  # noqa: B010


class _Timing(TorchDispatchMode):
    """Sees every op of this thread, and those of the backward passes it starts."""

    def __init__(self, found: Where) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        start, waited = time.perf_counter(), self.found.waiting
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - start - (self.found.waiting - waited)
        if func.namespace == "c10d":
            self.found.issuing += seconds
        elif _moves(func, args):
            self.found.copying += seconds
        return result


def _moves(func: Any, args: tuple[Any, ...]) -> bool:
    name = func.overloadpacket.__name__
    if name == "sum":  # over the rows that ranks sent; the gradient of a bias keeps the dim
        return len(args) > 1 and (len(args) < 3 or not args[2])
    return name in _MOVING or func.namespace == "fsdp"  # torch's own copies
