"""Bytes on the fullest GPU: state and buffers of the engine, activations, logits, what a framework adds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from parallel3d.fsdp.layout import ACCELERATOR_BYTES
from parallel3d.mesh import MeshLayout
from parallel3d.planner.constants import Term, constant
from parallel3d.planner.engine import UnitLayout, Widths, each_unit, run_backward, unit_layout
from parallel3d.planner.kernels import Activations, activations_of, logit_bytes
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.workload import Step, Workload

# Bytes of parameters, gradients, optimizer state, unsharded parameters and buffers, as the engine allocates
# them.


@dataclass(frozen=True)
class StateMemory:
    """Bytes on the rank with most of them, which is the first.

    Attributes:
        parameters, gradients, optimizer: bytes at rest, after a step. The optimizer's step counters, which
            are on the CPU, are not counted.
        keeps_gradients: whether gradients are allocated during the whole step (ZeRO-1, DDP).
        unsharded: unsharded parameters at the moment of a backward at which their sum with ``buffers`` is
            largest.
        buffers: at that moment, buffers of all-gathers, unreduced gradients and inputs of reductions.
        unsharded_at_loss: unsharded parameters at the end of forward.
        results: results of reductions in another dtype, at the end of a backward, beyond ``gradients``.
        results_again: the same where they are added to the gradients of an earlier micro-batch.
        waiting: gradients of tied weights, which autograd holds from the head's backward to the embedding's.
        step: bytes that the optimizer's step allocates temporarily.
        inputs: the numbers that these were computed from.
    """

    parameters: int
    gradients: int
    optimizer: int
    keeps_gradients: bool = False
    unsharded: int = 0
    unsharded_at_loss: int = 0
    buffers: int = 0
    step: int = 0
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
    """Returns the bytes of state and buffers of ``model`` on ``layout``, which must be resolved.

    Args:
        zero_copy_bytes: unsharded bytes from which a parameter is zero-copy; by default the engine's number
            for accelerators.
        streams: whether the device has streams, as accelerators have.
    """
    if work.sharding != "fsdp":
        return _unsharded_state(model, layout, work)
    hybrid = work.is_hybrid(layout.replicate)
    rest = work.compute_itemsize if hybrid else work.param_itemsize  # what is gathered
    widths = Widths(rest, work.compute_itemsize, work.reduce_itemsize)
    if hybrid:  # whose parameters are all copied in and out
        zero_copy_bytes = sys.maxsize
    sizes = layout.shard * layout.cp, layout.tp, widths.rest
    layouts = tuple(
        unit_layout(u, *sizes, work.sequence_parallel, zero_copy_bytes, layout.ep)
        for u in model.units
    )
    unsharded, buffers, at_loss = run_backward(layouts, widths, work.reshard_after_forward, streams)
    buckets = [bucket for unit in each_unit(layouts) for bucket in unit.buckets]
    ranks = layout.replicate if hybrid else 1
    copied = sum(bucket.numel for bucket in buckets) * hybrid
    numel = sum(ceil(bucket.numel / ranks) for bucket in buckets)
    trained = sum(ceil(bucket.numel / ranks) for bucket in buckets if bucket.trainable)
    # AdamW's foreach implementation, which is the default on accelerators, makes the square roots of all
    # second moments at once; SGD's step allocates nothing.
    step = work.param_itemsize if work.optimizer in ("adam", "adamw") else 0
    tied = [p.numel for u in model.units if u.kind == "root" for p in u.parameters if p.trainable]
    blocks = [unit.unsharded_numel for unit in layouts if unit.kind == "block"]
    return StateMemory(
        parameters=numel * work.param_itemsize + copied * work.compute_itemsize,
        gradients=trained * work.param_itemsize,
        optimizer=trained * work.optimizer_bytes,
        unsharded=unsharded,
        unsharded_at_loss=at_loss,
        buffers=buffers,
        step=trained * step,
        results=_results(layouts, widths),
        results_again=_results(layouts, widths, again=True),
        waiting=max(tied, default=0) // layout.tp * work.compute_itemsize if model.tied else 0,
        inputs={
            "parameters of a rank": numel,
            "of them trained": trained,
            "shard": layout.shard,
            **({"cp": layout.cp} if layout.cp > 1 else {}),
            "tp": layout.tp,
            **({"ep": layout.ep} if layout.ep > 1 else {}),
            **({"copied, in the compute dtype": copied} if hybrid else {}),
            "unsharded block": max(blocks, default=0),
        },
    )


def _results(layouts: Sequence[UnitLayout], widths: Widths, *, again: bool = False) -> int:
    """Returns the bytes of results of reductions that exist in addition to the gradients.

    All results are held until the end of the backward. Then each is cast to a gradient, and freed after that.

    Args:
        again: whether each result is added to an existing gradient.
    """
    rest, reduce = widths.rest, widths.reduce
    sizes = [
        bucket.numel
        for unit in reversed(each_unit(layouts))
        for bucket in unit.buckets
        if bucket.trainable
    ]
    total = most = reduce * sum(sizes)
    if rest == reduce:
        return most if again else 0
    for size in sizes:
        most = max(most, total + rest * size)
        total -= reduce * size if again else (reduce - rest) * size
    return most if again else max(0, most - rest * sum(sizes))


def _unsharded_state(model: ModelSpec, layout: MeshLayout, work: Workload) -> StateMemory:
    """Returns the state of ZeRO-1 (unsharded parameters and gradients; fp32 copies and optimizer state
    sharded over ``replicate``) or of DDP.

    The engine has neither. Frameworks that do (Megatron-LM, DeepSpeed) step by fused kernels, in place.
    """
    layouts = [
        unit_layout(u, 1, layout.tp, work.param_itemsize, work.sequence_parallel, ACCELERATOR_BYTES)
        for u in model.units
    ]
    numel = sum(unit.count * unit.unsharded_numel for unit in layouts)
    part = ceil(numel / (layout.replicate if work.sharding == "zero1" else 1))
    master = work.param_itemsize if work.compute_itemsize != work.param_itemsize else 0
    return StateMemory(
        parameters=numel * work.compute_itemsize + part * master,
        gradients=numel * work.reduce_itemsize,
        optimizer=part * work.optimizer_bytes,
        keeps_gradients=True,
        inputs={"parameters": numel, "of them with optimizer state": part},
    )


@dataclass(frozen=True)
class PredictedMemory:
    """Memory of one GPU at its peak, in bytes.

    Attributes:
        terms: bytes by component, at the moment of the peak; they add up to ``allocated``.
        beyond: bytes that are needed in addition: fragmentation, workspaces, the context.
        moment: "loss", "backward", "end of backward" or "optimizer".
        reserved: bytes that the caching allocator reserves if the GPU has room: ``allocated``, fragmentation
            and workspaces.
        upper: an upper bound of ``reserved``, for more fragmentation and allocations that are not modelled.
        needed: bytes that must fit: ``allocated``, the least fragmentation, workspaces, the context and
            communicators.
        capacity: the GPU's memory.
        host: activations of this GPU in the host's memory.
        host_capacity: bytes of the host's memory that are available for them per GPU (``host_part``).
    """

    terms: dict[str, Term]
    beyond: tuple[Term, ...]
    moment: str
    allocated: float
    reserved: float
    upper: float
    needed: float
    capacity: float
    host: float = 0.0
    host_capacity: float = 0.0

    @property
    def upper_needed(self) -> float:
        """``upper`` with what ``needed`` counts and ``reserved`` doesn't: the context and communicators."""
        return self.upper + next(term.value for term in self.beyond if term.name == "context")

    @property
    def part(self) -> float:
        """What is needed, as a part of the memory there is: the GPU's or, if that is more, the host's."""
        host = self.host / self.host_capacity if self.host else 0.0
        return max(self.needed / self.capacity, host)

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity and self.host <= self.host_capacity


def memory_of(step: Step) -> PredictedMemory:
    """The memory at the peak of a step, from the second on, when the optimizer has its state."""
    model, work, gpu = step.model, step.workload, step.cluster.gpu
    layout = step.layout
    state = state_memory(model, layout, work)
    kept = activations_of(model, step.local)
    moments = _moments(state, kept, step.accumulation, _last(model))
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    inputs: dict[str, Mapping[str, float | str]] = {
        "activations": {
            "kept": kept.kept,
            "computed again": kept.block,
            "gathered": kept.gathered,
            "gradients of activations": kept.gradients,
            "checkpointing": work.checkpointing,
            **({"on the host": kept.host} if kept.host else {}),
        },
        "logits and loss": {
            "micro_batch": step.micro_batch,
            "tokens of a sequence": work.local_tokens(layout.cp),
            "vocab": model.vocab,
            "bytes a logit": logit_bytes(step.local),
            "loss_parallel": str(work.loss_parallel),
            **(
                {"chunked": "a chunk's logits and the fp32 sum of the head's gradient"}
                if work.chunked_loss
                else {}
            ),
        },
    }
    terms = {
        name: Term(name, float(value), _FORMULAS[name], inputs.get(name, state.inputs), "B")
        for name, value in moments[moment].items()
    }
    allocated = sum(term.value for term in terms.values())
    fragmentation, least, workspace, context = (
        constant(name) for name in ("fragmentation", "fragmentation_least", "workspace", "context")
    )
    lost = allocated * least.value
    reserved = allocated * (1 + fragmentation.value) + workspace.value
    return PredictedMemory(
        terms=terms,
        beyond=(
            Term(
                "fragmentation",
                lost,
                "fragmentation_least * allocated",
                {"fragmentation_least": least, "allocated": allocated},
                "B",
            ),
            Term("workspace", workspace.value, "workspace", {"workspace": workspace}, "B"),
            Term("context", context.value, "context", {"context": context}, "B"),
        ),
        moment=moment,
        allocated=allocated,
        reserved=reserved,
        upper=reserved + allocated * (constant("fragmentation_upper").value - fragmentation.value),
        needed=allocated + lost + workspace.value + context.value,
        capacity=gpu.capacity_gib * 2**30,
        host=float(kept.host),
        host_capacity=gpu.host_gib * 2**30 * constant("host_part").value,
    )


def _moments(
    state: StateMemory, kept: Activations, accumulation: int, last: float
) -> dict[str, dict[str, float]]:
    """Returns for each moment that can be the peak its components in bytes: moment -> component -> bytes.

    Args:
        last: the fraction of the parameters, see ``_last``, whose gradients do not exist yet when the first
            block's backward begins. All activations but that block's are freed then.
    """
    before = state.gradients if accumulation > 1 or state.keeps_gradients else 0
    results = state.results_again if accumulation > 1 else state.results
    moments: dict[str, tuple[float | None, ...]] = {
        "loss": (before, state.unsharded_at_loss, None, kept.kept + kept.gathered, kept.logits),
        "backward": (
            *(before, state.unsharded, state.buffers + state.waiting),
            kept.kept + kept.block + kept.gathered + kept.gradients,
        ),
        "the first block's backward": (
            max(before, state.gradients * (1 - last)),
            *(state.unsharded, state.buffers + results),
            kept.block + kept.gathered + kept.gradients,
        ),
        "end of backward": (
            state.gradients,
            state.unsharded,
            state.buffers + results,
            kept.gathered,
        ),
        "optimizer": (state.gradients, None, None, None, None, state.step),
    }
    return {
        moment: {
            name: value
            for name, value in zip(
                _FORMULAS, (state.parameters, state.optimizer, *values), strict=False
            )
            if value is not None
        }
        for moment, values in moments.items()
    }


def _last(model: ModelSpec) -> float:
    """The fraction of the parameters that one block and the units before the blocks have together."""
    of_blocks = [unit.numel for unit in model.units if unit.kind == "block"]
    before = sum(
        unit.count * unit.numel for unit in model.units if unit.kind in ("root", "embedding")
    )
    return (before + min(of_blocks, default=0)) / max(model.numel, 1)


_CHUNKS = (
    "the logits of one, of as many elements as the hidden states, and an fp32 gradient of the head"
)
_FORMULAS = {
    "parameters": "sum over units of a rank's part of each parameter, at rest",
    "optimizer": "optimizer's bytes a parameter * a rank's parameters",
    "gradients": "as parameters at rest, between reduction and zero_grad",
    "unsharded parameters": "parameters of the units that are whole at the peak, compute dtype",
    "gather and reduce buffers": "of the units in flight",
    "activations": "sum over units of what forward keeps + one block computed again, its gradients, gathered",
    "logits and loss": "micro_batch * tokens of a sequence * vocab * bytes a logit / (tp if loss_parallel)",
    "optimizer's temporaries": "what the optimizer's step allocates",
}
