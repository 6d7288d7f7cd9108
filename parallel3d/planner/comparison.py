"""Predicts pipeline parallelism, which this library doesn't have, and says whether it would be faster than a
plan's layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from parallel3d.mesh import MeshLayout
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.pipeline import Pipeline
from parallel3d.planner.planning import MeshPlan, refusal, setting, sizes_of
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.uncertainty import count_close

NEMO = "nemo-te"
"""The stack that pipelines are predicted with: of published ones most are its."""
_STAGES = (2, 3, 4, 6, 8, 9, 12, 16)
_VIRTUAL = 8  # chunks of a stage, at most
_MICRO = (1, 2, 4)
_KINDS = ("none", "full")


@dataclass(frozen=True)
class PipelineComparison:
    """The best pipeline that was found, and the best layout of a plan without pipelines.

    Attributes:
        pipeline: its prediction as NeMo (Megatron-Core, TransformerEngine) would run it, with ZeRO-1.
        best: the plan's best prediction; None: nothing of the plan fits.
        alike: the same pipeline predicted with the stack and attention kernel of ``best``, so that it differs
            from ``best`` only by being a pipeline.
    """

    pipeline: Prediction
    best: Prediction | None
    alike: Prediction | None

    @property
    def gain(self) -> float | None:
        """``pipeline``'s expected tokens/s over ``best``'s, minus 1: 0.1 is 10 % faster. None if nothing of
        the plan fits."""
        return None if self.best is None else self.pipeline.expected / self.best.expected - 1

    @property
    def own(self) -> float | None:
        """As ``gain``, for ``alike``: what the pipeline itself gains. The rest of ``gain`` is due to NeMo's
        other kernels and collectives."""
        if self.best is None or self.alike is None:
            return None
        return self.alike.expected / self.best.expected - 1

    @property
    def is_better(self) -> bool:
        """Whether the pipeline is faster by more than the usual error between two predictions for one
        machine, or is all that fits."""
        if self.best is None:
            return True
        speeds = self.pipeline.expected, self.best.expected
        return speeds[0] > speeds[1] and count_close(speeds) == 1

    def __str__(self) -> str:
        each, software = self.pipeline, "in NeMo"
        what = (
            f"{each.pipeline}, each {sizes_of(each.layout, ' x ')} ({', '.join(each.layout.axes)}), "
            f"micro-batch {each.micro_batch}, {setting(each)}: "
            f"{each.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
        )
        if self.gain is None or self.own is None:
            return f"A pipeline {software} would fit: {what}."
        beside = f"with the kernels of this plan {_faster(self.own)}"
        if self.is_better:
            return f"A pipeline {software} would be {_faster(self.gain)} ({beside}): {what}."
        return (
            "No pipeline is faster by more than predictions of one machine err: the best, "
            f"{software}, is {_faster(self.gain)} ({beside}): {what}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the pipeline's prediction and the comparison as JSON values."""
        said = {"gain": self.gain, "own_gain": self.own, "is_better": self.is_better}
        return {**self.pipeline.as_dict(), **said, "pipeline": asdict(self.pipeline.pipeline)}


def _faster(gain: float) -> str:
    return f"{abs(gain):.0%} {'faster' if gain >= 0 else 'slower'}"


def compare_pipelines(
    plan: MeshPlan, memory_limit_gib: float | None = None
) -> PipelineComparison | None:
    """Predicts pipelines for the model and machines of ``plan``, and returns the best that fits.

    Tried are 2 to 16 stages; the schedules 1F1B and interleaved; tp of 1 to 8; cp as in the plan's best
    layout and twice that; for a mixture of experts, ep of 4, 8 and as in the best layout; micro-batches of 1,
    2 and 4; no and full activation checkpointing.

    Args:
        memory_limit_gib: GiB of each GPU that may be used, as for ``plan``.

    Returns:
        The comparison; None if no pipeline fits, or no number of stages divides the GPUs, the blocks and the
        batch.
    """
    model, cluster, work = plan.model, plan.cluster, plan.workload
    best = plan.best if plan.candidates else None
    cp = best.layout.cp if best is not None else 1
    kept = work.cp_attention if cp == 1 or best is None else best.workload.cp_attention
    batch = work.global_batch or (best.micro_batch * best.layout.data_size if best else 0)
    theirs = replace(
        work,
        stack=NEMO,
        sharding="zero1",
        chunked_loss=False,
        shard_optimizer_over_replicate=False,
        fused_loss=True,
        attention=None,
        cp_attention=kept,
        global_batch=batch or None,
    )
    sizes = _MICRO if work.micro_batch is None else (work.micro_batch,)
    limit = min(cluster.gpu.capacity_gib, memory_limit_gib or float("inf")) * 2**30
    found: list[Prediction] = []
    for stages in (n for n in _STAGES if cluster.world_size % n == 0 and n <= model.blocks):
        for layout in _layouts(plan, cluster.world_size // stages, {cp, 2 * cp}):
            for micro, kind in product(sizes, _KINDS):
                each, left = divmod(batch, micro * layout.data_size)
                if left or not each:
                    continue
                given = replace(theirs, micro_batch=micro, checkpointing=kind)
                tried = _pipelines(model, stages, each)
                predictions = (predict(model, layout, cluster, given, each) for each in tried)
                found += [p for p in predictions if p.memory.part(limit) <= 1]
    if not found:
        return None
    pipeline = max(found, key=lambda p: p.expected)
    alike = None
    if best is not None:
        same = replace(pipeline.workload, stack=work.stack, attention=work.attention)
        alike = predict(model, pipeline.layout, cluster, same, pipeline.pipeline)
    return PipelineComparison(pipeline, best, alike)


def _pipelines(model: ModelSpec, stages: int, micro_batches: int) -> Iterator[Pipeline]:
    """Yields the pipelines to try with ``stages`` stages: 1F1B, and interleaved with the fewest and the most
    chunks (up to 8 a stage) that give all stages equally many blocks."""
    yield Pipeline(stages)
    if micro_batches % stages == 0:
        most = range(2, min(_VIRTUAL, (model.blocks + 2) // stages) + 1)
        equal = [
            v for v in most if 0 in (model.blocks % (stages * v), (model.blocks + 2) % (stages * v))
        ]
        for virtual in {*equal[:1], *equal[-1:]}:
            yield Pipeline(stages, "interleaved", virtual)


def _layouts(plan: MeshPlan, ranks: int, sizes_of_cp: set[int]) -> Iterator[MeshLayout]:
    """Yields the layouts to try for the ``ranks`` of one stage. Data-parallel ranks form ``replicate``; with
    ep, ``shard``, because ep is taken from shard x cp x tp."""
    model, cluster = plan.model, plan.cluster
    sizes_of_ep = {4, 8, plan.best.layout.ep if plan.candidates else 1}
    experts = [n for n in sizes_of_ep if model.experts and model.experts % n == 0 and n <= ranks]
    for cp, tp, ep in product(sizes_of_cp, (1, 2, 4, 8), experts or [1]):
        data, left = divmod(ranks, tp * cp)
        if left or not data or (data * cp * tp) % ep:
            continue
        sizes = (data, 1) if ep == 1 else (1, data)
        layout = MeshLayout(*sizes, tp, cp=cp, ep=ep)
        if refusal(model, layout, cluster, replace(plan.workload, sharding="zero1")) is None:
            yield layout
