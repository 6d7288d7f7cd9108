"""HeldSum: gradients of a bucket that wait for their reduction, in the parameters' ``.grad``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor, make_dtensor, set_grad

if TYPE_CHECKING:
    from parallel3d.fsdp.param import ShardedParam

__all__ = ["HeldSum", "waits_for_reduction"]


def waits_for_reduction(grad: torch.Tensor | None) -> bool:
    """Whether ``grad`` is a sum that is still to be reduced, and not the gradient."""
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)


class HeldSum:
    """A sum that waits for its reduction: a flat buffer whose parts stand in the parameters' ``.grad``.

    Attributes:
        parts: the buffer by parameter, in the shape gradients are added in.
        marks: DTensors of the same memory, what ``.grad`` is.
        placed: indices whose mark was put into ``.grad``.
        folded: of these, those whose sum holds a reduced gradient, which was there before.
        over_tp: indices whose sum is a part that other tp ranks have the rest of, as autograd brought it.
    """

    def __init__(self, flat: torch.Tensor, parts: list[torch.Tensor], marks: list) -> None:
        self.flat = flat
        self.parts = parts
        self.marks = marks
        self.placed: set[int] = set()
        self.folded: set[int] = set()
        self.over_tp: set[int] = set()

    def becomes_part(self, index: int, param: ShardedParam) -> None:
        """From now on the sum of part ``index`` is partial over tp too; its mark says so."""
        self.over_tp.add(index)
        self.parts[index].div_(param.tp_size)
        old = self.marks[index]
        spec = param.unreduced_spec(old.dtype, over_shard=True, over_tp=True)
        self.marks[index] = make_dtensor(get_local_tensor(old), spec)
        if param.sharded.grad is old:
            set_grad(param.sharded, self.marks[index])

    def place(self, index: int, param: torch.nn.Parameter) -> torch.Tensor | None:
        """Puts part ``index`` into ``param.grad``; returns the gradient that was there, if any.

        A part that is no longer there was cleared by the user: its sum is dropped.
        """
        before = param.grad
        if before is self.marks[index]:
            return None
        if index in self.placed:
            self.drop(index)
        self.placed.add(index)
        set_grad(param, self.marks[index])
        return before

    def drop(self, index: int) -> None:
        """Forgets the sum of part ``index``."""
        self.parts[index].zero_()
        self.placed.discard(index)
        self.folded.discard(index)

    def take(self, params: list[torch.nn.Parameter]) -> list[int]:
        """Empties ``.grad``; returns the indices that still hold a sum. The others' parts become zero."""
        held = []
        for index in list(self.placed):
            if params[index].grad is self.marks[index]:
                params[index].grad = None
                held.append(index)
            else:
                self.drop(index)
        return held
