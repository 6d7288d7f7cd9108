"""BucketGradients: a bucket's gradients from their arrival in backward to the sharded parameters' ``.grad``.

Autograd brings the gradients of the unsharded parameters one by one. They become the inputs of one
reduce-scatter: a zero-copy parameter's gradient is sent from where autograd has put it, the others are
packed into one buffer (``ReduceInput``). Without a reduction they are accumulated, see ``accumulated``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import (
    gradient_hooks,
    have_gradient_hooks,
    set_grad,
    torch_function_off,
)
from parallel3d._torch.dtensor import DTensorSpec, get_local_tensor, new_dtensor
from parallel3d._torch.kernels import chunk_cat
from parallel3d.fsdp.accumulated import AccumulatedGradients, Accumulation, GradientBucket
from parallel3d.fsdp.reduction import Reduction, divisor_before_sum, stages_of

# An attribute of each gradient: (the buffer (S,) that the bucket's gradients are views of, the index of its
# parameter, the sizes of the buffer's segments).
PLACE = "_parallel3d_place"

_place_of = attrgetter(PLACE)
_GRAD, _DTYPE = attrgetter("grad"), attrgetter("dtype")
_NEW_GRADIENT = partial(new_dtensor, requires_grad=False)


class BucketGradients:
    """The gradients of one bucket from their arrival in backward to ``.grad``.

    Attributes:
        sums: the ``Accumulation`` of earlier micro-batches, which waits for a reduction.
        arrived: indices of the parameters whose gradient has arrived in this backward.
        tp_partial: indices of the parameters whose gradient in this backward is partial over tp.
        input: the inputs of this backward's reduce-scatter; None before the first gradient.
        in_flight: weakly the ``Comm`` of a reduction whose result is not in ``.grad`` yet; or None.
        merged: the ``options.merged.MergedBucket`` that reduces the bucket together with others in this
            backward; None if it is reduced alone.
        on_large: called with the index of each zero-copy gradient that arrives.
    """

    merged: Any = None
    on_large: Callable[[int], None] | None = None

    def __init__(self, bucket: GradientBucket, sums: type[Accumulation] = Accumulation) -> None:
        self._bucket: Any = weakref.ref(bucket)  # the bucket holds this: no cycle
        self.sums = sums(bucket)
        self._specs: dict[torch.dtype, list[DTensorSpec]] = {}
        self.forget()

    def forget(self) -> None:
        """Drops the gradients that have arrived in the backward under way."""
        self.arrived: set[int] = set()
        self.tp_partial: set[int] = set()
        self.input: ReduceInput | None = None
        self.in_flight: weakref.ref[Any] | None = None

    def carry_over(self, old: BucketGradients) -> None:
        """Takes over the sums of ``old``, the bucket's gradients before its buffers were rebuilt."""
        self.in_flight = old.in_flight
        self.sums.carry_over(old.sums)

    # -- arrival -----------------------------------------------------------------------------------

    def accept(self, index: int, grad: torch.Tensor, *, sync: bool) -> None:
        """Takes a gradient of parameter ``index``, of ``compute_shape``; a second one in the same backward is
        added. With ``sync`` it becomes an input of the reduce-scatter, without it is accumulated unsharded.
        """
        bucket = self._bucket()
        param = bucket.params[index]
        if not param.sharded.requires_grad:
            return  # it was frozen after the forward
        tp_partial = False
        if isinstance(grad, DTensor):
            grad, tp_partial = param.local_grad(grad, bucket.precision.reduce_dtype)
        if not sync:
            self.settle()
            self.sums.add(index, grad, tp_partial=tp_partial)
        else:
            given = self.input
            if given is None:
                given = self.input = self._new_input()
            first = index not in self.arrived
            if tp_partial or index in self.tp_partial:
                grad = self._as_tp_summand(index, grad, tp_partial=tp_partial, first=first)
            if not first:
                given.add(index, grad)
            elif given.zero_copy <= index and bucket.layout.small_grads[index]:
                given.kept[index] = grad
            else:
                given.take(index, grad)
        self.arrived.add(index)

    def _as_tp_summand(
        self, index: int, grad: torch.Tensor, *, tp_partial: bool, first: bool
    ) -> torch.Tensor:
        """Returns ``grad`` scaled for a parameter whose gradients are summed over tp; see ``SumOverTp``.

        A gradient that is not partial over tp is divided by the number of tp ranks, as each of them adds it.
        At the first partial one, the sum of the gradients that have arrived before is divided, too.
        ``first``: none has.
        """
        n = self._bucket().params[index].tp_size
        if index not in self.tp_partial:
            self.tp_partial.add(index)
            if not first:
                assert self.input is not None
                self.input.view(index).div_(n)
        return grad if tp_partial else grad / n

    def _new_input(self) -> ReduceInput:
        bucket = self._bucket()
        # Another tp rank may have a partial gradient where this one has none.
        if bucket.settings.reduce_unused:
            self.tp_partial.update(i for i, p in enumerate(bucket.params) if p.may_be_partial)
        return ReduceInput(bucket)

    # -- reduction ---------------------------------------------------------------------------------

    def has_work(self, *, sync: bool, all_reduce: bool) -> bool:
        """Returns whether a reduction is due as this backward ends; ``sync``: whether it reduces at all."""
        if not sync:
            return False
        unreduced = self.input is not None or self.sums.unsharded is not None
        return unreduced or (all_reduce and self.sums.scattered is not None)

    def to_reduce(self) -> set[int]:
        """Returns the indices of the parameters that have a gradient for the next reduction."""
        sums = self.sums.unsharded, self.sums.scattered
        return self.arrived.union(*(held.placed for held in sums if held is not None))

    def settle(self) -> None:
        """Completes the bucket's reduction that is in flight, if any, so that another one can begin."""
        if self.in_flight is not None:
            comm = self.in_flight()
            if comm is not None:
                comm.drain(self._bucket())
            self.in_flight = None

    def start(self, *, all_reduce: bool) -> Reduction:
        """Returns the ``Reduction`` of this backward's gradients and the accumulated sums. Without
        ``all_reduce`` it sums over shard only, and its result is accumulated."""
        bucket = self._bucket()
        inputs, used, earlier = self.collect(all_reduce=all_reduce)
        before, scale, final_scale = self.factors()
        job = Reduction(
            bucket,
            inputs.finish(before),
            used,
            scale,
            all_reduce or not bucket.over_replicate,
            earlier,
            frozenset(self.tp_partial),
            final_scale,
            lent=inputs.lent,
        )
        job.stages = stages_of(job, bucket.over_replicate, bucket.to_rest)
        self.forget()
        return job

    def collect(self, *, all_reduce: bool) -> tuple[ReduceInput, list[int], torch.Tensor | None]:
        """Returns what a reduction needs: the reduce-scatter's inputs with the unsharded sums added, the
        indices of the parameters with a gradient, and the sum of earlier reduce-scatters (or None)."""
        bucket, sums = self._bucket(), self.sums
        if self.in_flight is not None:
            self.settle()
        used = set() if self.input is None else set(self.arrived)
        inputs = self._new_input() if self.input is None else self.input
        if sums.unsharded is not None:
            used.update(sums.unsharded.take())
            self._add_to_input(inputs, sums.unsharded)
            sums.unsharded = None
        accumulated = None
        if sums.scattered is not None and all_reduce:
            used.update(sums.scattered.take())
            accumulated = sums.as_reduce_output(sums.scattered)
            sums.scattered = None
        if bucket.settings.reduce_unused:
            used.update(i for i, p in enumerate(bucket.precision.compute_params) if p.requires_grad)
        return inputs, sorted(used), accumulated

    def factors(self) -> tuple[float, float, float]:
        """Returns (divisor of the inputs, factor of the sum over shard, factor of that over replicate)."""
        bucket = self._bucket()
        if bucket.settings.reducer.averages:
            return 1.0, 1.0, 1.0
        before = divisor_before_sum(bucket.divisor, bucket.precision.reduce_dtype)
        after = before / bucket.divisor
        # In float16 the second division comes after the sum over replicate, too: it makes gradients small.
        divides_last = before != 1 and bucket.over_replicate
        return (before, 1.0, after) if divides_last else (before, after, 1.0)

    def _add_to_input(self, inputs: ReduceInput, held: AccumulatedGradients) -> None:
        """Adds ``held``, the unsharded accumulated sums, to ``inputs``, those of the reduce-scatter."""
        bucket = self._bucket()
        for index in self.tp_partial ^ held.tp_partial:  # only one of the two is partial over tp
            total = inputs.view(index) if index in held.tp_partial else held.views[index]
            total.div_(bucket.params[index].tp_size)
        self.tp_partial |= held.tp_partial
        for index, view in enumerate(held.views):
            inputs.add_by_rank(index, view.to(bucket.device))

    def finish(self, job: Reduction) -> None:
        """Adds the result to ``.grad``, or if its all-reduce is put off, to the accumulated sums."""
        if job.final:
            self.put(job.take(), job.used)
            return
        self.in_flight = None
        flat = job.tensor.to(self._bucket().precision.sum_dtype)
        if job.final_scale != 1.0:
            flat.mul_(job.final_scale)
        self.sums.add_scattered(flat, job.used)

    def put(self, flat: torch.Tensor, used: list[int]) -> None:
        """Adds ``flat``, (S,) reduced gradients, to ``.grad`` of the parameters with indices ``used``, then
        calls the user's post-accumulate hooks and the option's ``on_reduced``."""
        self.in_flight = None
        bucket = self._bucket()
        self._put(flat.to(bucket.precision.grad_dtype), used)
        params = bucket.versions.sharded
        if have_gradient_hooks(params):
            for index in used:
                for hook in gradient_hooks(params[index]):
                    hook(params[index])
        if bucket.settings.on_reduced is not None:
            bucket.settings.on_reduced(bucket, used)

    def _put(self, flat: torch.Tensor, used: list[int]) -> None:
        """Adds ``flat``, (S,) in ``grad_dtype``, to ``.grad`` of the parameters with indices ``used``."""
        bucket = self._bucket()
        params = bucket.versions.sharded
        with torch_function_off():  # DTensor's takes longer than all the rest
            present = [*map(_GRAD, params)]
        is_whole = len(used) == len(params)
        if is_whole and present[0] is not None:
            total = flat_gradient(present, bucket.layout.segment_sizes)
            if total is not None:
                total.add_(flat)  # one kernel for the bucket
                return
        views = bucket.local_parts(flat)
        grads = self._as_dtensors(flat, views)
        keep = bucket.precision.policy.keep_low_precision_grads
        # ``.grad`` may have been an accumulated sum of another dtype.
        may_differ = keep or bucket.precision.sum_dtype is not bucket.precision.grad_dtype
        if is_whole and not may_differ and all(map(is_, present, repeat(None))):
            with torch_function_off():
                deque(map(setattr, params, repeat("grad"), grads), maxlen=0)
            return
        for index in used:
            param, grad = params[index], present[index]
            if grad is not None:
                get_local_tensor(grad).add_(views[index])
            elif may_differ:
                set_grad(param, grads[index], lasting=keep)
            else:
                param.grad = grads[index]

    def _as_dtensors(self, flat: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns for each parameter a new DTensor to set as ``.grad``, on ``views``, its parts of ``flat``.
        They are new as the user may hold the last ones."""
        bucket, dtype = self._bucket(), flat.dtype
        if (specs := self._specs.get(dtype)) is None:
            same = dtype == bucket.dtype
            specs = [p.spec if same else p.reduced_spec(dtype) for p in bucket.params]
            self._specs[dtype] = specs
        # No Python code per gradient.
        grads: list[torch.Tensor]
        grads = [*map(_NEW_GRADIENT, bucket.layout.tensor_classes, views, specs)]
        places = zip(repeat(flat), count(), repeat(bucket.layout.segment_sizes), strict=False)
        deque(map(setattr, grads, repeat(PLACE), places), maxlen=0)
        return grads


class ReduceInput:
    """The inputs of a bucket's reduce-scatter, while the gradients of one backward arrive.

    Zero-copy gradients are sent from the memory that autograd returned, in the bucket's ``sent_dtype``. The
    others are packed into a buffer with one row per shard rank: small ones by one kernel at the end, others
    when they arrive, so that they are freed. A cast to a wider dtype is done at the end too, when the
    unsharded parameters are freed. Where gradients are added, the buffer is cast to the reduce dtype first.

    Attributes:
        bucket: returns the bucket (a weak reference).
        zero_copy: number of zero-copy gradients; they are the bucket's first ones.
        kept: index -> gradient of ``compute_shape``: the zero-copy ones, and those to be packed at the end.
        packed: the buffer, (num_shards * the sum of the other segments); None until a gradient is packed.
        views: for each other parameter its part of ``packed``, shaped as by ``Geometry.by_rank``.
        written: indices of the parameters whose gradient is in ``packed``.
        lent: buffers that ``bucket.settings.memory`` has lent, to be given back. casts: the one of them that
            holds casts of zero-copy gradients; None until it is needed.
    """

    def __init__(self, bucket: GradientBucket) -> None:
        self.bucket: Any = weakref.ref(bucket)  # whose gradients hold this: no cycle
        self.zero_copy: int = bucket.reduced_zero_copy
        self.kept: dict[int, torch.Tensor] = {}
        self.packed: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.written: set[int] = set()
        self.lent: list[torch.Tensor] = []
        self.casts: torch.Tensor | None = None

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Takes the first gradient of parameter ``index``: keeps a zero-copy one, packs another at once."""
        bucket = self.bucket()
        if index < self.zero_copy:
            if grad.dtype.itemsize > bucket.precision.reduce_dtype.itemsize:
                grad = self._cast(index, grad, bucket.precision.reduce_dtype)
            self.kept[index] = grad.contiguous()
            if bucket.grads.on_large is not None:
                bucket.grads.on_large(index)
        else:
            self._view(index, zero=False).copy_(bucket.params[index].geometry.grad_by_rank(grad))

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Adds ``grad``, a further gradient of parameter ``index``, to those taken, in the reduce dtype."""
        if index < self.zero_copy:
            self.kept[index] = self._sum(self.kept[index], grad)
        else:
            self.view(index).add_(self.bucket().params[index].geometry.grad_by_rank(grad))

    def _sum(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Returns a + b in the reduce dtype. It is a new tensor, as others may read the first gradient."""
        dtype = self.bucket().precision.reduce_dtype
        return torch.add(a.to(dtype), b).to(dtype)

    def add_by_rank(self, index: int, by_rank: torch.Tensor) -> None:
        """Adds ``by_rank``, an accumulated sum shaped as by ``Geometry.by_rank``, to parameter ``index``."""
        if index >= self.zero_copy:
            self.view(index).add_(by_rank)
            return
        grad = by_rank.reshape(self.bucket().params[index].geometry.region_shape)
        before = self.kept.get(index)
        self.kept[index] = grad if before is None else self._sum(before, grad)

    def view(self, index: int) -> torch.Tensor:
        """Returns parameter ``index``'s part of ``packed``, filled, in the reduce dtype, to add to."""
        bucket = self.bucket()
        dtype = bucket.precision.reduce_dtype
        if self.packed is None:
            self.packed = self._new_packed(dtype)
        elif self.packed.dtype is not dtype:
            self.packed, self.views = self.packed.to(dtype), []
        return self._filled(index)

    def _filled(self, index: int) -> torch.Tensor:
        """Returns parameter ``index``'s part of ``packed``, shaped as by ``Geometry.by_rank``, with its
        gradient: first copies it from ``kept``, or zeroes the part if no gradient has arrived."""
        grad = self.kept.pop(index, None)
        view = self._view(index, zero=grad is None)
        if grad is not None:
            view.copy_(self.bucket().params[index].geometry.grad_by_rank(grad))
        return view

    def _view(self, index: int, *, zero: bool) -> torch.Tensor:
        """Returns parameter ``index``'s part of ``packed``, for the caller to write, and notes it as written.
        ``zero``: it is filled with zeros, unless it was written before."""
        bucket, first = self.bucket(), self.zero_copy
        if self.packed is None:
            self.packed = self._new_packed()
        if not self.views:
            rows = self.packed.view(bucket.num_shards, -1)
            columns = rows.split(bucket.layout.segment_sizes[first:], dim=1)
            params = zip(bucket.params[first:], columns, strict=True)
            self.views = [param.geometry.segments_by_rank(column) for param, column in params]
        view = self.views[index - self.zero_copy]
        if index not in self.written:
            self.written.add(index)
            if zero:
                view.zero_()
        return view

    def finish(self, divisor: float) -> list[torch.Tensor]:
        """Returns the reduce-scatter's inputs, divided by ``divisor``, zeros for missing gradients:
        (num_shards * segment) for each zero-copy parameter, then ``packed`` if there are other parameters."""
        bucket, inputs = self.bucket(), []
        sent = bucket.sent_dtype
        for index in range(self.zero_copy):
            grad = self.kept.pop(index, None)
            if grad is None:
                size = bucket.num_shards * bucket.layout.segment_sizes[index]
                grad = torch.zeros(size, dtype=sent, device=bucket.device)
            if divisor != 1 and bucket.lends_inputs:
                inputs.append(self._own(index, grad).view(-1).div_(divisor))
                continue
            grad = self._cast(index, grad, sent).view(-1)
            inputs.append(grad if divisor == 1 else grad / divisor)
        if len(bucket.params) > self.zero_copy or not inputs:
            packed = self.pack().to(sent)
            inputs.append(packed if divisor == 1 else packed.div_(divisor))
        return inputs

    def _new_packed(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        bucket = self.bucket()
        if not bucket.lends_inputs:
            return bucket.reduce_input(self.zero_copy, dtype)
        return self._lend("packed", bucket.layout.segment_sizes[self.zero_copy :])

    def _cast(self, index: int, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``grad`` of zero-copy parameter ``index`` in ``dtype``, in lent memory if need be."""
        if grad.dtype is dtype or not self.bucket().lends_inputs:
            return grad.to(dtype)
        return self._own(index, grad)

    def _own(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Copies ``grad``, of zero-copy parameter ``index``, into its part of ``casts``, and returns that."""
        n, sizes = self.bucket().num_shards, self.bucket().layout.segment_sizes
        if self.casts is None:
            self.casts = self._lend("cast", sizes[: self.zero_copy])
        part = self.casts.narrow(0, n * sum(sizes[:index]), n * sizes[index])
        return part.view(grad.shape).copy_(grad)

    def _lend(self, kind: str, segments: list[int]) -> torch.Tensor:
        bucket = self.bucket()
        size, dtype = bucket.num_shards * sum(segments), bucket.precision.reduce_dtype
        lent = bucket.settings.memory.lend(kind, size, dtype, bucket.device)
        self.lent.append(lent)
        return lent

    def pack(self) -> torch.Tensor:
        """Returns ``packed`` with all gradients in it, and zeros for missing ones."""
        bucket, first = self.bucket(), self.zero_copy
        indices = range(first, len(bucket.params))
        if self.packed is not None and len(self.written) == len(indices) and not self.kept:
            return self.packed
        if self.packed is None and len(self.kept) == len(indices) and bucket.layout.packs_as_chunks:
            self.packed = self._new_packed()
            grads = [*map(self.kept.__getitem__, indices)]
            # A further gradient was added to one of them.
            if len({*map(_DTYPE, grads)}) > 1:
                grads = [grad.to(self.packed.dtype) for grad in grads]
            for index in bucket.layout.to_pad:  # none of these is zero-copy
                grads[index - first] = bucket.params[index].geometry.padded(grads[index - first])
            n = bucket.num_shards
            chunk_cat(grads, dim=0, num_chunks=n, out=self.packed.view(n, -1))
            self.kept.clear()
            self.written.update(indices)
            return self.packed
        for index in indices:
            self._filled(index)
        assert self.packed is not None
        return self.packed


def flat_gradient(
    grads: Sequence[torch.Tensor | None], segment_sizes: list[int], first: int = 0
) -> torch.Tensor | None:
    """Returns the buffer (S,) that all ``grads`` are views of, if they are as the engine has set them, so
    that one kernel can work on all of them. None if the user has set one of them to another tensor or None.

    Args:
        grads: ``.grad`` of consecutive parameters of a bucket.
        segment_sizes: elements of the segments of all the bucket's parameters.
        first: index of the first of these parameters in the bucket.
    """
    try:
        buffers, places, sizes = zip(*map(_place_of, grads), strict=True)
    except AttributeError:  # None, or a tensor of the user's
        return None
    # No Python code per gradient: it would take about as long as a norm or a step of small gradients.
    at_places = places == tuple(range(first, first + len(places)))
    if at_places and sizes[0] == segment_sizes and all(map(is_, buffers, repeat(buffers[0]))):
        return buffers[0]
    return None


def flat_gradients_of(grads: Sequence[torch.Tensor | None], segment_sizes: list[int]) -> list[Any]:
    """Returns a key for each gradient of a bucket: ``flat_gradient`` works for neighbours with equal keys.
    None for a missing gradient; a key of its own for one that the user has set."""
    keys: list[Any] = []
    for index, grad in enumerate(grads):
        buffer, place, sizes = getattr(grad, PLACE, (None, None, None))
        at_place = place == index and sizes == segment_sizes
        keys.append(None if grad is None else id(buffer) if at_place else object())
    return keys
