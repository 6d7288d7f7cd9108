"""MeshPlan: what plan has found, and the questions that one asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.prediction import Prediction, predict
from parallel3d.planner.terms import shown
from parallel3d.planner.workload import Workload

__all__ = ["MeshPlan", "Refused"]


@dataclass(frozen=True)
class Refused:
    """A layout that isn't proposed.

    Attributes:
        reason: in words.
        prediction: of the attempt that needs least memory, if that is the reason.
    """

    layout: MeshLayout
    reason: str
    prediction: Prediction | None = None


@dataclass(frozen=True)
class MeshPlan:
    """Layouts that fit, the fastest first, and those that were refused.

    Attributes:
        candidates: predictions; a layout comes once for each micro-batch and kind of checkpointing.
        refused: layouts with the reason.
    """

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    candidates: tuple[Prediction, ...]
    refused: tuple[Refused, ...]

    @property
    def best(self) -> Prediction:
        """The fastest that fits.

        Raises:
            PlanningError: nothing fits; says what comes closest.
        """
        if self.candidates:
            return self.candidates[0]
        tried = [r for r in self.refused if r.prediction is not None]
        if not tried:
            raise PlanningError(
                f"no layout is legal: {self.refused[0].layout}: {self.refused[0].reason}"
            )
        nearest = min(tried, key=lambda r: r.prediction.memory.needed if r.prediction else 0)
        assert nearest.prediction is not None
        full = nearest.prediction.workload.checkpointing == "full"
        other = "" if full else ", or checkpointing='full'"
        raise PlanningError(
            f"nothing fits; {nearest.layout} comes closest and {nearest.reason}. Take more GPUs or a shorter "
            f"sequence{other}"
        )

    @property
    def layouts(self) -> tuple[Prediction, ...]:
        """The fastest of each layout, the fastest first."""
        seen: dict[MeshLayout, Prediction] = {}
        for each in self.candidates:
            seen.setdefault(each.layout, each)
        return tuple(seen.values())

    def of(self, layout: MeshLayout) -> Prediction:
        """The fastest prediction of ``layout``, also where it doesn't fit.

        Raises:
            PlanningError: it was refused for another reason.
        """
        for each in self.layouts:
            if each.layout == layout:
                return each
        for refused in self.refused:
            if refused.layout == layout:
                if refused.prediction is not None:
                    return refused.prediction
                raise PlanningError(f"{layout} was refused: {refused.reason}")
        raise PlanningError(
            f"{layout} has no {self.cluster.world_size} ranks, or isn't among those asked for"
        )

    def explain(self, a: Prediction | MeshLayout, b: Prediction | MeshLayout) -> str:
        """Why ``a`` and ``b`` differ: their components' differences, the largest first."""
        first = self.of(a) if isinstance(a, MeshLayout) else a
        second = self.of(b) if isinstance(b, MeshLayout) else b
        ratio = first.tokens_per_second_per_gpu / second.tokens_per_second_per_gpu
        lines = [
            f"{_named(first)}: {first.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, "
            f"{_named(second)}: {second.tokens_per_second_per_gpu:,.0f}; {ratio:.3f} x",
            "microseconds a token and GPU, first - second:",
        ]
        lines += _differences(_per_token(first), _per_token(second), lambda v: f"{v * 1e6:+.3f} us")
        lines.append("memory, first - second:")
        lines += _differences(
            {k: t.value for k, t in first.memory.terms.items()},
            {k: t.value for k, t in second.memory.terms.items()},
            lambda v: ("+" if v >= 0 else "-") + shown(abs(v), "B"),
        )
        return "\n".join(lines)

    def sensitivity(
        self, prediction: Prediction | None = None
    ) -> dict[str, list[tuple[str, float, bool]]]:
        """What changes if one thing does: name -> (its value, tokens/s/GPU, whether it fits).

        Tried are half and twice the micro-batch and sequence, and the bandwidth between nodes and of memory.
        """
        base = prediction or self.best
        work, cluster = base.workload, base.cluster
        found: dict[str, list[tuple[str, float, bool]]] = {}

        def add(name: str, value: str, model: ModelSpec, on: Cluster, what: Workload) -> None:
            result = predict(model, base.layout, on, what)
            speed = result.tokens_per_second_per_gpu
            found.setdefault(name, []).append((value, speed, result.fits))

        for factor in (0.5, 1, 2):
            size = max(int(base.micro_batch * factor), 1)
            if size == base.micro_batch and factor != 1:
                continue  # it can't be halved
            whole = size * base.accumulation * base.layout.data_size
            batch = replace(work, micro_batch=size, global_batch=whole)
            add("micro_batch", str(size), self.model, cluster, batch)
        for factor in (0.5, 1, 2):
            length = max(int(work.seq_len * factor), base.layout.tp)
            longer = replace(work, seq_len=length, micro_batch=base.micro_batch)
            add("seq_len", str(length), self.model, cluster, longer)
        for factor in (0.5, 1, 2):
            faster = replace(cluster, nic=cluster.nic * factor)
            add("nic", f"{faster.nic:g} GB/s", self.model, faster, work)
        for factor in (0.5, 1, 2):
            gpu = replace(cluster.gpu, bandwidth=cluster.gpu.bandwidth * factor)
            wider = replace(cluster, gpu=gpu)
            add("memory bandwidth", f"{gpu.bandwidth:g} TB/s", self.model, wider, work)
        return found

    def pareto(self) -> tuple[Prediction, ...]:
        """Those than which none is faster with as little memory, from the least memory to the fastest."""
        front: list[Prediction] = []
        for each in sorted(
            self.candidates, key=lambda p: (p.memory.needed, -p.tokens_per_second_per_gpu)
        ):
            if not front or each.tokens_per_second_per_gpu > front[-1].tokens_per_second_per_gpu:
                front.append(each)
        return tuple(front)

    def as_dict(self, most: int | None = None) -> dict[str, Any]:
        """JSON values: the first ``most`` candidates, and all refusals."""
        return {
            "model": self.model.name,
            "gpu": self.cluster.gpu.name,
            "nodes": self.cluster.nodes,
            "candidates": [each.as_dict() for each in self.candidates[:most]],
            "refused": [
                {
                    "layout": dict(zip(("replicate", "shard", "tp"), r.layout.sizes, strict=True)),
                    "reason": r.reason,
                }
                for r in self.refused
            ],
        }


def _named(prediction: Prediction) -> str:
    sizes = ", ".join(map(str, prediction.layout.sizes))
    return f"({sizes}) micro-batch {prediction.micro_batch}, {prediction.workload.checkpointing}"


def _per_token(prediction: Prediction) -> dict[str, float]:
    tokens = prediction.micro_batch * prediction.accumulation * prediction.workload.seq_len
    share = prediction.layout.tp / tokens
    return {name: term.value * share for name, term in prediction.time.terms.items()}


def _differences(a: dict[str, float], b: dict[str, float], text: Any) -> Sequence[str]:
    names = dict.fromkeys([*a, *b])
    each = sorted(((a.get(n, 0.0) - b.get(n, 0.0), n) for n in names), key=lambda d: -abs(d[0]))
    return [f"  {name}: {text(difference)}" for difference, name in each if difference]
