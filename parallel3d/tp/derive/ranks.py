"""Tensor-parallel ranks as threads of this process, to prove a derived plan.

They need no process group, so they work within a job that has one, on every rank alike, and run the
same forwards, styles and collectives as a job does.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from parallel3d.tp.collectives import TpAxis

__all__ = ["ThreadAxis", "run_ranks"]

ResultT = TypeVar("ResultT")


class _Done:
    """The handle of a collective that is over."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Meeting:
    """Where the threads exchange tensors: each brings one, all get all of them."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.brought: list[Any] = [None] * size

    def exchange(self, rank: int, what: str, tensor: Tensor) -> list[Tensor]:
        # A copy: the sender may write to its tensor while others still read it.
        self.brought[rank] = (what, tensor.detach().clone())
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        kinds = {(name, tuple(t.shape), t.dtype) for name, t in found}
        if len(kinds) > 1:
            raise RuntimeError(f"the ranks disagree about a collective: {sorted(map(str, kinds))}")
        return [t for _, t in found]


class _ThreadGroup(dist.ProcessGroup):
    """A process group whose ranks are threads; has the collectives that ``tp`` uses."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._meeting, self._index, self._ranks = meeting, rank, size

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        (tensor,) = tensors
        largest = opts is not None and opts.reduceOp == dist.ReduceOp.MAX
        assert largest or opts is None or opts.reduceOp == dist.ReduceOp.SUM, opts.reduceOp
        parts = torch.stack(self._meeting.exchange(self._index, f"all-reduce {largest}", tensor))
        with torch.no_grad():
            tensor.copy_(parts.amax(0) if largest else parts.sum(0))
        return _Done()

    def all_gather_single(self, output: Tensor, input: Tensor, *_: Any) -> _Done:  # type: ignore[override]
        with torch.no_grad():
            parts = self._meeting.exchange(self._index, "allgather", input)
            output.view(-1).copy_(torch.cat([t.reshape(-1) for t in parts]))
        return _Done()

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *_: Any) -> _Done:  # type: ignore[override]
        with torch.no_grad():
            total = torch.stack(self._meeting.exchange(self._index, "reducescatter", input)).sum(0)
            output.view(-1).copy_(total.view(self._ranks, -1)[self._index])
        return _Done()

    # torch 2.11's names.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


class ThreadAxis(TpAxis):
    """The ``tp`` axis seen from one thread. It has no mesh."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self.mesh = None  # type: ignore[assignment]
        self.size, self.rank = size, rank
        self.copies, self.gathered = [], []
        self.group = _ThreadGroup(meeting, rank, size)


def run_ranks(size: int, run: Callable[[ThreadAxis], ResultT]) -> list[ResultT]:
    """``run(axis)`` of each of ``size`` ranks at once, by rank.

    Raises:
        Exception: what the first rank that failed raised; the others end too.
    """
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: dict[int, Exception] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = run(ThreadAxis(meeting, rank, size))
        except threading.BrokenBarrierError:
            pass  # another rank failed
        except Exception as error:
            errors[rank] = error
        finally:
            if rank in errors or results[rank] is None:
                meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results
