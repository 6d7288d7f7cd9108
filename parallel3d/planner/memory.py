"""The bytes on the GPU that needs most: state and buffers of the engine, activations, logits, torch's own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from parallel3d.fsdp.layout import ACCELERATOR_BYTES, coalesced
from parallel3d.mesh import MeshLayout
from parallel3d.planner.constants import Constant, Term, constant
from parallel3d.planner.engine import (
    Played,
    UnitLayout,
    Widths,
    each_unit,
    local_numels,
    run_backward,
    unit_layout,
)
from parallel3d.planner.kernels import Activations, activations_of, logit_bytes
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.workload import Step, Workload

# Bytes of parameters, gradients, optimizer state, unsharded parameters and buffers, as the engine allocates
# them.


@dataclass(frozen=True)
class StateMemory:
    """Bytes of state and of the engine's buffers on the rank with most of them, the first.

    Attributes:
        parameters, gradients, optimizer: bytes at rest, after a step. The optimizer's step counters, which
            are on the CPU, are not counted.
        keeps_gradients: whether gradients stay allocated during the whole step (ZeRO-1, DDP).
        unsharded_gradients: unsharded gradients of all units, in the reduce dtype, that ``no_sync`` holds
            between micro-batches.
        played: unsharded parameters and buffers that a backward holds.
        results: results of reductions that are held until the end of a backward beside ``gradients``, because
            these have another dtype.
        results_again: the same, if the results are added to gradients of earlier micro-batches.
        waiting: the tied weight's gradient, held by autograd from the head's backward to the embedding's.
        step: bytes that the optimizer's step allocates temporarily.
        inputs: the sizes that these were computed from, to be shown.
    """

    parameters: int
    gradients: int
    optimizer: int
    played: Played
    keeps_gradients: bool = False
    unsharded_gradients: int = 0
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
    """Returns the bytes of state and buffers of ``model`` on the resolved ``layout``.

    Args:
        zero_copy_bytes: from this many unsharded bytes on a parameter is zero-copy: not packed for a
            collective; by default the engine's number for accelerators.
        streams: whether the device has streams, as accelerators have.
    """
    if work.sharding != "fsdp":
        return _unsharded_state(model, layout, work)
    hybrid = work.is_hybrid(layout.replicate)
    rest = work.compute_itemsize if hybrid else work.param_itemsize  # what is gathered
    is_sent = work.wire_dtype is not None and layout.data_size * layout.cp > 1
    wire = work.sent_itemsize if is_sent else 0
    widths = Widths(rest, work.compute_itemsize, work.reduce_itemsize, wire)
    if hybrid:  # whose parameters are all copied in and out
        zero_copy_bytes = sys.maxsize
    sizes = layout.shard * layout.cp, layout.tp, widths.rest
    layouts = tuple(
        unit_layout(u, *sizes, work.sequence_parallel, zero_copy_bytes, layout.ep)
        for u in model.units
    )
    played = run_backward(
        layouts, widths, work.reshard_after_forward, streams, work.memory == "static"
    )
    buckets = [bucket for unit in each_unit(layouts) for bucket in unit.buckets]
    ranks = layout.replicate if hybrid else 1
    copied = sum(bucket.numel for bucket in buckets) * hybrid
    numel = sum(ceil(bucket.numel / ranks) for bucket in buckets)
    frozen = sum(
        ceil(bucket.numel / ranks) * max(work.param_itemsize - bucket.own, 0)
        for bucket in buckets
        if not bucket.trainable
    )  # bytes by which frozen parameters are smaller than they would be if trained
    trained = sum(ceil(bucket.numel / ranks) for bucket in buckets if bucket.trainable)
    # AdamW's foreach implementation, which is the default on accelerators, makes the square roots of all
    # second moments at once; SGD's step allocates nothing.
    step = work.param_itemsize if work.optimizer in ("adam", "adamw") else 0
    tied = [p.numel for u in model.units if u.kind == "root" for p in u.parameters if p.trainable]
    blocks = [unit.unsharded_numel for unit in layouts if unit.kind == "block"]
    whole = sum(b.numel * b.num_shards for b in buckets if b.trainable)
    return StateMemory(
        parameters=numel * work.param_itemsize - frozen + copied * work.compute_itemsize,
        gradients=trained * work.param_itemsize,
        unsharded_gradients=whole * work.reduce_itemsize if work.no_sync else 0,
        optimizer=round(trained * work.optimizer_bytes),
        played=played,
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
    """Returns the bytes of reductions' results beside the gradients (cast, or added to if ``again``).

    All are held until the end of the backward. Then each is cast to a gradient and freed; those of unsharded
    buckets, which are reduced together, are freed together.
    """
    rest, reduce = widths.rest, widths.reduce
    buckets = [
        bucket
        for unit in reversed(each_unit(layouts))
        for bucket in unit.buckets
        if bucket.trainable
    ]
    sizes = [bucket.numel for bucket in buckets]
    total = most = reduce * sum(sizes)
    if rest == reduce:
        return most if again else 0
    kinds = [None if bucket.num_shards == 1 else index for index, bucket in enumerate(buckets)]
    for group in coalesced([reduce * size for size in sizes], kinds):
        together = [sizes[index] for index in group]
        size = sum(together)
        most = max(most, total + rest * (max(together) if again else size))
        total -= reduce * size if again else (reduce - rest) * size
    return most if again else max(0, most - rest * sum(sizes))


def _unsharded_state(model: ModelSpec, layout: MeshLayout, work: Workload) -> StateMemory:
    """Returns the state with ZeRO-1 (parameters and gradients whole; fp32 copies and optimizer state sharded
    over the ranks with the same parameters) or DDP, stepped by fused kernels that allocate nothing."""
    ranks = {"shard": layout.data_size * layout.cp}  # that have the same parameters
    ranks["efsdp"] = ranks["shard"] * layout.tp // layout.ep
    sizes, numel = dict.fromkeys(ranks, 0), 0
    for unit in model.units:
        for axis, (every, trained) in local_numels(unit, layout).items():
            numel += unit.count * every
            sizes[axis] += unit.count * trained
    is_zero1 = work.sharding == "zero1"
    part = sum(ceil(own / (ranks[axis] if is_zero1 else 1)) for axis, own in sizes.items())
    master = work.param_itemsize if work.compute_itemsize != work.param_itemsize else 0
    return StateMemory(
        parameters=numel * work.compute_itemsize + part * master,
        gradients=sum(sizes.values()) * work.reduce_itemsize,
        optimizer=round(part * work.optimizer_bytes),
        played=Played(0, 0, 0),
        keeps_gradients=True,
        inputs={"parameters": numel, "of them with optimizer state": part},
    )


@dataclass(frozen=True)
class PredictedMemory:
    """Memory of one GPU at its peak, in bytes.

    Attributes:
        terms: bytes by component, at the moment of the peak; they add up to ``allocated``.
        beyond: bytes needed in addition: fragmentation, workspaces, the CUDA context.
        moment: when the peak is: "loss", "backward", "the first block's backward", "end of backward" or
            "optimizer".
        reserved: bytes that the caching allocator reserves if it has room: ``allocated``, the usual
            fragmentation, workspaces.
        upper: an upper bound of ``reserved``, for more fragmentation and allocations that are not modelled.
        needed: bytes that must fit: ``allocated``, the least fragmentation, workspaces, the context and
            communicators.
        capacity: the GPU's memory.
        host: bytes of this GPU's activations in the host's memory.
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
        """``upper`` plus the context and communicators, which ``needed`` includes as well."""
        return self.upper + next(term.value for term in self.beyond if term.name == "context")

    @property
    def counts(self) -> dict[str, dict[str, float]]:
        """What ``needed``, ``reserved`` and ``upper_needed`` consist of: each name -> part -> bytes.

        All have allocated bytes, fragmentation (the least, the usual, the most) and workspaces. ``reserved``
        predicts ``torch.cuda.memory_reserved()``, which doesn't include the context.
        """
        beyond = {term.name: term.value for term in self.beyond}
        known = {"allocated": self.allocated, "workspace": beyond["workspace"]}
        found = {}
        for name in ("needed", "reserved", "upper_needed"):
            own = dict(known) if name == "reserved" else known | {"context": beyond["context"]}
            fragmentation = getattr(self, name) - sum(own.values())
            found[name] = {"allocated": own.pop("allocated"), "fragmentation": fragmentation, **own}
        return found

    def part(self, limit: float | None = None) -> float:
        """Returns the needed fraction of the memory, on the GPU or the host, whichever is fuller.

        Args:
            limit: bytes of the GPU that may be used; by default all.
        """
        host = self.host / self.host_capacity if self.host else 0.0
        return max(self.needed / (limit or self.capacity), host)

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity and self.host <= self.host_capacity


def memory_of(step: Step, in_flight: float = 1.0) -> PredictedMemory:
    """Returns the memory at the peak of a step, from the second step on, when the optimizer has its state.

    Args:
        in_flight: micro-batches whose activations are kept at the same time: several in a pipeline.
    """
    model, work, gpu = step.model, step.workload, step.cluster.gpu
    layout = step.layout
    state = state_memory(model, layout, work)
    kept = activations_of(model, step.local)
    kept = replace(kept, kept=int(kept.kept * in_flight), host=int(kept.host * in_flight))
    moments = _moments(state, kept, step.accumulation, _last(model))
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    inputs: dict[str, Mapping[str, float | str]] = {
        "activations": {
            "kept": kept.kept,
            **({"micro-batches in flight": in_flight} if in_flight != 1 else {}),
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
            **({"chunked": _CHUNKS} if work.chunked_loss else {}),
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
    in_one_piece = sum(state.played.fixed)  # static memory
    comes_and_goes = allocated - in_one_piece
    lost = comes_and_goes * least.value
    reserved = allocated + comes_and_goes * fragmentation.value + workspace.value
    formula = f"fragmentation_least * {'(allocated - fixed)' if in_one_piece else 'allocated'}"
    about: dict[str, float | str | Constant] = {
        "fragmentation_least": least,
        "allocated": allocated,
    }
    about |= {"fixed": in_one_piece} if in_one_piece else {}
    return PredictedMemory(
        terms=terms,
        beyond=(
            Term("fragmentation", lost, formula, about, "B"),
            *(Term(c.name, c.value, c.name, {c.name: c}, "B") for c in (workspace, context)),
        ),
        moment=moment,
        allocated=allocated,
        reserved=reserved,
        upper=reserved
        + comes_and_goes * (constant("fragmentation_upper").value - fragmentation.value),
        needed=allocated + lost + workspace.value + context.value,
        capacity=gpu.capacity_gib * 2**30,
        host=float(kept.host),
        host_capacity=gpu.host_gib * 2**30 * constant("host_part").value,
    )


def _moments(
    state: StateMemory, kept: Activations, accumulation: int, last: float
) -> dict[str, dict[str, float]]:
    """Returns moment at which memory may peak -> component -> bytes. ``last``: fraction of the parameters
    that have no gradient yet when the first block's backward begins."""
    before = state.gradients if accumulation > 1 or state.keeps_gradients else 0
    if state.unsharded_gradients and accumulation > 1:  # each becomes a shard when it is reduced
        before = state.unsharded_gradients
    results = state.results_again if accumulation > 1 else state.results
    played = state.played
    unsharded, buffers = (fixed or None for fixed in played.fixed)
    moments: dict[str, tuple[float | None, ...]] = {
        "loss": (before, played.at_loss, buffers, kept.kept + kept.gathered, kept.logits),
        "backward": (
            *(before, played.unsharded, played.buffers + state.waiting),
            kept.kept + kept.block + kept.gathered + kept.gradients,
        ),
        "the first block's backward": (
            max(before, state.gradients * (1 - last)),
            *(played.unsharded, played.buffers + results),
            kept.block + kept.gathered + kept.gradients,
        ),
        "end of backward": (
            *(state.gradients, played.unsharded, played.buffers + results, kept.gathered),
        ),
        "optimizer": (state.gradients, unsharded, buffers, None, None, state.step),
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
    """Returns the fraction of the parameters that are in the first block and in the units before it."""
    of_blocks = [unit.numel for unit in model.units if unit.kind == "block"]
    before = sum(
        unit.count * unit.numel for unit in model.units if unit.kind in ("root", "embedding")
    )
    return (before + min(of_blocks, default=0)) / max(model.numel, 1)


_CHUNKS = "a chunk's logits and the fp32 sum of the head's gradient"
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
