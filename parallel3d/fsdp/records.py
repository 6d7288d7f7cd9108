"""What a bucket consists of: how its parameters lie, and its buffers in each dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from parallel3d._torch.autograd import follows_grad_dtype, grads_may_differ_in_dtype
from parallel3d._torch.dtensor import tensor_class
from parallel3d._torch.kernels import foreach_copy_, split_copy
from parallel3d.fsdp.api import MixedPrecisionPolicy, in_own_dtype
from parallel3d.fsdp.collectives import has_streams
from parallel3d.fsdp.layout import are_zero_copy
from parallel3d.fsdp.param import ShardedParam, segment_of, zero_copy_bytes

_NOTHING = torch.empty(0)  # buffers that are not made yet


@dataclass(frozen=True)
class BufferLayout:
    """Where each parameter of a bucket lies in the bucket's buffers."""

    zero_copy: int  # how many parameters are zero-copy
    segment_sizes: list[int]  # elements of each parameter's segment
    numel: int  # S, their sum
    packed: int  # P, see ``bucket``
    packs_as_chunks: bool  # whether one kernel can pack the other gradients
    to_pad: list[int]  # indices of the parameters whose gradient is padded before that
    member_sizes: list[int]  # elements of a rank's shard in each input of the all-gather call
    partial_start: int  # where in S the parameters begin whose gradient is always partial over tp
    small_grads: list[bool]  # whether a parameter's gradient may wait to be packed with others
    tensor_classes: list[type]  # of the parameters' gradients
    templates: list[torch.Tensor] | None  # on meta, of the chunks' shapes; None: some have padding

    @classmethod
    def of(
        cls, params: Sequence[ShardedParam], device_type: str, *, packs_all: bool
    ) -> BufferLayout:
        """Returns the layout of ``params``, in the bucket's order; ``packs_all``: none is to be zero-copy."""
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
            [i for i, p in enumerate(params) if p.geometry.multiple > 1 and not p.geometry.even],
            [*sizes[:zero_copy], packed] if packed or not zero_copy else sizes[:zero_copy],
            sum(p.geometry.padded_numel for p in params if p.layout.tp_grad != "partial"),
            [segment.is_small(*least) for segment in segments],
            [tensor_class(p.spec) for p in params],
            templates,
        )


@dataclass(eq=False)
class Precision:
    """The dtypes that a bucket computes and reduces in, and its buffers in these dtypes."""

    own: bool  # whether it computes in its parameters' own dtype; see ``options/precision``
    policy: MixedPrecisionPolicy  # where the dtypes are from
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    sum_dtype: torch.dtype  # of accumulated sums
    grad_dtype: torch.dtype  # of ``.grad``
    wire_dtype: torch.dtype | None = (
        None  # in which gradients are sent; None: the backend sums them
    )
    has_own_unsharded: bool = True  # whether ``unsharded`` is not ``flat`` itself
    unsharded: torch.Tensor = _NOTHING
    gathered: torch.Tensor = _NOTHING
    gather_outputs: list[torch.Tensor] = field(default_factory=list)  # what the all-gather writes
    copy_gathered: Callable[[], Any] | None = None  # to ``unsharded``; see ``plan_copy``
    compute_params: list[nn.Parameter] = field(default_factory=list)  # the unsharded parameters
    post_forward: Any = None  # the ``PostForwardGroup`` that was made last, if one was

    @classmethod
    def of(
        cls, policy: MixedPrecisionPolicy, dtype: torch.dtype, given: Any, *, own: bool
    ) -> Precision:
        """Returns the dtypes for parameters of ``dtype`` under ``policy``; ``own``: those of parameters that
        keep their dtype. ``given``: see ``ShardedParam.grad_dtype``."""
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
        wire = policy.wire_dtype if floating else None
        return cls(own, policy, compute, reduced, sums, grad, wire)

    def with_dtypes_of(self, other: Precision) -> Self:
        """Returns a copy with these buffers and the dtypes of ``other``, which computes in the same one."""
        names = ("own", "policy", "reduce_dtype", "sum_dtype", "grad_dtype", "wire_dtype")
        return replace(self, **{name: getattr(other, name) for name in names})


def plan_copy(
    rows: torch.Tensor, buckets: Sequence[Any], since: Sequence[int]
) -> Callable[[], Any]:
    """Returns a function that copies ``rows``, an all-gather's output, to the unsharded parameters.

    On an accelerator the function launches one kernel, if no parameter's rows must be rearranged
    (``_foreach_copy_`` would launch one per parameter: its own kernel needs pairs that are dense and of equal
    strides). Otherwise, and on the CPU, it is ``_foreach_copy_``.

    Args:
        rows: (n, elements): row i has shard rank i's segments of the parameters of each of ``buckets``, from
            the index in ``since`` on.
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
