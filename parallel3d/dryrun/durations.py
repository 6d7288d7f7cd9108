"""Predicted seconds of what a dry run has seen: kernels on one GPU, collectives between them."""

from __future__ import annotations

from collections import Counter

from parallel3d._recorder import Collective
from parallel3d.dryrun.result import DryRun, Operation
from parallel3d.planner.cluster import Cluster, Gpu
from parallel3d.planner.kernels import attention_rate, best_attention, gemm_time, memory_rate
from parallel3d.planner.network import AxisLink, collective_time

__all__ = ["cluster_of", "collective_seconds", "kernel_seconds", "latency_of", "link_of"]

_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_USUAL_SEQUENCE, _USUAL_HEAD = 4096, 128  # of an attention that does not say


def cluster_of(run: DryRun, gpu: str = "h100-80gb-sxm") -> Cluster:
    """As many nodes of ``gpu`` as the run's world fills.

    Raises:
        PlanningError: there is no such GPU.
    """
    each = max(run.gpus_per_node, 1)
    return Cluster.of(gpu, nodes=-(-run.world_size // each), gpus_per_node=each)


def kernel_seconds(operation: Operation, gpu: Gpu) -> float:
    """Of a matmul, an attention or anything else that computes, by the planner's model of kernels.

    A matmul whose sizes aren't known takes as long as a square one of as many FLOPs. An attention is taken to
    be fused, its ``flops`` those that are computed (half, where it is causal). Everything else takes as long
    as its bytes at a stream kernel's rate.
    """
    itemsize = _ITEMSIZES.get(operation.dtype, 1 if operation.dtype.startswith("float8") else 4)
    if operation.kind == "matmul" and (operation.sizes or operation.flops):
        side = round((operation.flops / 2) ** (1 / 3)) or 1
        m, n, k = operation.sizes or (side, side, side)
        return gemm_time(m, n, k, gpu, itemsize)
    moved = operation.moved / memory_rate(gpu)
    if operation.kind == "attention":
        _, seq, head = operation.sizes or (0, _USUAL_SEQUENCE, _USUAL_HEAD)
        rate = attention_rate(gpu, best_attention(gpu), max(seq, 1), head, itemsize)
        return max(operation.flops / rate, moved)
    return moved


def link_of(run: DryRun, call: Collective, cluster: Cluster) -> AxisLink:
    """How the ranks of the call's group lie on nodes.

    Those of a group that isn't a mesh axis's are not known: they are taken to be neighbours, the most
    favourable case.
    """
    near = cluster.domain
    ranks = run.axis_ranks.get(call.axis or "", ())
    if len(ranks) != call.group_size:
        return AxisLink(call.group_size, min(call.group_size, near))
    return AxisLink(len(ranks), min(Counter(rank // near for rank in ranks).values()))


def collective_seconds(call: Collective, link: AxisLink, cluster: Cluster) -> float:
    """Seconds from when all ranks have come, by the planner's model of the network.

    It knows all_gather, reduce_scatter and all_reduce. The others by how many bytes they bring over the
    slowest link (n ranks, S bytes, p ranks on a node):

    - broadcast, scatter, gather: as an all-gather of S; reduce: as a reduce-scatter of S. Of a scatter or
      gather a rank other than the root knows only its own part: there it is too little.
    - all_to_all: S (n - 1) / n within a node, as an all-gather; between nodes each rank's own NIC brings
      S (n - p) / n, p times as much as an all-gather's.
    - send, recv: S over one link, between nodes where the group has several.
    - barrier: an all-reduce of one number. Any other: as an all-reduce of S.
    """
    op, size = call.op, float(call.bytes)
    if op in ("all_gather", "reduce_scatter", "all_reduce"):
        return collective_time(op, size, link, cluster)
    if op in ("broadcast", "scatter", "gather", "reduce"):
        kind = "reduce_scatter" if op == "reduce" else "all_gather"
        return collective_time(kind, size, link, cluster)
    if op == "all_to_all":
        if link.nodes > 1:
            size *= link.per_node * (link.size - link.per_node) / (link.size - 1)
        return collective_time("all_gather", size, link, cluster)
    if op in ("send", "recv"):
        pair = AxisLink(2, 1 if link.nodes > 1 else 2)
        return collective_time("all_gather", 2 * size, pair, cluster)
    return collective_time("all_reduce", 8.0 if op == "barrier" else size, link, cluster)


def latency_of(call: Collective, link: AxisLink, cluster: Cluster) -> float:
    """What the same collective takes with next to nothing in it."""
    if call.op == "barrier" or not call.bytes:
        return collective_seconds(call, link, cluster)
    small = Collective(call.order, call.op, call.axis, call.unit, 8, call.group_size, True)
    return min(collective_seconds(small, link, cluster), collective_seconds(call, link, cluster))
