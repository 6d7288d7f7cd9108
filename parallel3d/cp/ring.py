"""Ring attention: K and V travel round the ranks while each computes its queries with what it has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel3d._torch.simulated import call_by_rank
from parallel3d.cp.axis import CpAxis
from parallel3d.cp.collectives import Rotation, rotate
from parallel3d.cp.local import sinks_gradient, with_sinks
from parallel3d.cp.partial import Partial, add_blocks, add_gradients, start, wide
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
        out, lse = call_by_rank(_start, q, v)
        pair, kept = call_by_rank(_pack, k, v), []
        for step in range(axis.size):
            message = rotate(pair, axis) if step + 1 < axis.size else None
            kept.append(
                call_by_rank(_add, axis.rank, step, how, q, pair, out, lse, *masks, random=random)
            )
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
        delta, dq, dsinks = call_by_rank(_start_backward, grad, q, out, lse, sinks)
        pair = call_by_rank(_pack, k, v)
        gradients: Rotation | None = None
        for step in range(axis.size):
            message = rotate(pair, axis) if step + 1 < axis.size else None
            state = grad, q, pair, out, lse, delta, dq
            mine = kept[step] if kept else None
            own = call_by_rank(_add_gradients, axis.rank, step, how, state, mine, *masks)
            arrived = None if gradients is None else gradients.wait()
            # What the ranks before this one have added to these keys' gradients comes after the keys.
            gradients = rotate(call_by_rank(_sum, own, arrived, pair), axis)
            pair = pair if message is None else message.wait()
        assert gradients is not None
        dk, dv = call_by_rank(_unpack, gradients.wait(), k.shape, v.shape)
        return call_by_rank(Tensor.to, dq, q.dtype), dk, dv, dsinks, None, None, None


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(
    pair: Tensor, k_shape: tuple[int, ...], v_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    k, v = pair.split([math.prod(k_shape), math.prod(v_shape)])
    return k.view(k_shape), v.view(v_shape)


def _start(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    partial = start(q, v)
    return partial.out, partial.lse


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
    out: Tensor,
    lse: Tensor,
    *masks: Tensor | None,
) -> Tensor | None:
    """Adds a step to ``out`` and ``lse``, in place; returns what dropout has kept."""
    rules, _, _, k_shape, v_shape = how
    partial = Partial(out, lse, [])
    k, v = _unpack(pair, k_shape, v_shape)
    add_blocks(partial, q, k, v, rules.of(*masks), *_parts(how, rank, step))
    return partial.kept_by(rules)


def _start_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    delta = (grad * out).sum(-1, dtype=lse.dtype)
    dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
    return delta, dq, None if sinks is None else sinks_gradient(sinks, lse, delta)


def _add_gradients(
    rank: int,
    step: int,
    how: Any,
    state: tuple[Tensor, ...],
    kept: Tensor | None,
    *masks: Tensor | None,
) -> Tensor:
    """Adds a step to ``dq``, in place; returns the gradients of the step's K and V, flat."""
    grad, q, pair, out, lse, delta, dq = state
    rules, _, _, k_shape, v_shape = how
    k, v = _unpack(pair, k_shape, v_shape)
    own = torch.zeros(pair.shape, dtype=wide(pair.dtype), device=pair.device)
    grads = dq, *_unpack(own, k_shape, v_shape)
    places = _parts(how, rank, step)
    add_gradients(grads, grad, q, k, v, (out, lse, delta), kept, rules.of(*masks), *places)
    return own


def _sum(own: Tensor, arrived: Tensor | None, pair: Tensor) -> Tensor:
    return (own if arrived is None else own.add_(arrived)).to(pair.dtype)


def _parts(how: Any, rank: int, step: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Where the rank's queries lie, and the keys that it has in a step."""
    _, sequence, size, _, _ = how
    return sequence.parts(rank), sequence.parts((rank - step) % size)
