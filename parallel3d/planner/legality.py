"""Why a layout can't be, or shouldn't be: rules of parallelize and of the hardware."""

from __future__ import annotations

from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.workload import Workload

__all__ = ["refusal"]


def refusal(model: ModelSpec, layout: MeshLayout, cluster: Cluster, work: Workload) -> str | None:
    """The first rule that ``layout`` breaks, in words; None if it may be used.

    ``parallelize`` cuts sizes that tp doesn't divide: hidden features and vocabularies as ``torch.chunk``
    does, attention between heads, with key and value heads that several ranks need on each of them. So no
    size is a reason here but those that a plan says it can't cut (``divisible``), and where tp gains
    nothing: with fewer heads than ranks each rank computes all attention.
    """
    tp = layout.tp
    if work.sharding != "fsdp" and layout.shard > 1:
        return f"{work.sharding} shards nothing over shard, which is {layout.shard}; it must be 1"
    if tp == 1:
        return None
    if tp > cluster.domain:
        return (
            f"tp {tp} is more than the {cluster.domain} GPUs that fast links join: every layer would wait "
            "for the network between nodes"
        )
    if cluster.domain % tp:
        return (
            f"tp {tp} doesn't divide the {cluster.domain} GPUs that fast links join: groups would cross "
            "nodes"
        )
    if not model.tp_ready:
        return f"tp {tp} needs a plan, and none could be derived for {model.name}"
    if model.heads and model.heads < tp:
        return f"tp {tp} and {model.heads} attention heads: every rank would compute all attention"
    for name, size in model.divisible.items():
        if size % tp:
            return f"tp {tp} doesn't divide {name}, {size}, which its plan can't share otherwise"
    return None
