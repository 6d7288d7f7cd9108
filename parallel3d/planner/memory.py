"""Bytes on the fullest GPU: state and buffers of the engine, activations, logits, what a framework adds."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.mesh import MeshLayout
from parallel3d.planner.activations import Activations, activations_of, logit_bytes
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.constants import constant
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.state_memory import StateMemory, state_memory
from parallel3d.planner.terms import Term
from parallel3d.planner.workload import Workload

__all__ = ["Memory", "memory_of"]


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
