"""Pipeline parallelism of other software: how a model is cut into stages, and what each schedule costs.

This library has no pipelines: what is here only predicts those of Megatron-LM and torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from parallel3d.errors import PlanningError
from parallel3d.planner.arguments import check_choice, check_size
from parallel3d.planner.model_spec import ModelSpec, UnitSpec

SCHEDULES = ("1f1b", "interleaved", "gpipe", "zero_bubble")


@dataclass(frozen=True)
class Pipeline:
    """How the blocks of a model are divided over pipeline stages, each of which has a mesh of its own.

    Attributes:
        stages: number of stages: groups of ranks with different blocks. 1: there is no pipeline.
        schedule: "1f1b" (one forward, one backward in turn), "interleaved" (1f1b with ``virtual`` chunks of
            blocks on each stage: arXiv:2104.04473), "gpipe" (all forwards first), "zero_bubble" (ZB-H1 of
            arXiv:2401.10241: weight gradients fill the bubble).
        virtual: chunks of blocks on each stage; more than 1 for "interleaved", and only there.

    Raises:
        PlanningError: an unknown schedule, a size below 1, or a ``virtual`` that doesn't go with the
            schedule.
    """

    stages: int = 1
    schedule: str = "1f1b"
    virtual: int = 1

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        for name in ("stages", "virtual"):
            check_size(name, getattr(self, name))
        if (self.virtual > 1) != (self.schedule == "interleaved"):
            least = "2 or more" if self.schedule == "interleaved" else "1"
            raise PlanningError(
                f"virtual is {self.virtual} with schedule {self.schedule!r}; it must be {least}: chunks of a "
                "stage are what 'interleaved' has"
            )

    @property
    def chunks(self) -> int:
        """Number of chunks that the blocks are divided into, over all stages."""
        return self.stages * self.virtual

    @property
    def overlaps_sends(self) -> bool:
        """Whether a stage computes another micro-batch while it sends and receives.

        In "1f1b" and "zero_bubble" it doesn't: a stage waits for the next stage's answer to what it has just
        sent.
        """
        return self.schedule in ("interleaved", "gpipe")

    def in_flight(self, stage: int, micro_batches: int) -> float:
        """The most micro-batches whose activations ``stage`` (from 0) keeps at one time. A chunk counts as 1
        / virtual of a stage."""
        left = self.stages - stage
        if self.schedule == "gpipe":
            return micro_batches
        if self.schedule == "interleaved":  # the chunks of its warm-up and the one that follows
            chunks = 2 * (left - 1) + (self.virtual - 1) * self.stages + 1
            return min(chunks, micro_batches * self.virtual) / self.virtual
        return min(self.stages if self.schedule == "zero_bubble" else left, micro_batches)

    def bubble(self, others: list[tuple[float, float]]) -> float:
        """Seconds in which the slowest stage is idle, at the start and at the end of a step.

        Args:
            others: for each other stage, (seconds of a micro-batch, seconds of its weight gradients w). If
                all stages take t, the bubble is (stages - 1) t / virtual; for "zero_bubble" (stages - 1) (t -
                2 w).
        """
        if self.schedule == "zero_bubble":
            return sum(max(whole - 2 * weights, 0.0) for whole, weights in others)
        return sum(whole for whole, _ in others) / self.virtual

    def __str__(self) -> str:
        chunks = f" {self.virtual}" if self.virtual > 1 else ""
        return f"{self.stages} stages, {self.schedule.replace('_', ' ')}{chunks}"


NO_PIPELINE = Pipeline()


class Blocks(NamedTuple):
    """Which parts of the model one stage has.

    Attributes:
        counts: for each unit of the model, how many of its equal blocks are on the stage.
        first, last: whether the stage has the embedding; whether it has the head.
    """

    counts: tuple[int, ...]
    first: bool
    last: bool


def blocks_of_stages(model: ModelSpec, pipeline: Pipeline) -> list[Blocks]:
    """Divides the blocks of ``model`` into chunks, of which c is on stage c modulo ``stages``.

    Chunks have equally many blocks if possible; else embedding and head count as a block each, as Megatron-LM
    and torchtitan divide 126 layers in 64 chunks. Different kinds of blocks are assumed to alternate evenly.

    Raises:
        PlanningError: there are more chunks than blocks, embedding and head together.
    """
    chunks, stages, blocks = pipeline.chunks, pipeline.stages, model.blocks
    if blocks + 2 < chunks:
        raise PlanningError(
            f"{pipeline} are {chunks} parts, and {model.name} has only {blocks} blocks, an embedding and a "
            f"head: {blocks // stages} chunks a stage are the most"
            if stages <= blocks
            else f"{stages} stages, and {model.name} has {blocks} blocks: take {blocks} stages at most"
        )
    kinds = [(at, unit.count) for at, unit in enumerate(model.units) if unit.kind == "block"]
    order = sorted(((i + 0.5) / n, at) for at, n in kinds for i in range(n))
    sizes = [blocks // chunks] * chunks
    if blocks % chunks:
        each, more = divmod(blocks + 2, chunks)
        sizes = [each + (c < more) for c in range(chunks)]
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
    found = [[0] * len(model.units) for _ in range(stages)]
    at = 0
    for chunk, size in enumerate(sizes):
        for _, unit in order[at : at + size]:
            found[chunk % stages][unit] += 1
        at += size
    last = (chunks - 1) % stages
    return [Blocks(tuple(each), n == 0, n == last) for n, each in enumerate(found)]


def stage_model(model: ModelSpec, blocks: Blocks) -> ModelSpec:
    """Returns the part of ``model`` that one stage has.

    A tied embedding's weights are on the first and on the last stage, which sum their gradients.
    """
    units: list[UnitSpec] = []
    for unit, count in zip(model.units, blocks.counts, strict=True):
        if unit.kind == "block":
            units += [replace(unit, count=count)] if count else []
        elif unit.kind == "tail" or unit.matmuls:
            units += [unit] if blocks.last else []
        elif blocks.first:
            units.append(unit)
        elif blocks.last and unit.kind == "root" and model.tied:
            units.append(UnitSpec(unit.name, unit.kind, unit.parameters))
    vocab = model.vocab if blocks.last else 0
    return replace(model, units=tuple(units), vocab=vocab, tied=False)
