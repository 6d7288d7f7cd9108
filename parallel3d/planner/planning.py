"""plan: every legal layout, predicted and ranked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.legality import refusal
from parallel3d.planner.mesh_plan import MeshPlan, Refused
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.workload import CHECKPOINTING, Workload

__all__ = ["plan"]

_MOST_MICRO = 64


def plan(
    model: ModelSpec,
    cluster: Cluster,
    workload: Workload,
    *,
    replicate: int | Iterable[int] | None = None,
    shard: int | Iterable[int] | None = None,
    tp: int | Iterable[int] | None = None,
    checkpointing: str | Sequence[str] | None = None,
    reshard_after_forward: bool | Sequence[bool] | None = None,
    memory_limit_gib: float | None = None,
) -> MeshPlan:
    """Predicts every legal layout of ``model`` on ``cluster``, the fastest that fits first.

    Args:
        workload: without ``micro_batch`` powers of two up to what the global batch leaves are tried.
        replicate, shard, tp: sizes that these axes may have; any by default.
        checkpointing: kinds to try; the workload's own by default, ``planner.CHECKPOINTING`` for all.
        reshard_after_forward: the same; the workload's own by default.
        memory_limit_gib: what a GPU may use, of what it has.

    Returns:
        The plan; ``best.layout`` goes into ``build_mesh``. It may be that nothing fits: then there is no
        ``best``, and ``refused`` says why.

    Raises:
        PlanningError: no layout has the sizes that are asked for, or neither batch size is given.
    """
    if workload.micro_batch is None and workload.global_batch is None:
        raise PlanningError("micro_batch and global_batch are both None; give one of them")
    if isinstance(checkpointing, str):
        checkpointing = (checkpointing,)
    if isinstance(reshard_after_forward, bool):
        reshard_after_forward = (reshard_after_forward,)
    if memory_limit_gib is not None and not (
        isinstance(memory_limit_gib, (int, float)) and 0 < memory_limit_gib < float("inf")
    ):
        raise PlanningError(
            f"memory_limit_gib is {memory_limit_gib!r}; it must be a number above 0"
        )
    kinds = tuple(checkpointing or (workload.checkpointing,))
    if unknown := [kind for kind in kinds if kind not in CHECKPOINTING]:
        raise PlanningError(
            f"checkpointing is {unknown[0]!r}; it must be one of {', '.join(CHECKPOINTING)}"
        )
    keeps = tuple(reshard_after_forward or (workload.reshard_after_forward,))
    found: list[Prediction] = []
    refused: list[Refused] = []
    allowed = [
        _sizes(name, size)
        for name, size in (("replicate", replicate), ("shard", shard), ("tp", tp))
    ]
    layouts = list(_layouts(cluster.world_size, *allowed))
    if not layouts:
        raise PlanningError(
            f"no replicate x shard x tp of the sizes that are asked for has {cluster.world_size} ranks"
        )
    for layout in layouts:
        why = refusal(model, layout, cluster, workload)
        micro = [] if why else list(_micro_batches(layout, workload))
        if why is None and not micro:
            why = (
                f"global_batch {workload.global_batch} is no multiple of {layout.data_size} data ranks"
                + (f" * micro_batch {workload.micro_batch}" if workload.micro_batch else "")
            )
        if why is not None:
            refused.append(Refused(layout, why))
            continue
        tries = [
            replace(workload, micro_batch=size, checkpointing=kind, reshard_after_forward=keep)
            for size in micro
            for kind in kinds
            for keep in (keeps if layout.shard > 1 else keeps[:1])
        ]
        each = [predict(model, layout, cluster, work) for work in tries]
        limit = min(p.memory.capacity for p in each)
        if memory_limit_gib is not None:
            limit = min(limit, memory_limit_gib * 2**30)
        fitting = [p for p in each if p.memory.needed <= limit]
        found += fitting
        if not fitting:
            least = min(each, key=lambda p: p.memory.needed)
            refused.append(
                Refused(
                    layout,
                    f"needs {least.memory.needed / 2**30:.1f} GiB of {limit / 2**30:.1f} with micro-batch "
                    f"{least.micro_batch} and {least.workload.checkpointing} checkpointing",
                    least,
                )
            )
    found.sort(key=lambda p: -p.tokens_per_second_per_gpu)
    return MeshPlan(model, cluster, workload, tuple(found), tuple(refused))


def _sizes(name: str, given: int | Iterable[int] | None) -> frozenset[int] | None:
    if given is None:
        return None
    sizes = frozenset(given if isinstance(given, Iterable) else [given])
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise PlanningError(f"{name} is {given!r}; it must be sizes of 1 or more")
    return sizes


def _layouts(
    world: int,
    replicate: frozenset[int] | None,
    shard: frozenset[int] | None,
    tp: frozenset[int] | None,
) -> Iterator[MeshLayout]:
    """All that have ``world`` ranks."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for t in divisors:
        if tp is not None and t not in tp:
            continue
        for n in divisors:
            if (world // t) % n or (shard is not None and n not in shard):
                continue
            r = world // t // n
            if replicate is None or r in replicate:
                yield MeshLayout(r, n, t)


def _micro_batches(layout: MeshLayout, work: Workload) -> Iterator[int]:
    """Sizes that divide what the global batch leaves to a data rank; powers of two and all of it."""
    if work.global_batch is None:
        assert work.micro_batch is not None
        yield work.micro_batch
        return
    if work.global_batch % layout.data_size:
        return
    each = work.global_batch // layout.data_size
    if work.micro_batch is not None:
        if each % work.micro_batch == 0:
            yield work.micro_batch
        return
    size = 1
    while size <= min(each, _MOST_MICRO):
        if each % size == 0:
            yield size
        size *= 2
