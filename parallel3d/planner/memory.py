"""Bytes on the fullest GPU: state and buffers of the engine, activations, logits, what a framework adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from parallel3d.fsdp.layout import ACCELERATOR_BYTES
from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.constants import Term, constant
from parallel3d.planner.engine import (
    UnitLayout,
    Widths,
    run_backward,
    unit_layout,
)
from parallel3d.planner.kernels import Activations, activations_of, logit_bytes
from parallel3d.planner.model_spec import ModelSpec, Unit
from parallel3d.planner.workload import Workload

# Bytes of parameters, gradients, optimizer state, unsharded groups and buffers, as the engine
# allocates.


@dataclass(frozen=True)
class StateMemory:
    """Bytes on the fullest rank, which is the first.

    Attributes:
        parameters, gradients, optimizer: at rest, after a step. Optimizer's counters of steps, which are on
            the CPU, are not in.
        gradients_whole: gradients are there during the whole step (ZeRO-1, DDP).
        unsharded, buffers: at the moment of a backward at which their sum is largest: unsharded parameters;
            buffers of gathers, gradients that have come and are not reduced yet, inputs of reductions.
        unsharded_at_loss: unsharded parameters at the end of forward.
        results: what a backward's end needs beyond ``gradients``: results of reductions in another dtype.
        results_again: the same where there are gradients of an earlier micro-batch, to be added to.
        waiting: gradients of tied weights, which autograd holds from the head's backward to the embedding's.
        step: what the optimizer's step allocates.
        inputs: what these were computed from.
    """

    parameters: int
    gradients: int
    optimizer: int
    gradients_whole: bool
    unsharded: int
    unsharded_at_loss: int
    buffers: int
    step: int
    results: int = 0
    results_again: int = 0
    waiting: int = 0
    inputs: dict[str, int] = field(default_factory=dict, hash=False)


def state_memory(
    model: ModelSpec,
    layout: MeshLayout,
    work: Workload,
    *,
    zero_copy_bytes: int = ACCELERATOR_BYTES,
    streams: bool = True,
) -> StateMemory:
    """Of ``model`` on ``layout``, which is resolved.

    Args:
        zero_copy_bytes: from which a parameter is gathered into its place: the engine's for accelerators.
        streams: whether the device has streams, as accelerators have.
    """
    if work.sharding != "fsdp":
        return _whole(model, layout, work)
    found = _sharded(
        model.units,
        layout.shard,
        layout.tp,
        Widths(work.param_itemsize, work.compute_itemsize, work.reduce_itemsize),
        work.sequence_parallel,
        work.reshard_after_forward,
        zero_copy_bytes,
        streams,
    )
    state, step = _optimizer(work)
    waiting = 0
    if model.tied:
        waiting = _tied(model.units) // layout.tp * work.compute_itemsize
    return StateMemory(
        parameters=found.elements * work.param_itemsize,
        gradients=found.trained * work.param_itemsize,
        optimizer=found.trained * state,
        gradients_whole=False,
        unsharded=found.unsharded,
        unsharded_at_loss=found.at_loss,
        buffers=found.buffers,
        step=found.trained * step,
        results=found.results,
        results_again=found.results_again,
        waiting=waiting,
        inputs={
            "parameters of a rank": found.elements,
            "of them trained": found.trained,
            "shard": layout.shard,
            "tp": layout.tp,
            "unsharded block": found.block,
        },
    )


def _optimizer(work: Workload) -> tuple[int, int]:
    """Bytes a parameter of the optimizer's state, and of what its step allocates beside.

    AdamW's foreach implementation, which is the default on accelerators, makes the square roots of all second
    moments at once; SGD's nothing.
    """
    step = work.param_itemsize if work.optimizer in ("adam", "adamw") else 0
    return work.optimizer_bytes, step


def _tied(units: tuple[Unit, ...]) -> int:
    """Elements of the embedding that is the head's weight as well."""
    return max(
        (p.numel for u in units if u.kind == "root" for p in u.parameters if p.trainable), default=0
    )


@dataclass(frozen=True, slots=True)
class _Sharded:
    """Elements of a rank at rest, and bytes of the rest."""

    elements: int
    trained: int
    unsharded: int
    buffers: int
    at_loss: int
    results: int
    results_again: int
    block: int


@lru_cache(maxsize=4096)
def _sharded(
    units: tuple[Unit, ...],
    shard: int,
    tp: int,
    widths: Widths,
    sequence_parallel: bool,
    reshard: bool,
    zero_copy_bytes: int,
    streams: bool,
) -> _Sharded:
    layouts = [
        unit_layout(unit, shard, tp, widths.rest, sequence_parallel, zero_copy_bytes)
        for unit in units
    ]
    buckets = [(u.count, b) for u in layouts for b in u.buckets]
    backward = run_backward(layouts, widths, reshard_after_forward=reshard, streams=streams)
    return _Sharded(
        elements=sum(count * b.numel for count, b in buckets),
        trained=sum(count * b.numel for count, b in buckets if b.trainable),
        unsharded=backward.unsharded,
        buffers=backward.buffers,
        at_loss=backward.at_loss,
        results=_results(layouts, widths),
        results_again=_results(layouts, widths, again=True),
        block=max((u.unsharded_numel for u in layouts if u.kind == "block"), default=0),
    )


def _results(layouts: list[UnitLayout], widths: Widths, *, again: bool = False) -> int:
    """Bytes beyond the gradients: all results wait for the backward's end, when each becomes a gradient, of
    another dtype, and only then is freed. ``again``: each is added to the gradient that is there."""
    rest, reduce = widths.rest, widths.reduce
    sizes = [
        b.numel
        for unit in reversed(layouts)
        for _ in range(unit.count)
        for b in unit.buckets
        if b.trainable
    ]
    total = most = reduce * sum(sizes)
    if rest == reduce:
        return most if again else 0
    for size in sizes:
        most = max(most, total + rest * size)
        total -= reduce * size if again else (reduce - rest) * size
    return most if again else max(0, most - rest * sum(sizes))


def _whole(model: ModelSpec, layout: MeshLayout, work: Workload) -> StateMemory:
    """ZeRO-1: whole parameters and gradients; fp32 copies and optimizer state over ``replicate``.

    Not our engine's. Frameworks that shard so (Megatron-LM, DeepSpeed) step by fused kernels, in place.
    """
    layouts = [
        unit_layout(u, 1, layout.tp, work.param_itemsize, work.sequence_parallel, ACCELERATOR_BYTES)
        for u in model.units
    ]
    numel = sum(u.count * u.unsharded_numel for u in layouts)
    over = layout.replicate if work.sharding == "zero1" else 1
    part = ceil(numel / over)
    master = work.param_itemsize if work.compute_itemsize != work.param_itemsize else 0
    state, _ = _optimizer(work)
    return StateMemory(
        parameters=numel * work.compute_itemsize + part * master,
        gradients=numel * work.reduce_itemsize,
        optimizer=part * state,
        gradients_whole=True,
        unsharded=0,
        unsharded_at_loss=0,
        buffers=0,
        step=0,
        inputs={"parameters": numel, "of them with optimizer state": part},
    )


@dataclass(frozen=True)
class Memory:
    """Of one GPU at its peak.

    Attributes:
        terms: bytes by component at the moment of the peak; they add up to ``allocated``.
        beyond: what is reserved and needed beyond them.
        moment: "loss", "backward", "end of backward" or "optimizer".
        reserved: what the caching allocator holds: allocated and its gaps.
        upper: with what isn't known: other allocations and larger gaps.
        needed: reserved, the device's context and communicators: what must fit.
        capacity: of the GPU.
    """

    terms: dict[str, Term]
    beyond: tuple[Term, ...]
    moment: str
    allocated: float
    reserved: float
    upper: float
    needed: float
    capacity: float

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity


def memory_of(
    model: ModelSpec,
    layout: MeshLayout,
    cluster: Cluster,
    work: Workload,
    micro_batch: int,
    accumulation: int,
) -> Memory:
    """At the peak of a step, from the second on, when the optimizer has its state."""
    state = state_memory(model, layout, work)
    kept = activations_of(model, cluster.gpu, work, layout.tp, micro_batch)
    moments = _moments(state, kept, accumulation)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    terms = {
        name: Term(
            name,
            float(value),
            "B",
            _FORMULAS[name],
            _inputs(name, state, kept, model, work, micro_batch),
        )
        for name, value in moments[moment].items()
    }
    allocated = sum(term.value for term in terms.values())
    beyond = _beyond(allocated)
    reserved = allocated + beyond[0].value + beyond[1].value
    return Memory(
        terms=terms,
        beyond=beyond,
        moment=moment,
        allocated=allocated,
        reserved=reserved,
        upper=reserved + allocated * (constant("gaps_upper").value - constant("gaps").value),
        needed=reserved + beyond[2].value,
        capacity=cluster.gpu.capacity_gib * 2**30,
    )


def _beyond(allocated: float) -> tuple[Term, Term, Term]:
    """The allocator's gaps, workspaces, and what is outside the allocator."""
    gaps, workspace, context = (constant(name) for name in ("gaps", "workspace", "context"))
    given = (("gaps", gaps), ("allocated", allocated))
    return (
        Term("gaps", allocated * gaps.value, "B", "gaps * allocated", given),
        Term("workspace", workspace.value, "B", "workspace", (("workspace", workspace),)),
        Term("context", context.value, "B", "context", (("context", context),)),
    )


def _moments(
    state: StateMemory, kept: Activations, accumulation: int
) -> dict[str, dict[str, float]]:
    """The components at each moment that can be the peak."""
    resident = {"parameters": state.parameters, "optimizer": state.optimizer}
    before = state.gradients if accumulation > 1 or state.gradients_whole else 0
    return {
        "loss": {
            **resident,
            "gradients": before,
            "unsharded groups": state.unsharded_at_loss,
            "activations": kept.kept + kept.gathered,
            "logits and loss": kept.logits,
        },
        "backward": {
            **resident,
            "gradients": before,
            "unsharded groups": state.unsharded,
            "gather and reduce buffers": state.buffers + state.waiting,
            "activations": kept.kept + kept.block + kept.gathered,
        },
        "end of backward": {
            **resident,
            "gradients": state.gradients,
            "unsharded groups": state.unsharded,
            "gather and reduce buffers": state.buffers
            + (state.results_again if accumulation > 1 else state.results),
            "activations": kept.block + kept.gathered,
        },
        "optimizer": {
            **resident,
            "gradients": state.gradients,
            "optimizer's temporaries": state.step,
        },
    }


_FORMULAS = {
    "parameters": "sum over units of a rank's part of each parameter, at rest",
    "optimizer": "optimizer's bytes a parameter * a rank's parameters",
    "gradients": "as parameters at rest, between reduction and zero_grad",
    "unsharded groups": "parameters of the units that are whole at the peak, compute dtype",
    "gather and reduce buffers": "of the units in flight",
    "activations": "sum over units of what forward keeps + one block computed again + gathered inputs",
    "logits and loss": "micro_batch * seq_len * vocab * bytes a logit / (tp if loss_parallel)",
    "optimizer's temporaries": "what the optimizer's step allocates",
}


def _inputs(
    name: str,
    state: StateMemory,
    kept: Activations,
    model: ModelSpec,
    work: Workload,
    micro_batch: int,
) -> tuple[tuple[str, float | int | str], ...]:
    if name == "activations":
        return (
            ("kept", kept.kept),
            ("computed again", kept.block),
            ("gathered", kept.gathered),
            ("checkpointing", work.checkpointing),
        )
    if name == "logits and loss":
        return (
            ("micro_batch", micro_batch),
            ("seq_len", work.seq_len),
            ("vocab", model.vocab),
            ("bytes a logit", logit_bytes(work)),
            ("loss_parallel", str(work.loss_parallel)),
        )
    return tuple((key, value) for key, value in state.inputs.items())
