"""Context parallelism: what attention sends over ``cp``, and what a rank computes and keeps of it.

The parts of a sequence are balanced: each rank has one from its head and one from its tail, so that of causal
scores all ranks compute as many.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.heads import HeadShare, head_share, local_heads
from parallel3d.planner.model_spec import Attention, ModelSpec
from parallel3d.planner.workload import Workload

_MERGED = 10  # bytes an element: a step's bf16 result, the fp32 sum read and written


@dataclass(frozen=True)
class Exchange:
    """``count`` equal collectives over ``cp`` of one attention layer.

    Attributes:
        way: "forward" or "backward".
        operation: "all_to_all", "all_gather", "reduce_scatter" or "send".
        nbytes: of one: of the gathered tensor, or of what the rank has (``collective_time``).
        beside: whether attention computes beside them.
    """

    way: str
    operation: str
    nbytes: float
    count: int = 1
    beside: bool = False


@dataclass(frozen=True)
class Share:
    """What a rank computes of one attention layer.

    Attributes:
        heads: query, and key and value heads.
        part: of these heads' scores.
        length: tokens of the sequences that a kernel sees.
        steps: kernels, one after the other, whose results are merged.
    """

    heads: HeadShare
    part: float
    length: int
    steps: int = 1


def why_not_ulysses(attention: Attention, tp: int, cp: int) -> str | None:
    """Why all-to-alls can't share this layer's heads, in words; None if they can."""
    mine = local_heads(attention, tp).query
    return f"cp {cp} is more than the {mine} heads of a tp rank" if mine < cp else None


def chosen(model: ModelSpec, work: Workload, layout: MeshLayout, cluster: Cluster) -> str:
    """The kind of attention over ``cp`` the workload names; of "auto" the one that the library takes."""
    if work.cp_attention != "auto":
        return work.cp_attention
    every = [a for unit in model.units for a in unit.attention]
    fits = all(why_not_ulysses(a, layout.tp, layout.cp) is None for a in every)
    return "ulysses" if fits else "ring"


def share_of(attention: Attention, work: Workload, tp: int, cp: int) -> Share:
    """The share of the fullest rank."""
    mine = local_heads(attention, tp)
    if cp == 1:
        return Share(mine, 1.0, work.seq_len)
    if work.cp_attention == "ulysses":
        return Share(head_share(mine.query, mine.paired, cp), 1.0, work.seq_len)
    if work.cp_attention == "gather":
        return Share(mine, 1 / cp, work.seq_len)
    return Share(mine, 1 / cp, work.local_tokens(cp), cp)


def exchanges(
    attention: Attention, work: Workload, tp: int, cp: int, micro_batch: int
) -> tuple[Exchange, ...]:
    """The collectives over ``cp`` of one layer and micro-batch."""
    if cp == 1:
        return ()
    mine, share = local_heads(attention, tp), share_of(attention, work, tp, cp)
    tokens = micro_batch * work.local_tokens(cp)
    head = tokens * attention.head_dim * work.compute_itemsize  # of this rank's tokens
    if work.cp_attention == "ulysses":
        inputs = head * (mine.query + 2 * max(mine.paired, cp * share.heads.paired))
        output = head * mine.query
        return tuple(
            Exchange(way, "all_to_all", nbytes)
            for way in ("forward", "backward")
            for nbytes in (inputs, output)
        )
    pair = 2 * mine.paired * head
    if work.cp_attention == "gather":
        return (
            Exchange("forward", "all_gather", pair * cp),
            Exchange("backward", "reduce_scatter", pair * cp),
        )
    return (
        Exchange("forward", "send", pair, cp - 1, beside=True),
        # keys and values again, and their gradients in fp32
        Exchange("backward", "send", pair * (1 + 4 / work.compute_itemsize), cp - 1, beside=True),
        Exchange("backward", "send", pair * 4 / work.compute_itemsize),
    )


def kept_beyond(attention: Attention, work: Workload, tp: int, cp: int) -> float:
    """Elements for each of a rank's tokens that are kept beyond those kept without ``cp``."""
    if cp == 1 or work.cp_attention == "ring":
        return 0.0
    mine, share = local_heads(attention, tp), share_of(attention, work, tp, cp)
    if work.cp_attention == "gather":  # the whole sequence's keys and values
        return 2 * (cp - 1) * mine.paired * attention.head_dim
    # The result both as attention gives it and as it goes on; keys and values of heads that several share.
    repeated = max(cp * share.heads.paired - mine.paired, 0)
    return (mine.query + 2 * repeated) * attention.head_dim


def working_bytes(attention: Attention, work: Workload, tp: int, cp: int) -> float:
    """Bytes for each of a rank's tokens that one layer's attention holds for a moment in backward."""
    if cp == 1:
        return 0.0
    mine, itemsize, dim = local_heads(attention, tp), work.compute_itemsize, attention.head_dim
    if work.cp_attention == "ulysses":  # a sent and a received buffer
        return 2 * (mine.query + 2 * mine.paired) * dim * itemsize
    if work.cp_attention == "gather":  # gradients of the whole sequence's keys and values
        return 2 * cp * mine.paired * dim * itemsize
    # keys and values that come and go, their fp32 gradients likewise, an fp32 gradient of the queries
    return (2 * 2 * mine.paired * (itemsize + 4) + 4 * mine.query) * dim


def merged_bytes(attention: Attention, work: Workload, tp: int, cp: int) -> float:
    """Bytes for each of a rank's tokens that merging the results of a ring's steps moves."""
    share = share_of(attention, work, tp, cp)
    return (share.steps - 1) * share.heads.query * attention.head_dim * _MERGED
