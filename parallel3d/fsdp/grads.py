"""GradientSlots: a bucket's gradients from their arrival in backward to the parameters' ``.grad``.

A gradient is copied (cast, and rearranged) into the reduce input the moment autograd has it, and freed.
What ``.grad`` of a sharded Parameter may hold at rest:

- reduced: a DTensor placed as the Parameter. The gradient.
- partial: ``Partial()`` on replicate: reduce-scattered, waiting for the all-reduce that
  ``set_requires_all_reduce(False)`` put off.
- unsharded: ``Partial("avg")`` on replicate and shard: this rank's own sum, waiting for the reduction that
  ``set_requires_gradient_sync(False)`` put off.

A gradient that is there already is folded into the waiting sum, so ``.grad`` is all there is:
``zero_grad()``, scaling and setting to None do to a waiting sum what they do to any gradient.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from parallel3d._compat import get_local_tensor, gradient_hooks, make_dtensor

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket

__all__ = ["GradientSlots", "ReduceJob"]

_FLAT = "_parallel3d_flat"  # on a gradient: the buffer that it and its bucket's others are views of


@dataclass
class ReduceJob:
    """One reduction under way.

    Attributes:
        tensor: the reduce input (n * S), later its result (S,), in reduce dtype.
        used: indices of the parameters that got a gradient.
        scale: what the sum over ranks is multiplied by.
        all_reduce: whether the replicate axis is summed too, or put off.
        earlier: (S,) sums that earlier micro-batches have put off, to be all-reduced with this one.
    """

    bucket: Bucket
    tensor: torch.Tensor
    used: list[int]
    scale: float
    all_reduce: bool
    earlier: torch.Tensor | None


class HeldSum:
    """A sum that waits for its reduction: a flat buffer whose parts stand in the parameters' ``.grad``.

    Attributes:
        parts: the buffer by parameter, in the shape gradients are added in.
        marks: DTensors of the same memory, what ``.grad`` is.
        placed: indices whose mark was put into ``.grad``.
    """

    def __init__(self, flat: torch.Tensor, parts: list[torch.Tensor], marks: list) -> None:
        self.flat = flat
        self.parts = parts
        self.marks = marks
        self.placed: set[int] = set()

    def place(self, index: int, param: torch.nn.Parameter) -> torch.Tensor | None:
        """Puts part ``index`` into ``param.grad``; returns the gradient that was there, if any.

        A part that is no longer there was cleared by the user: its sum is dropped.
        """
        before = param.grad
        if before is self.marks[index]:
            return None
        if index in self.placed:
            self.parts[index].zero_()
        self.placed.add(index)
        param.grad = self.marks[index]
        return before

    def take(self, params: list[torch.nn.Parameter]) -> list[int]:
        """Empties ``.grad``; returns the indices that still hold a sum. The others' parts become zero."""
        held = []
        for index in self.placed:
            if params[index].grad is self.marks[index]:
                params[index].grad = None
                held.append(index)
            else:
                self.parts[index].zero_()
        return held


class GradientSlots:
    """See the module's docstring. Shapes: n = size of the shard axis, S = slots of all parameters."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = weakref.ref(bucket)  # it holds this: no cycle, freed without the collector
        self.arrived: set[int] = set()
        self.input: torch.Tensor | None = None
        self.input_views: list[torch.Tensor] = []
        self.whole: HeldSum | None = None  # put off by set_requires_gradient_sync(False)
        self.partial: HeldSum | None = None  # put off by set_requires_all_reduce(False)

    @property
    def bucket(self) -> Bucket:
        """The bucket whose gradients these are."""
        bucket = self._bucket()
        assert bucket is not None
        return bucket

    @property
    def sharded(self) -> list[torch.nn.Parameter]:
        """The bucket's sharded Parameters."""
        return [p.sharded for p in self.bucket.params]

    # -- arrival -----------------------------------------------------------------------------------

    def accept(self, index: int, grad: torch.Tensor, *, sync: bool) -> None:
        """Takes parameter ``index``'s gradient, of its compute shape."""
        param = self.bucket.params[index]
        by_rank = param.grad_by_rank(param.local_grad(grad))
        if not sync:
            self._hold_whole(index, by_rank)
        elif index in self.arrived:
            self.input_views[index].add_(by_rank)
        else:
            if self.input is None:
                self._allocate_input()
            self.input_views[index].copy_(by_rank)
        self.arrived.add(index)

    def _allocate_input(self) -> None:
        bucket = self.bucket
        n, size = bucket.parts, bucket.numel
        self.input = torch.empty(n * size, dtype=bucket.reduce_dtype, device=bucket.flat.device)
        columns = self.input.view(n, size).split(bucket.slot_sizes, dim=1)
        self.input_views = [p.slots_by_rank(c) for p, c in zip(bucket.params, columns, strict=True)]

    def _hold_whole(self, index: int, by_rank: torch.Tensor) -> None:
        bucket = self.bucket
        if self.whole is None:
            flat = torch.zeros(
                bucket.parts * bucket.numel, dtype=bucket.dtype, device=bucket.flat.device
            )
            regions = flat.split([bucket.parts * size for size in bucket.slot_sizes])
            pairs = list(zip(bucket.params, regions, strict=True))
            marks = [
                make_dtensor(p.compute_view(r), p.unreduced_spec(over_shard=True)) for p, r in pairs
            ]
            self.whole = HeldSum(flat, [p.by_rank(r) for p, r in pairs], marks)
        before = self.whole.place(index, bucket.params[index].sharded)
        if before is not None:
            self._fold_into_whole(index, before)
        self.whole.parts[index].add_(by_rank)

    def _fold_into_whole(self, index: int, grad: torch.Tensor) -> None:
        """Adds a gradient that is reduced already (or reduce-scattered) to this rank's own sum.

        What follows sums over the data axes and divides by their size. A shard's owner alone adds it,
        so it is multiplied by the number of ranks that would have had to: those of the shard axis, and
        of replicate too if it is partial there.
        """
        assert self.whole is not None
        bucket, param = self.bucket, self.bucket.params[index]
        factor: float = bucket.parts
        local = get_local_tensor(grad).clone()
        if self.partial is not None and grad is self.partial.marks[index]:
            factor = bucket.axes.data_size
            self.partial.placed.discard(index)
            self.partial.parts[index].zero_()
        if param.layout.tp_grad == "partial":
            factor /= param.tp_size  # it has been summed over tp, and will be again
        slot = torch.zeros(param.slot_numel, dtype=local.dtype, device=local.device)
        param.local_view(slot).copy_(local.mul_(factor))
        coordinate = bucket.axes.coordinate(bucket.axes.shard) if bucket.parts > 1 else 0
        mine = param.slots_by_rank(slot.unsqueeze(0)).select(0, 0)
        self.whole.parts[index].select(0, coordinate).add_(mine)

    def forget(self) -> None:
        """Drops what a broken backward has brought."""
        self.arrived, self.input, self.input_views = set(), None, []

    # -- reduction ---------------------------------------------------------------------------------

    def has_work(self, *, sync: bool, all_reduce: bool) -> bool:
        """Whether a reduction is due at the end of this backward."""
        if not sync:
            return False
        waiting = self.input is not None or self.whole is not None
        return waiting or (all_reduce and self.partial is not None)

    def start(self, *, all_reduce: bool) -> ReduceJob:
        """Hands over the reduce input, sums put off by earlier micro-batches folded in."""
        bucket = self.bucket
        used = set(self.arrived)
        if self.input is None:
            used = set()
            self._allocate_input()
        assert self.input is not None
        for index in range(len(bucket.params)):
            if index not in used:
                self.input_views[index].zero_()
        if self.whole is not None:
            used.update(self.whole.take(self.sharded))
            for view, part in zip(self.input_views, self.whole.parts, strict=True):
                view.add_(part)
        earlier = None
        if self.partial is not None and all_reduce:
            used.update(self.partial.take(self.sharded))
            earlier, self.partial = self.partial.flat, None
        job = ReduceJob(
            bucket, self.input, sorted(used), 1.0 / bucket.axes.data_size, all_reduce, earlier
        )
        self.arrived, self.input, self.input_views, self.whole = set(), None, [], None
        return job

    def finish(self, job: ReduceJob) -> None:
        """Puts the result of a reduction into ``.grad``, adding to what is there."""
        flat = job.tensor.to(self.bucket.dtype)
        parts = self.bucket.local_parts(flat)
        if job.all_reduce or not self.bucket.replicate_groups:
            self._accumulate(flat, parts, job.used)
            for index in job.used:
                param = self.bucket.params[index].sharded
                for hook in gradient_hooks(param):
                    hook(param)
            return
        held = self.partial
        if held is None:
            marks = [
                make_dtensor(part, p.unreduced_spec(over_shard=False))
                for p, part in zip(self.bucket.params, parts, strict=True)
            ]
            held = self.partial = HeldSum(flat, parts, marks)
        copies = math.prod(group.size() for group in self.bucket.replicate_groups)
        for index in job.used:
            before = held.place(index, self.bucket.params[index].sharded)
            if before is not None:  # reduced: every rank of the all-reduce to come has it
                held.parts[index].add_(get_local_tensor(before), alpha=1.0 / copies)
        if held.flat is not flat:
            held.flat.add_(flat)

    def _accumulate(self, flat: torch.Tensor, parts: list[torch.Tensor], used: list[int]) -> None:
        params = self.bucket.params
        before = getattr(params[0].sharded.grad, _FLAT, None)
        if (
            before is not None
            and len(used) == len(params)
            and all(getattr(p.sharded.grad, _FLAT, None) is before for p in params)
        ):
            before.add_(flat)  # one kernel for the bucket
            return
        for index in used:
            param = params[index].sharded
            if param.grad is not None:
                get_local_tensor(param.grad).add_(parts[index])
                continue
            grad = make_dtensor(parts[index], params[index].spec)
            setattr(grad, _FLAT, flat)
            param.grad = grad
