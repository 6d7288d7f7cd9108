"""Workload: what is trained, apart from the model and the machines. Step: all of them together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.arguments import check_choice, check_size
from parallel3d.planner.cluster import AxisLink, Cluster, Gpu, experts_link, link_of, shard_link
from parallel3d.planner.model_spec import ModelSpec
from parallel3d.planner.recompute import KINDS
from parallel3d.planner.routing import popularity
from parallel3d.planner.stacks import OURS, Stack, stack_of

CHECKPOINTING = tuple(KINDS)
"""What ``Workload.checkpointing`` may be: which activations are recomputed in backward."""
CP_ATTENTION = ("ulysses", "gather", "ring")
ATTENTION = ("naive", "flash1", "triton", "flash2", "flash3", "cudnn")
SHARDING = ("fsdp", "zero1", "ddp")
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_OPTIMIZERS = {"adamw": 8, "adam": 8, "sgd": 0, "sgd_momentum": 4, "adamw_8bit": 2}
_CHOICES = {
    "precision": _BYTES,
    "param_dtype": _BYTES,
    "reduce_dtype": _BYTES,
    "optimizer": _OPTIMIZERS,
    "checkpointing": CHECKPOINTING,
    "attention": (None, *ATTENTION),
    "cp_attention": ("auto", *CP_ATTENTION),
    "sharding": SHARDING,
}


@dataclass(frozen=True)
class Workload:
    """One training setup.

    Attributes:
        seq_len: tokens of a sequence.
        micro_batch: sequences per data rank (a tp group) and forward; None: the planner chooses.
        global_batch: sequences per optimizer step; None: one micro-batch on each data rank.
        precision: dtype of the computation.
        float8: linear layers of blocks multiply in float8, as torchao's do; attention and the head don't.
        param_dtype: dtype of parameters, gradients and optimizer state at rest.
        reduce_dtype: dtype in which gradients are reduced.
        optimizer: "adamw" (8 bytes of state a parameter), "sgd_momentum" (4), "sgd" (0), "adamw_8bit" (2).
        checkpointing: activation checkpointing. As ``parallelize`` has it: "none"; "selective" (results of
            matmuls, attention and collectives are kept, the rest is computed again); "offload" (what a block
            keeps is copied to the host's memory); "full" (each block is computed again). Only in other
            frameworks: "full_offload" (full, with the blocks' inputs on the host), "selective_layer" (every
            second block is computed again), "selective_op" (the results of every second matmul are kept).
        compile: torch.compile of each block: elementwise ops are fused.
        attention: the kernel; "naive" materializes the scores. None: cudnn on Hopper and Blackwell, else
            flash2.
        cp_attention: how attention communicates over ``cp``: "ulysses" (all-to-alls between heads and
            sequence), "gather" (an all-gather of keys and values), "ring" (keys and values are sent from rank
            to rank), "auto" (the library chooses).
        fused_norm: norms are one kernel also without ``compile``.
        fused_loss: the loss keeps no fp32 copies of the logits: one fp32 softmax, its gradient in place.
        chunked_loss: ``parallelize(loss_parallel="chunked")``: loss and backward compute the logits of some
            tokens at a time, the backward once more.
        sequence_parallel: norms and residuals are divided over ``tp``.
        loss_parallel: logits and loss are divided over ``tp``.
        reshard_after_forward: parameters are freed between forward and backward.
        shard_optimizer_over_replicate: HFSDP: parameters, gradients and optimizer state are sharded over
            replicate as well, and a copy in the compute dtype over shard alone.
        routing: how tokens are spread over experts that ``ep`` divides, whose fullest rank decides: "uniform"
            (balanced), "zipf:1.2" (the n-th most popular expert is n^-1.2 times as popular as the first),
            "hot" (one expert that every token goes to).
        stack: the software that trains, by its name in stacks.toml, or a ``Stack``; this library by default.
        sharding: "fsdp" over ``shard``; "zero1": parameters unsharded, the optimizer's state sharded over
            ``replicate``; "ddp": nothing sharded.

    Raises:
        PlanningError: a value is not one of those listed, or not positive.
    """

    seq_len: int
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str = "bf16"
    float8: bool = False
    param_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    optimizer: str = "adamw"
    checkpointing: str = "none"
    compile: bool = False
    attention: str | None = None
    cp_attention: str = "auto"
    fused_norm: bool = True
    fused_loss: bool = False
    chunked_loss: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = True
    reshard_after_forward: bool = True
    shard_optimizer_over_replicate: bool = False
    routing: str = "uniform"
    sharding: str = "fsdp"
    stack: str | Stack = OURS

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            check_choice(name, getattr(self, name), known)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and type(value) is not bool:
                raise PlanningError(f"{field.name} is {value!r}; it must be True or False")
        check_size("seq_len", self.seq_len)
        popularity(self.routing)
        stack_of(self.stack)
        for name in ("micro_batch", "global_batch"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))

    @property
    def profile(self) -> Stack:
        """The ``Stack`` of ``stack``."""
        return stack_of(self.stack)

    def is_hybrid(self, replicate: int) -> bool:
        """Whether HFSDP shards something over ``replicate``."""
        return self.shard_optimizer_over_replicate and self.sharding == "fsdp" and replicate > 1

    def local_tokens(self, cp: int) -> int:
        """Tokens of a sequence on one rank of ``cp``, padding included: two of 2 cp equal parts."""
        return self.seq_len if cp == 1 else 2 * -(-self.seq_len // (2 * cp))

    @property
    def compute_itemsize(self) -> int:
        """Bytes of a number while computing."""
        return _BYTES[self.precision]

    @property
    def param_itemsize(self) -> int:
        """Bytes of a parameter at rest."""
        return _BYTES[self.param_dtype]

    @property
    def reduce_itemsize(self) -> int:
        """Bytes of a gradient while it is reduced."""
        return _BYTES[self.reduce_dtype]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state a parameter."""
        state = _OPTIMIZERS[self.optimizer]
        return state if self.optimizer == "adamw_8bit" else state * self.param_itemsize // 4


class Local(NamedTuple):
    """The share of a micro-batch that one GPU computes.

    Attributes:
        tp: number of GPUs over which layers are divided.
        cp: number of GPUs over which each sequence is divided.
        micro_batch: number of sequences.
        ep: number of GPUs over which experts are divided.
    """

    gpu: Gpu
    work: Workload
    tp: int = 1
    micro_batch: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.work.local_tokens(self.cp)


@dataclass(frozen=True)
class Step:
    """An optimizer step.

    Attributes:
        layout: resolved.
        micro_batch: sequences per data rank and forward.
        accumulation: micro-batches per step.
    """

    model: ModelSpec
    layout: MeshLayout
    cluster: Cluster
    workload: Workload
    micro_batch: int
    accumulation: int

    @cached_property
    def local(self) -> Local:
        """What a GPU has of a micro-batch."""
        layout = self.layout
        sizes = layout.tp, self.micro_batch, layout.cp, layout.ep
        return Local(self.cluster.gpu, self.workload, *sizes)

    @cached_property
    def links(self) -> dict[str, AxisLink]:
        """How the ranks of each axis lie on nodes; those of shard with cp's, which share parameters; of efsdp
        those that share the parameters of one rank's experts."""
        axes = ("replicate", "cp", "tp", "ep")
        links = {axis: link_of(self.layout, axis, self.cluster) for axis in axes}
        links["efsdp"] = experts_link(self.layout, self.cluster)
        return links | {"shard": shard_link(self.layout, self.cluster)}
