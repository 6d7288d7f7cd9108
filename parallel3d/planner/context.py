"""Context parallelism (cp): what attention communicates, and what a rank computes and keeps.

Bytes, heads and the choice of the kind for "auto" come from ``parallel3d.cp``. Sequences are divided evenly:
a rank has one chunk from the front and one from the back, so that all ranks compute equally many scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from parallel3d.cp.choose import bytes_per_layer, choose, share_heads
from parallel3d.planner.model_spec import AttentionSpec, HeadShare, ModelSpec, local_heads
from parallel3d.planner.workload import Local

# Bytes that results of attention move for each element, in all and for each partial result (cp/blocks.py).
# Forward: zeros in fp32, casts of the first result and of all; each further one is cast and added (lerp).
# Backward: its product with the gradient, zeros and a cast; a part of the gradient of the queries is added.
_JOINED, _ADDED = (-2, 18), (18, 10)
# How often a rank's packing and unpacking move the bytes of a collective; of an all-gather also its own part.
_COPIES = {"all_to_all": 4, "reduce_scatter": 3, "send": 0}


@dataclass(frozen=True)
class Exchange:
    """``count`` equal collectives over ``cp`` or ``ep``, of one layer for one micro-batch.

    Attributes:
        way: "forward" or "backward", the pass in which they run.
        name: what is sent (over ``ep``: "rows", "weights" ...); over ``cp`` the same as ``operation``.
        operation: "all_to_all", "all_gather" or "reduce_scatter", which are waited for, or "send", beside
            which attention computes.
        nbytes: bytes of one collective, as ``collective_time`` takes them: of the gathered tensor, or of one
            rank's tensor (on the rank with most).
        copied: bytes that packing and unpacking for one collective read and write.
    """

    way: str
    name: str
    nbytes: float
    copied: float = 0.0
    operation: str = "all_to_all"
    count: int = 1


@dataclass(frozen=True)
class AttentionShare:
    """What one rank computes of one attention layer.

    Attributes:
        heads: its numbers of query heads and of key and value heads.
        part: fraction of these heads' scores that it computes.
        length: length of the sequences that the attention kernel is called with.
        joins: how many partial results, each over a part of the keys, are merged for one query.
    """

    heads: HeadShare
    part: float
    length: int
    joins: float = 0.0


class Kept(NamedTuple):
    """Numbers of elements that one attention layer stores for each token of a rank.

    Attributes:
        beyond: elements kept for backward beyond those that are kept without ``cp``.
        received: elements of the results of the collectives over ``cp``.
    """

    beyond: float
    received: float


def _numbers(attention: AttentionSpec, local: Local) -> dict[str, Any]:
    """Returns the keyword arguments that ``bytes_per_layer`` and ``choose`` of ``parallel3d.cp`` take."""
    mine, work = local_heads(attention, local.tp), local.work
    return {
        "size": local.cp,
        "batch": local.micro_batch,
        "length": work.local_tokens(local.cp) * local.cp,
        "heads": mine.query,
        "kv_heads": mine.paired if mine.query % mine.paired == 0 else mine.query,
        "channels": attention.head_dim,
        "itemsize": work.compute_itemsize,
    }


def why_not_ulysses(attention: AttentionSpec, tp: int, cp: int) -> str | None:
    """Returns why "ulysses" can't divide this layer's heads over ``cp``, as text; None if it can."""
    mine = local_heads(attention, tp).query
    return f"cp {cp} is more than the {mine} heads of a tp rank" if mine < cp else None


def chosen(model: ModelSpec, local: Local) -> str:
    """Returns the kind of attention over ``cp``: the workload's; if that is "auto", the stack's; if that is
    "auto" too, what ``parallel3d.cp`` chooses for the model's most frequent attention layer."""
    every = [(u.count, a) for u in model.units for a in u.attention]
    named = local.work.cp_attention
    named = local.work.profile.cp_attention if named == "auto" else named
    if named != "auto" or not every:
        return named
    _, attention = max(every, key=lambda each: each[0])
    return choose(causal=attention.causal, **_numbers(attention, local)).kind


def share_of(attention: AttentionSpec, local: Local) -> AttentionShare:
    """Returns what the rank with most heads computes of this attention layer."""
    mine, work, cp = local_heads(attention, local.tp), local.work, local.cp
    if cp == 1:
        return AttentionShare(mine, 1.0, work.seq_len)
    if work.cp_attention == "ulysses":
        numbers = _numbers(attention, local)
        shares = share_heads(numbers["heads"], numbers["kv_heads"], cp)
        kv = max(share.kv_number for share in shares)
        return AttentionShare(HeadShare(max(s.number for s in shares), kv, kv), 1.0, work.seq_len)
    # A causal mask leaves a query the keys before its own part, and some of its part.
    diagonal = 2.0 if attention.causal else 1.0
    if work.cp_attention == "gather":
        rows = int(work.local_tokens(cp) / diagonal)
        return AttentionShare(mine, 1 / cp, rows, diagonal)
    return AttentionShare(mine, 1 / cp, work.local_tokens(cp), cp - 1 + diagonal)


def exchanges(attention: AttentionSpec, local: Local) -> tuple[Exchange, ...]:
    """Returns the collectives over ``cp`` of one attention layer for one micro-batch."""
    if (cp := local.cp) == 1:
        return ()
    kind: Any = local.work.cp_attention
    traffic = bytes_per_layer(kind, **_numbers(attention, local))
    calls = {
        "ulysses": (("all_to_all", 2), ("all_to_all", 2)),
        "gather": (("all_gather", 1), ("reduce_scatter", 1)),
        "ring": (("send", cp - 1), ("send", 2 * cp - 1)),
    }[kind]
    copies = _COPIES | {"all_gather": 2 + 2 / cp}
    return tuple(
        Exchange(way, name, nbytes / count, copies[name] * (nbytes / count), name, count)
        for way, (name, count), nbytes in zip(
            ("forward", "backward"), calls, traffic[:2], strict=True
        )
    )


def kept(attention: AttentionSpec, local: Local) -> Kept:
    """Returns the elements that one attention layer saves for backward because of ``cp``, beyond those
    without it, for each token of a rank. ``local``: the workload on one GPU of its layout."""
    if (cp := local.cp) == 1:
        return Kept(0.0, 0.0)
    mine, dim = local_heads(attention, local.tp), attention.head_dim
    if local.work.cp_attention == "ulysses":
        pairs = max(cp * share_of(attention, local).heads.paired, mine.paired)
        # The result both as attention gives it and as it goes on; keys and values that several ranks need.
        beyond = mine.query + 2 * (pairs - mine.paired)
        return Kept(beyond * dim, (2 * mine.query + 2 * pairs) * dim)
    others = 2 * (cp - 1) * mine.paired * dim  # keys and values of the other ranks
    if local.work.cp_attention == "gather":
        return Kept(others, others + 2 * mine.paired * dim)
    return Kept(0.0, others)


def working_bytes(attention: AttentionSpec, local: Local) -> float:
    """Returns the bytes of attention's temporary buffers in backward, for each of a rank's tokens."""
    work, cp = local.work, local.cp
    if cp == 1:
        return 0.0
    mine, itemsize, dim = (
        local_heads(attention, local.tp),
        work.compute_itemsize,
        attention.head_dim,
    )
    pair = 2 * mine.paired * dim
    if work.cp_attention == "ulysses":  # a sent and a received buffer
        return 2 * (mine.query * dim + pair) * itemsize
    queries = 4 * mine.query * dim  # their gradient in fp32
    if work.cp_attention == "gather":
        # Gradients of all keys and values, in fp32 and as they are reduced.
        return queries + cp * pair * (4 + itemsize)
    # An fp32 gradient; what comes and goes, and its gradients.
    return queries + pair * (4 + 4 * itemsize)


def joined_bytes(attention: AttentionSpec, local: Local) -> tuple[float, float]:
    """Returns (forward, backward) bytes that merging partial results moves, for each of a rank's tokens."""
    share, cp = share_of(attention, local), local.cp
    if not share.joins:
        return 0.0, 0.0
    elements = share.heads.query * attention.head_dim
    forward, backward = (all_ + share.joins * each for all_, each in (_JOINED, _ADDED))
    # Of gathered keys and values zeros and a cast too; some keys are of more than one part.
    pairs = 2 * cp * share.heads.paired * attention.head_dim * (local.work.cp_attention == "gather")
    return elements * forward, elements * backward + pairs * (20 + 5 * share.joins / 2 / cp)
