"""What a bucket consists of: how its parameters lie, its buffers in each dtype, gradients that accumulate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from parallel3d._torch.autograd import follows_grad_dtype, grads_may_differ_in_dtype, set_grad
from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, tensor_class
from parallel3d._torch.kernels import foreach_copy_, split_copy
from parallel3d.fsdp.api import MixedPrecisionPolicy, in_own_dtype
from parallel3d.fsdp.collectives import has_streams
from parallel3d.fsdp.layout import are_zero_copy
from parallel3d.fsdp.param import ShardedParam, segment_of, zero_copy_bytes

_NOTHING = torch.empty(0)  # buffers that are not made yet


@dataclass(frozen=True)
class BufferLayout:
    """How the parameters lie in a bucket's buffers.

    Attributes:
        zero_copy: how many parameters are zero-copy.
        segment_sizes: elements of each parameter's segment. numel: S, their sum.
        packed: P, see above. packs_as_chunks: whether one kernel can pack the other gradients.
        member_sizes: elements of a rank's shard in each input of the all-gather call.
        partial_start: where in S the parameters begin whose gradient is always partial over tp.
        small_grads: for each parameter, whether its gradient may wait to be packed with others.
        tensor_classes: for each parameter, the class of its gradient.
        templates: tensors on meta of the chunks' shapes, if no segment has padding; else None.
    """

    zero_copy: int
    segment_sizes: list[int]
    numel: int
    packed: int
    packs_as_chunks: bool
    member_sizes: list[int]
    partial_start: int
    small_grads: list[bool]
    tensor_classes: list[type]
    templates: list[torch.Tensor] | None

    @classmethod
    def of(
        cls, params: Sequence[ShardedParam], device_type: str, *, packs_all: bool
    ) -> BufferLayout:
        """Returns that of ``params``, which are in order; ``packs_all``: none may be zero-copy."""
        segments = [*map(segment_of, params)]
        least = params[0].dtype.itemsize, zero_copy_bytes(device_type)
        zero_copy = 0 if packs_all else sum(are_zero_copy(segments, *least))
        sizes = [p.geometry.padded_numel for p in params]
        packed = sum(sizes[zero_copy:])
        templates = None
        if all(p.geometry.even for p in params):
            templates = [torch.empty(p.geometry.chunk_shape, device="meta") for p in params]
        return cls(
            zero_copy,
            sizes,
            sum(sizes),
            packed,
            all(s.packs_as_chunks for s in segments[zero_copy:]),
            [*sizes[:zero_copy], packed] if packed or not zero_copy else sizes[:zero_copy],
            sum(p.geometry.padded_numel for p in params if p.layout.tp_grad != "partial"),
            [segment.is_small(*least) for segment in segments],
            [tensor_class(p.spec) for p in params],
            templates,
        )


@dataclass(eq=False)
class Precision:
    """The dtypes that a bucket computes and reduces in, and its buffers in them.

    Attributes:
        own: whether it computes in its parameters' own dtype; see ``options/precision``.
        policy: where the dtypes are from.
        sum_dtype: that of accumulated sums. grad_dtype: that of ``.grad``.
        has_own_unsharded: whether ``unsharded`` is not ``flat`` itself.
        gather_outputs: the tensors that the all-gather call writes.
        copy_gathered: copies ``gathered`` to ``unsharded``; see ``plan_copy``.
        compute_params: the unsharded parameters.
        post_forward: the ``PostForwardGroup`` that was made last; None: none was.
    """

    own: bool
    policy: MixedPrecisionPolicy
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    sum_dtype: torch.dtype
    grad_dtype: torch.dtype
    has_own_unsharded: bool = True
    unsharded: torch.Tensor = _NOTHING
    gathered: torch.Tensor = _NOTHING
    gather_outputs: list[torch.Tensor] = field(default_factory=list)
    copy_gathered: Callable[[], Any] | None = None
    compute_params: list[nn.Parameter] = field(default_factory=list)
    post_forward: Any = None

    @classmethod
    def of(
        cls, policy: MixedPrecisionPolicy, dtype: torch.dtype, given: Any, *, own: bool
    ) -> Precision:
        """Returns the dtypes for parameters of ``dtype``; ``given``: see ``ShardedParam.grad_dtype``."""
        if own:
            policy = in_own_dtype(policy, dtype)
        floating = dtype.is_floating_point
        compute = (policy.param_dtype if floating else None) or dtype
        reduced = dtype  # without a ``reduce_dtype``, as torch has it since 2.15
        if floating and policy.reduce_dtype is not None:
            reduced = policy.reduce_dtype
        elif isinstance(given, torch.dtype):
            reduced = given
        elif given == "any" or not follows_grad_dtype or policy.keep_low_precision_grads:
            reduced = compute  # as torch had it before
        # Accumulated sums that wait for their reduction must not lose what the reduction would keep.
        sums = torch.promote_types(dtype, reduced) if grads_may_differ_in_dtype else dtype
        grad = dtype
        if isinstance(given, torch.dtype):
            grad = given
        elif given == "any" or policy.keep_low_precision_grads:
            grad = reduced
        return cls(own, policy, compute, reduced, sums, grad)

    def with_dtypes_of(self, other: Precision) -> Self:
        """Returns these buffers with the dtypes of ``other``, which computes in the same one."""
        names = ("own", "policy", "reduce_dtype", "sum_dtype", "grad_dtype")
        return replace(self, **{name: getattr(other, name) for name in names})


def plan_copy(
    rows: torch.Tensor, buckets: Sequence[Any], since: Sequence[int]
) -> Callable[[], Any]:
    """Returns a function that copies what was gathered to the unsharded parameters.

    On an accelerator it is one kernel, if each parameter's part of a row lies in ``unsharded`` as it does in
    the row. (``_foreach_copy_`` would launch one for each parameter there: its own kernel wants pairs that
    are dense and of equal strides. On the CPU, which launches nothing, it takes less time.)

    Args:
        rows: (n, ...), a row from each shard rank: the segments of the parameters of each of ``buckets`` from
            its index in ``since`` on.
    """
    pairs = [*zip(buckets, since, strict=True)]
    params = [param for bucket, first in pairs for param in bucket.params[first:]]
    if has_streams(rows.device.type) and all(p.geometry.lies_as_sent for p in params):
        with torch.inference_mode(False), torch.no_grad():
            regions = [region for bucket, first in pairs for region in bucket._regions()[first:]]
            views = [region.view(rows.shape[0], -1) for region in regions if region.numel()]
        sizes = [param.geometry.padded_numel for param in params if param.geometry.padded_numel]
        return partial(split_copy, rows, sizes, dim=1, out=views)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    with torch.inference_mode(False), torch.no_grad():
        widths = [sum(bucket.layout.segment_sizes[first:]) for bucket, first in pairs]
        columns = rows.split(widths, dim=1)
    for (bucket, first), column in zip(pairs, columns, strict=True):
        unsharded, gathered = bucket.copy_pairs(column, since=first)
        targets += unsharded
        sources += gathered
    return partial(foreach_copy_, targets, sources)


class AccumulatedGradients:
    """Gradients of a bucket, accumulated in the sharded parameters' ``.grad``, waiting for a reduction.

    Attributes:
        flat: the buffer of the sums.
        views: for each parameter a view of it: shaped as by ``Geometry.by_rank`` if it is unsharded, of
            ``local_shape`` if it is reduce-scattered.
        grads: for each parameter the DTensor on the same memory that ``.grad`` is set to.
        placed: indices of the parameters whose ``.grad`` was set to it.
        with_reduced: those of them whose sum includes a reduced gradient.
        tp_partial: indices of the parameters whose sum is partial over tp, as autograd has brought it.
    """

    def __init__(self, flat: torch.Tensor, views: list[torch.Tensor], grads: list) -> None:
        self.flat = flat
        self.views = views
        self.grads = grads
        self.placed: set[int] = set()
        self.with_reduced: set[int] = set()
        self.tp_partial: set[int] = set()

    def make_tp_partial(self, index: int, param: ShardedParam) -> None:
        """Makes the sum of parameter ``index`` partial over tp: each tp rank keeps an equal share."""
        self.tp_partial.add(index)
        self.views[index].div_(param.tp_size)
        old = self.grads[index]
        spec = param.unreduced_spec(old.dtype, over_shard=True, tp_partial=True)
        self.grads[index] = make_dtensor(get_local_tensor(old), spec)
        if param.sharded.grad is old:
            set_grad(param.sharded, self.grads[index])

    def attach(self, index: int, param: torch.nn.Parameter) -> torch.Tensor | None:
        """Sets ``param.grad`` to the sum of parameter ``index``; returns another gradient that was there.

        A sum that is no longer in ``.grad`` was cleared by the user. It begins anew.
        """
        before = param.grad
        if before is self.grads[index]:
            return None
        if index in self.placed:
            self.reset(index)
        self.placed.add(index)
        set_grad(param, self.grads[index])
        return before

    def reset(self, index: int) -> None:
        """Sets the sum of parameter ``index`` to zero."""
        self.views[index].zero_()
        self.placed.discard(index)
        self.with_reduced.discard(index)

    def take(self, params: list[torch.nn.Parameter]) -> list[int]:
        """Sets ``.grad`` to None where it is the sum, and the sums that the user has cleared to zero. Returns
        the indices of the parameters whose ``.grad`` was the sum."""
        indices = []
        for index in list(self.placed):
            if params[index].grad is self.grads[index]:
                params[index].grad = None
                indices.append(index)
            else:
                self.reset(index)
        return indices

    def is_in_grad(self, indices: Iterable[int], params: list[torch.nn.Parameter]) -> bool:
        """Returns whether ``.grad`` of one of the parameters ``indices`` is still the sum."""
        return any(params[index].grad is self.grads[index] for index in indices)
