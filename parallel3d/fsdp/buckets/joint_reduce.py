"""JointReduce: one all-reduce for several buckets' gradients, where nothing is sharded.

A call costs the same however little it sends, so small buckets go together, in the order in which backward
comes to them: up to 1 MiB first, so that communication begins early, then up to 25 MiB (the defaults of
torch's ``DistributedDataParallel``: ``_DEFAULT_FIRST_BUCKET_BYTES``, ``bucket_cap_mb``). What goes together
follows from the order of the units alone, and is the same on every rank. It has the side of a ``Bucket``
that a comm's reduction deals with.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import TYPE_CHECKING, Any

import torch

from parallel3d._compat import foreach_copy_, has_gradient_hooks, torch_function_off
from parallel3d.fsdp.buckets.grads import make_gradients
from parallel3d.fsdp.buckets.reduce_job import ReduceJob, divisor_before_sum

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket
    from parallel3d.fsdp.buckets.gate import Gradients
    from parallel3d.fsdp.comm import Comm

__all__ = ["JointReduce", "plan_reductions"]

_GRAD, _REQUIRES_GRAD = attrgetter("grad"), attrgetter("requires_grad")
FIRST_BYTES = 2**20
MOST_BYTES = 25 * 2**20
LARGE = 2**14
"""Elements of a gradient, on average, from which a call for each costs less than a pass over all."""
NODE_BYTES = 2**20
"""Buckets whose gradients may wait for each other before they are copied together."""


def plan_reductions(buckets: Iterable[Bucket]) -> list[JointReduce]:
    """Which of ``buckets``, in the order of their backwards, are reduced together.

    A bucket that is larger than the limit is by itself. Only neighbours go together, of one dtype, summed
    over the same ranks and divided by the same number.
    """
    plan: list[list[Bucket]] = []
    size, before = 0, None
    for bucket in buckets:
        groups = [group.group_name for group in bucket.replicate_groups]
        kind = (bucket.dtype, bucket.home, groups, bucket.divisor)
        limit = FIRST_BYTES if len(plan) == 1 else MOST_BYTES
        if kind != before or size + bucket.flat.nbytes > limit:
            plan.append([])
            size = 0
        plan[-1].append(bucket)
        size += bucket.flat.nbytes
        before = kind
    return [JointReduce(together) for together in plan]


class JointReduce:
    """See the module's docstring. Shapes: S, the slots of all parameters of all buckets.

    Attributes:
        arrived: (S,), the gradients that have arrived in this backward; None before the first.
        comm: what reduces them in the backward under way; None at rest.
        accepts_all: whether ``accept_all`` may be asked: nothing was changed since the forward.
        used: by bucket the indices of the parameters that got one; None before the bucket's have arrived.
        launched: whether this backward's reduction is under way.
    """

    shard_group = scatter_group = second_group = tp_group = None
    scatter_comm = comm_hook = all_reduce_hook = guard = None
    offloaded = False

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        first = buckets[0]
        self.buckets = list(buckets)
        self.unit = first.unit
        self.replicate_groups = first.replicate_groups
        self.divisor = first.divisor
        self.dtype, self.grad_dtype, self.home = first.dtype, first.grad_dtype, first.home
        sizes = [bucket.numel for bucket in buckets]
        self.sizes = sizes
        self.numel = sum(sizes)
        counts = [len(bucket.params) for bucket in buckets]
        self._ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self._starts = [end - count for end, count in zip(self._ends, counts, strict=True)]
        self._share = self._early_share(sum(counts))
        self.in_flight: Any = None
        self.comm: Comm | None = None
        self.accepts_all = False
        self.forget()

    def _early_share(self, params: int) -> float | None:
        """What gradients are multiplied by as they are copied, where that spares a pass over the sum.

        For large ones, which take a call each; and where it rounds nothing: a power of two.
        """
        exact = math.frexp(self.divisor)[0] == 0.5 and self.dtype is not torch.float16
        large = self.numel >= LARGE * params and type(self.flat) is torch.Tensor
        return 1.0 / self.divisor if exact and large and self.divisor != 1 else None

    def begin(self, comm: Comm, *, accepts_all: bool) -> None:
        """A backward begins, of the root that these are of."""
        self.comm, self.accepts_all = comm, accepts_all

    def end(self) -> None:
        """It has ended."""
        self.comm, self.accepts_all = None, False
        self.forget()

    @property
    def grads(self) -> JointReduce:
        """As of a bucket: what a comm starts and finishes. No attribute: it would keep itself alive."""
        return self

    @property
    def flat(self) -> torch.Tensor:
        """Shards of the kind whose gradients these are."""
        return self.buckets[0].flat

    def forget(self) -> None:
        """Drops what a backward has brought."""
        self.arrived: torch.Tensor | None = None
        self._parts: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self.used: list[list[int] | None] = [None] * len(self.buckets)
        self.missing = len(self.buckets)
        self.launched = False
        self.in_flight = None
        for bucket in self.buckets:
            bucket.grads.in_flight = None

    def share_nodes(self) -> list[list[Bucket]]:
        """Which of the buckets have a node of the graph together; see ``gate``."""
        nodes: list[list[Bucket]] = []
        size = 0
        for bucket in self.buckets:
            if not nodes or size + bucket.flat.nbytes > NODE_BYTES:
                nodes.append([])
                size = 0
            nodes[-1].append(bucket)
            size += bucket.flat.nbytes
        return nodes

    # -- arrival -----------------------------------------------------------------------------------

    def accept(self, place: int, indices: list[int], grads: Sequence[torch.Tensor]) -> bool:
        """Takes gradients of parameters ``indices`` of bucket ``place``, which ``pack`` copies.

        Returns:
            False if they are not taken, as the bucket's have been already in this backward.
        """
        if self.used[place] is not None:
            return False
        if self.arrived is None:
            self._begin()
        start, end = self._starts[place], self._ends[place]
        parts = self._parts[start:end]
        if len(indices) < end - start:
            for index in set(range(end - start)).difference(indices):
                parts[index].zero_()
            parts = [parts[index] for index in indices]
        self._targets += parts
        self._sources += grads
        self.used[place] = indices
        self.missing -= 1
        return True

    def accept_all(self, since: int, indices: list[list[int]], grads: Gradients) -> bool:
        """The same with the gradients of all parameters of the buckets from ``since`` on.

        Args:
            indices: those that get one, by bucket. Where they are not all, or one of ``grads`` is None,
                nothing is taken.
        """
        until = since + len(indices)
        start, end = self._starts[since], self._ends[until - 1]
        used = self.used[since:until]
        if len(grads) < end - start or any(map(is_, grads, repeat(None))):
            return False
        if any(each is not None for each in used):
            return False
        if self.arrived is None:
            self._begin()
        self._targets += self._parts[start:end]
        self._sources += grads  # type: ignore[arg-type]
        self.used[since:until] = indices
        self.missing -= len(indices)
        return True

    def pack(self) -> None:
        """Copies what was accepted; once all is there, issues the reduction."""
        if self._share is None:
            foreach_copy_(self._targets, self._sources)
        else:
            for target, source in zip(self._targets, self._sources, strict=True):
                torch.mul(source, self._share, out=target)
        self._targets, self._sources = [], []
        if not self.missing:
            self.launch()

    def _begin(self) -> None:
        self.arrived = torch.empty(self.numel, dtype=self.dtype, device=self.home)
        self._parts = self.local_parts(self.arrived)

    def slices(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each bucket's part of ``flat``."""
        return flat.split(self.sizes)

    def local_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of ``flat``."""
        return [
            part
            for bucket, piece in zip(self.buckets, self.slices(flat), strict=True)
            for part in bucket.local_parts(piece)
        ]

    def gradients(self, flat: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What ``.grad`` of the parameters is."""
        return [
            grad
            for bucket, piece, start, end in zip(
                self.buckets, self.slices(flat), self._starts, self._ends, strict=True
            )
            for grad in make_gradients(bucket, piece, parts[start:end])
        ]

    # -- reduction ---------------------------------------------------------------------------------

    def launch(self) -> None:
        """Issues the reduction of what has arrived, if anything has."""
        if self.arrived is None or self.launched:
            return
        self.launched = True
        assert self.comm is not None
        self.comm.reduce(self, all_reduce=True)  # type: ignore[arg-type]
        itself = weakref.ref(self)
        for bucket in self.buckets:
            bucket.grads.in_flight = itself

    def drain(self, _: Bucket) -> None:
        """Completes the reduction, before one of the buckets is reduced again by itself."""
        if self.launched and self.arrived is not None:
            assert self.comm is not None
            self.comm.drain(self)  # type: ignore[arg-type]

    def start(self, *, all_reduce: bool) -> ReduceJob:
        """Hands over what has arrived: from the first bucket that has gradients to the last."""
        flat = self.arrived
        assert flat is not None and all_reduce
        if self.missing:
            flat = self._span(flat)
        before = divisor_before_sum(self.divisor, self.dtype)
        scale, rest = before / self.divisor, 1.0
        if self._share is not None:
            scale = 1.0
        elif before != 1:
            flat.div_(before)
            if self.replicate_groups:  # see ``GradientSlots``
                scale, rest = rest, scale
        return ReduceJob(self, [flat], [], scale, all_reduce, None, (), rest)  # type: ignore[arg-type]

    def _span(self, flat: torch.Tensor) -> torch.Tensor:
        there = [place for place, used in enumerate(self.used) if used is not None]
        pieces = self.slices(flat)
        for place in range(there[0], there[-1]):
            if self.used[place] is None:
                pieces[place].zero_()
        start = sum(self.sizes[: there[0]])
        return flat[start : sum(self.sizes[: there[-1] + 1])]

    def finish(self, job: ReduceJob) -> None:
        """Puts the result into ``.grad``, adding to what is there."""
        job.take()
        flat, parts = self.arrived, self._parts
        assert flat is not None
        grads = self.gradients(flat, parts)
        used = self.used
        launched = self.launched
        self.forget()
        self.launched = launched  # what comes now is of another reduction
        self.used = [[]] * len(self.buckets)
        if self._put_all(used, grads):
            self._run_hooks(used)
        else:
            self._put_pieces(used, flat, parts, grads)

    def _put_all(self, used: list[list[int] | None], grads: list[torch.Tensor]) -> bool:
        """Puts ``grads`` where there are none, if every parameter gets one: none was frozen meanwhile."""
        count = sum(map(len, filter(None, used)))
        params = self._sharded()
        if count < len(params):
            return False
        with torch_function_off():
            if any(map(is_not, map(_GRAD, params), repeat(None))):
                return False
            if not all(map(_REQUIRES_GRAD, params)):
                return False
            deque(map(setattr, params, repeat("grad"), grads), maxlen=0)
        return True

    def _run_hooks(self, used: list[list[int] | None]) -> None:
        if any(map(has_gradient_hooks, self._sharded())):
            for bucket, indices in zip(self.buckets, used, strict=True):
                bucket.grads.run_hooks(indices or [])

    def _put_pieces(
        self,
        used: list[list[int] | None],
        flat: torch.Tensor,
        parts: list[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> None:
        """Bucket by bucket."""
        pieces = self.slices(flat)
        for place, indices in enumerate(used):
            if indices is not None:
                start, end = self._starts[place], self._ends[place]
                slots, params = self.buckets[place].grads, self.buckets[place].params
                indices = [i for i in indices if params[i].sharded.requires_grad]
                slots.put_piece(pieces[place], parts[start:end], grads[start:end], indices)
                slots.run_hooks(indices)

    def _sharded(self) -> list[torch.nn.Parameter]:
        return [param.sharded for bucket in self.buckets for param in bucket.params]
