"""predict: memory and speed of one layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.memory import Memory, memory_of
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.step_time import StepTime, step_time
from parallel3d.planner.workload import Workload

__all__ = ["Prediction", "predict"]

_GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """Memory and time of a step, on the fullest and slowest rank.

    Attributes:
        layout, cluster, model, workload: of what.
        micro_batch: sequences per data rank and forward. accumulation: micro-batches a step.
        memory: bytes by component at the peak, what must fit, an upper bound.
        time: seconds by component.
    """

    model: ModelSpec
    layout: MeshLayout
    cluster: Cluster
    workload: Workload
    micro_batch: int
    accumulation: int
    memory: Memory
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether ``memory.needed`` is within the GPU's."""
        return self.memory.fits

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step."""
        return self.time.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The ranks of a tp group share their tokens."""
        tokens = self.micro_batch * self.accumulation * self.workload.seq_len
        return tokens / self.layout.tp / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs over the dense bf16 peak. Counted are matmuls, twice as many backward, and attention as
        it is (causal: half of the scores, 2.5 times as many backward); no embedding, nothing computed again.
        """
        return self.time.model_flops / self.time.total / (self.cluster.gpu.peak * 1e12)

    @property
    def hfu(self) -> float:
        """As ``mfu``, with what checkpointing computes again."""
        return self.time.hardware_flops / self.time.total / (self.cluster.gpu.peak * 1e12)

    @property
    def mfu_6n(self) -> float:
        """By the common convention: 6 N + 12 L h s FLOPs a token (PaLM, arXiv:2204.02311, appendix B)."""
        attention = sum(
            12 * u.count * a.heads * a.head_dim * self.workload.seq_len
            for u in self.model.units
            for a in u.attention
        )
        flops = 6 * self.model.numel + attention
        return flops * self.tokens_per_second_per_gpu / (self.cluster.gpu.peak * 1e12)

    def explain(self) -> str:
        """Every number with its formula and what went into it, constants with their sources."""
        from parallel3d.planner.explain import explanation

        return "\n".join(explanation(self))

    def as_dict(self) -> dict[str, Any]:
        """JSON values: GiB and seconds by component, and what follows from them."""
        memory, time = self.memory, self.time
        return {
            "model": self.model.name,
            "gpu": self.cluster.gpu.name,
            "nodes": self.cluster.nodes,
            "layout": dict(zip(("replicate", "shard", "tp"), self.layout.sizes, strict=True)),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "checkpointing": self.workload.checkpointing,
            "fits": self.fits,
            "memory_gib": {name: term.value / _GIB for name, term in memory.terms.items()},
            "peak": memory.moment,
            "allocated_gib": memory.allocated / _GIB,
            "reserved_gib": memory.reserved / _GIB,
            "upper_gib": memory.upper / _GIB,
            "needed_gib": memory.needed / _GIB,
            "capacity_gib": memory.capacity / _GIB,
            "step_seconds": time.total,
            "seconds": {name: term.value for name, term in time.terms.items()},
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "mfu_6n": self.mfu_6n,
        }


def predict(
    model: ModelSpec, layout: MeshLayout, cluster: Cluster, workload: Workload
) -> Prediction:
    """Predicts memory and speed of ``model`` on ``layout``, also of a layout that doesn't fit.

    Args:
        workload: ``micro_batch`` is needed; with ``global_batch`` gradients are accumulated to it.

    Raises:
        PlanningError: sizes that don't go together.
        MeshError: a layout of another number of ranks.
    """
    if not isinstance(layout, MeshLayout):
        raise PlanningError(f"layout is {layout!r}; it must be a MeshLayout(replicate, shard, tp)")
    layout = layout.resolve(cluster.world_size)
    if workload.sharding != "fsdp" and layout.shard > 1:
        raise PlanningError(
            f"{workload.sharding} shards nothing over shard, which is {layout.shard}; it must be 1: give "
            f"replicate {layout.replicate * layout.shard}"
        )
    micro_batch, accumulation = batches(layout, workload)
    return Prediction(
        model,
        layout,
        cluster,
        workload,
        micro_batch,
        accumulation,
        memory_of(model, layout, cluster, workload, micro_batch, accumulation),
        step_time(model, layout, cluster, workload, micro_batch, accumulation),
    )


def batches(layout: MeshLayout, work: Workload) -> tuple[int, int]:
    """(micro-batch, accumulation).

    Raises:
        PlanningError: the global batch isn't a multiple of what a forward of all ranks takes.
    """
    if work.micro_batch is None and work.global_batch is None:
        raise PlanningError("micro_batch and global_batch are both None; give one of them")
    if work.micro_batch is None:
        assert work.global_batch is not None
        if work.global_batch % layout.data_size:
            raise _uneven(work.global_batch, layout.data_size, "data ranks")
        return work.global_batch // layout.data_size, 1
    if work.global_batch is None:
        return work.micro_batch, 1
    each = work.micro_batch * layout.data_size
    if work.global_batch % each:
        raise _uneven(work.global_batch, each, "micro_batch * data ranks")
    return work.micro_batch, work.global_batch // each


def _uneven(batch: int, by: int, what: str) -> PlanningError:
    lower = max(batch // by, 1) * by
    return PlanningError(
        f"global_batch is {batch}; it must be a multiple of {what}, {by}: {lower} or {lower + by}"
    )
