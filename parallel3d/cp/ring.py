"""Ring attention: K and V travel round the ranks while each computes its queries with what it has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel3d._torch.simulated import call_by_rank
from parallel3d.cp.autocast import autocast_off
from parallel3d.cp.axis import CpAxis
from parallel3d.cp.collectives import Rotation, rotate
from parallel3d.cp.local import sinks_gradient, with_sinks
from parallel3d.cp.partial import Partial, add_blocks, gradients, wide
from parallel3d.cp.rules import Rules
from parallel3d.cp.sequence import Part, Sequence


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rules: Rules,
    sequence: Sequence,
    axis: CpAxis,
) -> Tensor:
    """Returns this rank's positions of the attention; arguments as ``attention`` has them.

    In step s a rank computes its queries with K and V of the rank s before it, while the next ones are on
    their way. Backward sends K and V round again, and their gradients after them. Blocks of which a causal
    mask leaves nothing are not computed.
    """
    return _Ring.apply(q, k, v, sinks, rules, sequence, axis)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rules: Rules,
        sequence: Sequence,
        axis: CpAxis,
    ) -> Tensor:
        ctx.how = how = rules, sequence, axis.size, k.shape, v.shape
        ctx.axis = axis
        masks, random = rules.tensors(), bool(rules.dropout)
        pair = call_by_rank(_pack, k, v)
        out = lse = None
        kept = []
        for step in range(axis.size):
            message = rotate(pair, axis) if step + 1 < axis.size else None
            state = q, pair, out, lse
            out, lse, keep = call_by_rank(_add, axis.rank, step, how, *state, *masks, random=random)
            kept.append(keep)
            pair = pair if message is None else message.wait()
        out, lse = call_by_rank(_finish, q, out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *(kept if random else ()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, *kept = ctx.saved_tensors
        axis, how = ctx.axis, ctx.how
        masks = how[0].tensors()
        with autocast_off(q):
            delta, dsinks = call_by_rank(_start_backward, grad, out, lse, sinks)
            pair, dq = call_by_rank(_pack, k, v), None
            of_pair: Rotation | None = None
            for step in range(axis.size):
                message = rotate(pair, axis) if step + 1 < axis.size else None
                state = grad, q, pair, out, lse, delta, dq
                keep = kept[step] if kept else None
                dq, own = call_by_rank(_add_gradients, axis.rank, step, how, state, keep, *masks)
                arrived = None if of_pair is None else of_pair.wait()
                # What the ranks before this one have added to these keys' gradients comes after the keys.
                of_pair = rotate(call_by_rank(_sum, own, arrived, pair), axis)
                pair = pair if message is None else message.wait()
        assert of_pair is not None
        dk, dv = call_by_rank(_unpack, of_pair.wait(), k.shape, v.shape)
        return call_by_rank(Tensor.to, dq, q.dtype), dk, dv, dsinks, None, None, None


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(
    pair: Tensor, k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    k, v = pair.split([math.prod(k_shape), math.prod(v_shape)])
    return k.view(k_shape), v.view(v_shape)


def _finish(q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    partial = Partial(out, lse, [])
    with_sinks(partial, sinks)
    return partial.out.to(q.dtype), partial.lse


def _add(
    rank: int,
    step: int,
    how: Any,
    q: Tensor,
    pair: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    *masks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the result and log-sum-exp with a step added to them, and what dropout has kept."""
    rules, _, _, k_shape, v_shape = how
    k, v = _unpack(pair, k_shape, v_shape)
    before = None if out is None or lse is None else Partial(out, lse, [])
    partial = add_blocks(before, q, k, v, rules.of(*masks), *_parts(how, rank, step))
    return partial.out, partial.lse, partial.kept_by(rules)


def _start_backward(
    grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    delta = (grad * out).sum(-1, dtype=lse.dtype)
    return delta, None if sinks is None else sinks_gradient(sinks, lse, delta)


def _add_gradients(
    rank: int,
    step: int,
    how: Any,
    state: tuple[Any, ...],
    kept: Tensor | None,
    *masks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns ``dq`` with a step added to it, and the gradients of the step's K and V, flat."""
    grad, q, pair, out, lse, delta, dq = state
    rules, _, _, k_shape, v_shape = how
    k, v = _unpack(pair, k_shape, v_shape)
    places = _parts(how, rank, step)
    own, dk, dv = gradients(grad, q, k, v, (out, lse, delta), kept, rules.of(*masks), *places)
    dq = own.to(wide(q.dtype)) if dq is None else dq.add_(own)
    return dq, _pack(dk, dv)


def _sum(own: Tensor, arrived: Tensor | None, pair: Tensor) -> Tensor:
    return (own if arrived is None else own.add_(arrived)).to(pair.dtype)


def _parts(how: Any, rank: int, step: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Where the rank's queries lie, and the keys that it has in a step."""
    _, sequence, size, _, _ = how
    return sequence.parts(rank), sequence.parts((rank - step) % size)
