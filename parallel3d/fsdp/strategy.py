"""FSDP1's ``ShardingStrategy``, said as a mesh and a reshard policy."""

import os
from typing import Any

from torch.distributed import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from parallel3d.errors import MeshError, Parallel3dError
from parallel3d.fsdp.placement import checked_mesh, data_axes
from parallel3d.mesh.layout import MeshLayout

__all__ = ["ShardingStrategy", "strategy_layout", "strategy_options"]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_FREES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
_RANKS_PER_NODE = "LOCAL_WORLD_SIZE"  # as torchrun sets it


def strategy_layout(
    strategy: ShardingStrategy, world_size: int, *, tp: int = 1, shard: int | None = None
) -> MeshLayout:
    """The mesh on which ``strategy`` shards over ``world_size`` ranks.

    Args:
        strategy: FULL_SHARD and SHARD_GRAD_OP shard over all data ranks, NO_SHARD replicates over them,
            HYBRID_SHARD and _HYBRID_SHARD_ZERO2 shard within a node and replicate over nodes.
        world_size: number of ranks of the job.
        tp: ranks of a tensor-parallel group, which a node holds whole.
        shard: of the hybrid ones, ranks that share a copy of the model; by default the ranks of a node
            (``LOCAL_WORLD_SIZE``, which torchrun sets) divided by ``tp``.

    Returns:
        A resolved layout.

    Raises:
        Parallel3dError: no ``ShardingStrategy``, or ``shard`` with one that is not hybrid.
        MeshError: sizes that do not divide, or a hybrid with one copy, or with copies that are not sharded.
    """
    _check_strategy(strategy)
    if strategy not in _HYBRID:
        if shard is not None:
            raise Parallel3dError(
                f"shard is {shard!r}, but {strategy.name} says itself over how many ranks it shards; leave "
                "it out, or use HYBRID_SHARD"
            )
        whole = strategy is ShardingStrategy.NO_SHARD
        sizes = {"replicate": -1, "shard": 1} if whole else {"replicate": 1, "shard": -1}
        return MeshLayout(**sizes, tp=tp).resolve(world_size)
    layout = MeshLayout(
        replicate=-1, shard=_of_a_node(tp) if shard is None else shard, tp=tp
    ).resolve(world_size)
    _check_hybrid(strategy, layout.replicate, layout.shard, str(layout))
    return layout


def strategy_options(strategy: ShardingStrategy, mesh: DeviceMesh) -> dict[str, Any]:
    """What ``fully_shard`` (or ``parallelize``) is given to do as ``strategy`` does on ``mesh``.

    FSDP1 does not free its outermost unit after forward: leave ``reshard_after_forward`` out there.

    Args:
        mesh: with axes replicate and shard (one that is missing has size 1), and maybe tp.

    Returns:
        ``{"mesh": mesh, "reshard_after_forward": bool}``.

    Raises:
        Parallel3dError: no ``ShardingStrategy``.
        MeshError: the mesh does what another strategy says.
    """
    _check_strategy(strategy)
    axes = data_axes(checked_mesh(mesh))
    replicate, shard = axes.size(axes.replicate), axes.size(axes.shard)
    shown = f"replicate {replicate} x shard {shard}"
    if strategy in _HYBRID:
        _check_hybrid(strategy, replicate, shard, shown)
    elif strategy is ShardingStrategy.NO_SHARD and shard > 1:
        raise MeshError(
            f"NO_SHARD on a mesh of {shown}: its ranks would hold whole copies, so shard must be 1; use "
            f"FULL_SHARD, or MeshLayout(replicate={replicate * shard})"
        )
    elif strategy is not ShardingStrategy.NO_SHARD and replicate > 1:
        hybrid = _HYBRID[strategy is ShardingStrategy.SHARD_GRAD_OP]
        raise MeshError(
            f"{strategy.name} on a mesh of {shown}: it shards over all data ranks, so replicate must be 1; "
            f"use {hybrid.name}, or MeshLayout(shard={replicate * shard})"
        )
    return {"mesh": mesh, "reshard_after_forward": strategy in _FREES}


def _check_strategy(strategy: object) -> None:
    if not isinstance(strategy, ShardingStrategy):
        names = ", ".join(s.name for s in ShardingStrategy)
        raise Parallel3dError(
            f"strategy is {strategy!r}; it must be a ShardingStrategy: one of {names}"
        )


def _check_hybrid(strategy: ShardingStrategy, replicate: int, shard: int, shown: str) -> None:
    if replicate > 1 and shard > 1:
        return
    zero2 = strategy is ShardingStrategy._HYBRID_SHARD_ZERO2
    instead = "NO_SHARD"
    if replicate == 1:
        instead = "SHARD_GRAD_OP" if zero2 else "FULL_SHARD"
    raise MeshError(
        f"{strategy.name} on {shown}: it shards within a copy and replicates copies, so both sizes must be "
        f"above 1; use {instead}, or another size of shard"
    )


def _of_a_node(tp: int) -> int:
    """Data ranks of a node."""
    given = os.environ.get(_RANKS_PER_NODE, "")
    if not given.isdecimal() or not int(given):
        raise Parallel3dError(
            f"shard is None, and {_RANKS_PER_NODE} is {given!r}: it would tell the ranks of a node, as under "
            "torchrun; give shard="
        )
    if type(tp) is not int or tp < 1 or int(given) % tp:
        raise MeshError(
            f"tp is {tp!r} and a node has {given} ranks ({_RANKS_PER_NODE}): a node must hold whole tp "
            "groups; give shard=, or a tp that divides it"
        )
    return int(given) // tp
