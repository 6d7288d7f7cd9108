"""A step with pipeline stages: the memory of the fullest stage, and the time of the slowest one with the
bubble and the sends between stages."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from parallel3d.planner.cluster import collective_time, placed
from parallel3d.planner.constants import Term
from parallel3d.planner.kernels import gemms_of
from parallel3d.planner.memory import PredictedMemory, memory_of
from parallel3d.planner.pipeline import blocks_of_stages, stage_model
from parallel3d.planner.step_time import StepTime, step_time, stragglers
from parallel3d.planner.workload import Step

_ONCE = ("optimizer", "exposed gather", "exposed reduce", "exposed all_reduce", "slowdown")
"""Of a stage's terms those that are once in a step: gradients are reduced, and parameters gathered, once."""


def stages_of(step: Step) -> list[Step]:
    """Returns one ``Step`` for each stage: its part of the model on its part of the cluster.

    The ranks of a stage are consecutive. Within a stage FSDP is modelled as ZeRO-1, because torch's pipeline
    stages keep parameters and gradients unsharded and reduce after the last micro-batch.
    """
    model, layout = step.model, step.layout
    work, node = step.workload, gcd(layout.world_size, step.cluster.gpus_per_node)
    part = replace(step.cluster, nodes=layout.world_size // node, gpus_per_node=node)
    if work.sharding == "fsdp":
        work = replace(work, sharding="zero1")
    every = blocks_of_stages(model, step.pipeline)
    models = {blocks: stage_model(model, blocks) for blocks in every}
    sizes = step.micro_batch, step.accumulation
    steps = {blocks: Step(own, layout, part, work, *sizes) for blocks, own in models.items()}
    return [steps[blocks] for blocks in every]


def pipelined_memory(step: Step) -> PredictedMemory:
    """Returns the memory of the stage that needs most."""
    micro, pipeline = step.accumulation, step.pipeline
    first: dict[int, tuple[int, Step]] = {}  # of stages that are alike the first has most in flight
    for stage, own in enumerate(stages_of(step)):
        first.setdefault(id(own), (stage, own))
    found = [memory_of(own, pipeline.in_flight(stage, micro)) for stage, own in first.values()]
    return max(found, key=lambda memory: memory.needed)


def pipelined_time(step: Step) -> StepTime:
    """Returns the time of the slowest stage, including what it waits for other stages and for sends."""
    pipeline, micro = step.pipeline, step.accumulation
    stages = stages_of(step)
    alike = {id(each): each for each in stages}
    times = {key: step_time(each) for key, each in alike.items()}
    of_weights = {key: _weight_gradients(each) for key, each in alike.items()}
    own = [times[id(each)] for each in stages]
    seconds = [_micro_batch(time, micro) for time in own]
    slowest = max(range(len(own)), key=seconds.__getitem__)
    weights = [of_weights[id(each)] for each in stages]
    others = [(seconds[i], weights[i]) for i in range(len(own)) if i != slowest]
    terms = {name: term for name, term in own[slowest].terms.items() if name != "stragglers"}
    inputs: dict[str, float | str] = {
        "stages": pipeline.stages,
        "schedule": str(pipeline),
        "micro-batches": micro,
        "slowest stage": slowest,
        "a micro-batch of it": seconds[slowest],
        "of the fastest": min(seconds),
    }
    formulas = {
        "zero_bubble": "sum over the other stages of a micro-batch without twice its weight gradients",
        "interleaved": "sum over the other stages of a micro-batch / virtual",
    }
    usual = "sum over the other stages of a micro-batch: (stages - 1) of it if all are equal"
    formula = formulas.get(pipeline.schedule, usual)
    terms["bubble"] = Term("bubble", pipeline.bubble(others), formula, inputs)
    terms["stage sends"] = _sends(step)
    terms["stragglers"] = stragglers(step, sum(term.value for term in terms.values()))
    count = len(own)
    return StepTime(
        terms,
        sum(time.model_flops for time in own) / count,
        sum(time.hardware_flops for time in own) / count,
        own[slowest].units,
        own[slowest].rules,
        own[slowest].host,
    )


def _micro_batch(time: StepTime, micro_batches: int) -> float:
    """Returns the seconds of one micro-batch on a stage, without what happens once a step."""
    each = (term.value for name, term in time.terms.items() if name not in (*_ONCE, "stragglers"))
    return (sum(each) - time.host["optimizer"]) / micro_batches


def _weight_gradients(step: Step) -> float:
    """Returns the seconds of the weight-gradient matmuls of one micro-batch."""
    return sum(
        unit.count * seconds
        for unit in step.model.units
        for _, way, _, seconds in gemms_of(unit, step.local)
        if way == "weight gradient"
    )


def _sends(step: Step) -> Term:
    """Returns the seconds a step in which stages wait for sends of activations to the next stage and of their
    gradients back."""
    local, pipeline, micro = step.local, step.pipeline, step.accumulation
    nbytes = local.tokens * step.model.hidden * step.workload.compute_itemsize / step.layout.tp
    link = placed(pipeline.stages, step.layout.world_size, step.cluster)
    each = collective_time("send", nbytes, link, step.cluster)
    each *= step.workload.profile.value("collective_time")
    count = 2 * (pipeline.stages - 1 + (0 if pipeline.overlaps_sends else micro))
    return Term(
        "stage sends",
        count * each,
        "sends that nothing hides * one: 2 (stages - 1)"
        + ("" if pipeline.overlaps_sends else " + 2 micro-batches"),
        {"bytes": nbytes, "one": each, "sends": count, "stages": pipeline.stages},
    )
