"""Workload: how a model is trained. Step: a workload with the model, the layout and the machines."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import NamedTuple

from parallel3d.errors import PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.arguments import Mistakes, check_choice, check_flag, check_size
from parallel3d.planner.cluster import AxisLink, Cluster, Gpu, link_of
from parallel3d.planner.model_spec import BYTES as _BYTES
from parallel3d.planner.model_spec import Lora, ModelSpec, Parameter
from parallel3d.planner.pipeline import NO_PIPELINE, Pipeline
from parallel3d.planner.recompute import KINDS
from parallel3d.planner.routing import popularity
from parallel3d.planner.stacks import OURS, Stack, stack_of

CHECKPOINTING = tuple(KINDS)
"""What ``Workload.checkpointing`` may be: which activations are recomputed in backward."""
CP_ATTENTION = ("ulysses", "gather", "ring")
ATTENTION = ("naive", "flash1", "triton", "flash2", "flash3", "cudnn")
SHARDING = ("fsdp", "zero1", "ddp")
FLOAT8_SCALING = ("tensorwise", "rowwise", "blockwise")
MEMORY = ("on demand", "static")
_OPTIMIZERS: dict[str, float] = {"adamw": 8, "adam": 8, "sgd": 0, "sgd_momentum": 4}
# With the fp32 scales of blocks of 256 and 128 elements: whatever the dtype of parameters is.
_QUANTIZED = {"adamw_8bit": 2 + 2 * 4 / 256, "adamw_4bit": 1 + 2 * 4 / 128}
_CHOICES = {
    "precision": _BYTES,
    "param_dtype": _BYTES,
    "reduce_dtype": _BYTES,
    "wire_dtype": (None, "bf16", "fp32"),
    "optimizer": (*_OPTIMIZERS, *_QUANTIZED),
    "checkpointing": CHECKPOINTING,
    "attention": (None, *ATTENTION),
    "cp_attention": ("auto", *CP_ATTENTION),
    "sharding": SHARDING,
    "float8_scaling": FLOAT8_SCALING,
    "memory": MEMORY,
}


@dataclass(frozen=True)
class Workload:
    """How a model is trained: batch, dtypes, checkpointing, kernels, sharding.

    Attributes:
        seq_len: tokens of a sequence.
        micro_batch: sequences per data rank (a group of cp x tp ranks) and forward; None: the planner
            chooses.
        global_batch: sequences per optimizer step over all ranks; None: one micro-batch on each data rank.
        precision: dtype of the computation.
        float8: whether linear layers of blocks multiply in float8, as torchao's do; attention and the head
            don't.
        float8_scaling: what shares a scaling factor: "tensorwise" (a tensor), "rowwise" (a row), "blockwise"
            (MXFP8).
        param_dtype: dtype of parameters, gradients and optimizer state at rest.
        reduce_dtype: dtype in which gradients are reduced.
        wire_dtype: dtype in which all-to-alls send gradients, see ``MixedPrecisionPolicy``; None: the
            backend's own reduce-scatter in ``reduce_dtype``.
        optimizer: "adamw" (8 bytes of state per parameter), "sgd_momentum" (4), "sgd" (0), "adamw_8bit"
            (2.03), "adamw_4bit" (1.06).
        checkpointing: activation checkpointing. As ``parallelize`` has it: "none"; "selective" (results of
            matmuls, attention and collectives are kept, the rest is computed again); "offload" (what a block
            keeps is copied to the host's memory); "full" (each block is computed again). Only in other
            frameworks: "full_offload" (full, with the blocks' inputs on the host), "selective_layer" (every
            second block is computed again), "selective_op" (the results of every second matmul are kept).
        compile: torch.compile of each block, which fuses elementwise ops.
        attention: the attention kernel; "naive" materializes the scores. None: the stack's own, else cudnn on
            Hopper and Blackwell, else flash2.
        cp_attention: how attention communicates over ``cp``: "ulysses" (all-to-alls between heads and
            sequence), "gather" (an all-gather of keys and values), "ring" (keys and values are sent from rank
            to rank), "auto" (the stack's own).
        fused_norm: whether norms are one kernel even without ``compile``.
        fused_loss: the loss keeps no fp32 copies of the logits: one fp32 softmax, its gradient in place.
        fp32_logits: logits are cast to fp32 for the loss, as transformers and torchtitan do.
        tiled_mlp: MLPs process as many tokens at a time as there are hidden features, and repeat each tile's
            forward in backward (ALST of DeepSpeed, arXiv:2506.13996); only in other frameworks.
        chunked_loss: ``parallelize(loss_parallel="chunked")``: logits and loss are computed for some tokens
            at a time, and the logits again in backward.
        sequence_parallel: norms and residuals are divided over ``tp`` along the sequence.
        loss_parallel: logits and loss are divided over ``tp`` along the vocabulary.
        reshard_after_forward: parameters are freed between forward and backward.
        no_sync: gradients stay unsharded until a step's last micro-batch and are reduced then (``no_sync``,
            ``set_requires_gradient_sync``).
        shard_optimizer_over_replicate: HFSDP: parameters, gradients and optimizer state are sharded over
            shard and replicate; a copy of the parameters in the compute dtype is sharded over shard alone.
        memory: "static": the engine allocates its buffers once (``parallelize(memory="static")``).
        routing: how tokens are distributed over experts if ``ep`` divides them: "uniform" (equally),
            "zipf:1.2" (the n-th most popular expert is n^-1.2 times as popular as the first), "hot" (one
            expert gets every token).
        lora: adapters beside linear layers; only these are trained. None: all parameters are.
        stack: the training software: a name in stacks.toml or a ``Stack``; by default this library.
        sharding: "fsdp": over ``shard``; "zero1": only the optimizer state, over all ranks with the same
            parameters (experts over ``ep``); "ddp": nothing.

    Raises:
        PlanningError: a value is not one of those listed, or not positive.
    """

    seq_len: int
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str = "bf16"
    float8: bool = False
    float8_scaling: str = "tensorwise"
    param_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    wire_dtype: str | None = None
    optimizer: str = "adamw"
    checkpointing: str = "none"
    compile: bool = False
    attention: str | None = None
    cp_attention: str = "auto"
    fused_norm: bool = True
    fused_loss: bool = False
    fp32_logits: bool = True
    tiled_mlp: bool = False
    chunked_loss: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = True
    reshard_after_forward: bool = True
    no_sync: bool = False
    shard_optimizer_over_replicate: bool = False
    memory: str = "on demand"
    routing: str = "uniform"
    sharding: str = "fsdp"
    stack: str | Stack = OURS
    lora: Lora | None = None

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        for name, known in _CHOICES.items():
            mistakes.of(partial(check_choice, name, getattr(self, name), known))
        for field in fields(self):
            if isinstance(field.default, bool):
                mistakes.of(partial(check_flag, field.name, getattr(self, field.name)))
        mistakes.of(self._check_wire)
        mistakes.of(self._check_memory)
        mistakes.of(self._check_float8)
        mistakes.of(lambda: popularity(self.routing))
        mistakes.of(lambda: stack_of(self.stack))
        if not isinstance(self.lora, Lora | None):
            mistakes.each.append(f"lora is {self.lora!r}; it must be a Lora(rank, targets) or None")
        for name in ("seq_len", "micro_batch", "global_batch"):
            if getattr(self, name) is not None or name == "seq_len":
                mistakes.of(partial(check_size, name, getattr(self, name)))
        mistakes.end()

    def _check_wire(self) -> None:
        if self.wire_dtype is None:
            return
        if self.sharding != "fsdp":
            raise PlanningError(
                f"wire_dtype is {self.wire_dtype!r} with sharding={self.sharding!r}; it is of this library's "
                'engine: leave it out, or use sharding="fsdp"'
            )
        if self.wire_dtype != self.reduce_dtype != "fp32":
            raise PlanningError(
                f"wire_dtype is {self.wire_dtype!r} and reduce_dtype {self.reduce_dtype!r}; what is sent is "
                'summed in a dtype that is no narrower: use reduce_dtype="fp32"'
            )

    def _check_memory(self) -> None:
        if self.memory == "static" and self.sharding != "fsdp":
            raise PlanningError(
                f'memory is "static" and sharding {self.sharding!r}: it is the sharding engine\'s; give '
                'sharding="fsdp", or memory="on demand"'
            )

    def _check_float8(self) -> None:
        if self.float8_scaling in FLOAT8_SCALING[1:] and not self.float8:
            raise PlanningError(
                f"float8_scaling is {self.float8_scaling!r} and float8 {self.float8}; give float8=True, or "
                "leave float8_scaling out"
            )

    @property
    def profile(self) -> Stack:
        """The ``Stack`` that ``stack`` names."""
        return stack_of(self.stack)

    @property
    def is_fused(self) -> bool:
        """Whether elementwise ops are fused, by torch.compile or by the stack's own kernels."""
        return self.compile or self.profile.fused

    def is_hybrid(self, replicate: int) -> bool:
        """Whether HFSDP is used and there are several replicas."""
        return self.shard_optimizer_over_replicate and self.sharding == "fsdp" and replicate > 1

    def local_tokens(self, cp: int) -> int:
        """Returns a rank's tokens of a sequence, padded so that it is two of 2 * cp equal parts."""
        return self.seq_len if cp == 1 else 2 * -(-self.seq_len // (2 * cp))

    @property
    def compute_itemsize(self) -> int:
        """Bytes of an element in computation."""
        return _BYTES[self.precision]

    @property
    def param_itemsize(self) -> int:
        """Bytes of an element of a trainable parameter at rest."""
        return _BYTES[self.param_dtype]

    def rest_itemsize(self, parameter: Parameter) -> int:
        """Returns the bytes of an element of ``parameter`` at rest; a frozen one may be smaller."""
        least = self.param_itemsize if parameter.trainable else parameter.itemsize
        return min(self.param_itemsize, least)

    @property
    def reduce_itemsize(self) -> int:
        """Bytes of an element of a gradient while it is reduced."""
        return _BYTES[self.reduce_dtype]

    @property
    def sent_itemsize(self) -> int:
        """Bytes of an element of a gradient while it is sent."""
        return _BYTES[self.wire_dtype or self.reduce_dtype]

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of optimizer state per parameter."""
        if self.optimizer in _QUANTIZED:
            return _QUANTIZED[self.optimizer]
        return _OPTIMIZERS[self.optimizer] * self.param_itemsize // 4


class Local(NamedTuple):
    """What one GPU computes of a micro-batch: the workload, and the sizes of the axes that divide it.

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
    """An optimizer step: the model, its workload, and the layout and machines that it runs on.

    Attributes:
        layout: the resolved mesh; with a pipeline, of one stage.
        micro_batch: sequences per data rank and forward.
        accumulation: micro-batches per step.
        pipeline: the pipeline's stages, each of which has a mesh ``layout``.
    """

    model: ModelSpec
    layout: MeshLayout
    cluster: Cluster
    workload: Workload
    micro_batch: int
    accumulation: int
    pipeline: Pipeline = NO_PIPELINE

    @cached_property
    def local(self) -> Local:
        """What one GPU computes of a micro-batch."""
        layout = self.layout
        sizes = layout.tp, self.micro_batch, layout.cp, layout.ep
        return Local(self.cluster.gpu, self.workload, *sizes)

    @cached_property
    def links(self) -> dict[str, AxisLink]:
        """Axis -> how the ranks of its groups are distributed over nodes, see ``link_of``."""
        sharded = self.workload.sharding == "fsdp"
        axes = ("replicate", "shard", "cp", "tp", "ep", "efsdp")
        return {axis: link_of(self.layout, axis, self.cluster, sharded=sharded) for axis in axes}
