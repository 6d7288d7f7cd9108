"""What a bucket consists of: how its parameters lie, and its buffers in the dtypes that it computes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from parallel3d._torch.autograd import follows_grad_dtype, grads_may_differ_in_dtype
from parallel3d._torch.dtensor import tensor_class
from parallel3d.fsdp.api import MixedPrecisionPolicy, in_own_dtype
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
