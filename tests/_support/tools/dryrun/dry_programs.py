"""Programs for dry runs: the example's Llama on a mesh, some steps of it, with all that training does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from llama import SIZES, Llama, LlamaConfig
from plans import LLAMA_SEQUENCE_PLAN, LLAMA_TP_PLAN
from torch import nn
from training import Schedule, Trainer

import parallel3d as p3d
from parallel3d.testing import Collective, record_collectives


@dataclass(frozen=True)
class Training:
    """What is trained, on which mesh, how; it can be pickled.

    Attributes:
        mesh: replicate, shard, tp. rows: sequences of each data rank, in micro-batches of ``micro``.
    """

    mesh: tuple[int, int, int]
    sequence: bool = False
    rows: int = 4
    micro: int = 2
    steps: int = 2
    mixed: bool = True
    wire: bool = False
    recompute: bool = False
    tied: bool = False
    hfsdp: bool = False
    reshard: bool | None = None
    vocabulary: int = 256
    dim: int = 64
    hidden: int = 176
    size: str = "nano"
    layers: int = 2

    @property
    def config(self) -> LlamaConfig:
        if self.size != "nano":
            return replace(SIZES[self.size], n_layers=self.layers)
        return replace(
            SIZES["nano"],
            n_layers=self.layers,
            dim=self.dim,
            hidden_dim=self.hidden,
            vocab_size=self.vocabulary,
            tied=self.tied,
        )

    @property
    def layout(self) -> p3d.MeshLayout:
        return p3d.MeshLayout(*self.mesh)

    @property
    def world_size(self) -> int:
        return self.layout.world_size


def named(case: Training) -> str:
    """For the names of tests."""
    words = [word for word in ("sequence", "hfsdp", "recompute", "tied") if getattr(case, word)]
    return "-".join(["x".join(map(str, case.mesh)), *words])


def policy(case: Any) -> p3d.MixedPrecisionPolicy:
    """bf16 parameters and fp32 sums, if ``case.mixed``; gradients sent in bf16, if ``case.wire``."""
    if not (case.mixed or case.wire):
        return p3d.MixedPrecisionPolicy()
    return p3d.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if case.mixed else None,
        reduce_dtype=torch.float32,
        wire_dtype=torch.bfloat16 if case.wire else None,
    )


def parallel_llama(
    case: Any, mesh: Any, config: LlamaConfig, example: Any = None, **more: Any
) -> nn.Module:
    """The example's model, without values, parallel as ``case`` says; a ``Training`` is one.

    A dry run has no other rank to compare with, and no audit of the first step.
    """
    with torch.device("meta"):
        model = Llama(config)
    plan = LLAMA_SEQUENCE_PLAN if case.sequence else LLAMA_TP_PLAN
    return p3d.parallelize(
        model,
        mesh,
        tp_plan=plan if case.mesh[2] > 1 else None,
        mp_policy=policy(case),
        activation_checkpointing=case.recompute,
        fsdp=p3d.Sharding(
            reshard_after_forward=case.reshard, shard_optimizer_over_replicate=case.hfsdp
        ),
        checks=p3d.Checks(same_batch=False, audit=False, example=example),
        **more,
    )


def prepare(case: Training) -> tuple[nn.Module, Trainer, torch.distributed.DeviceMesh]:
    """The parallel model, its trainer, its mesh."""
    mesh = p3d.build_mesh(case.layout, device_type="cpu")
    model = parallel_llama(case, mesh, case.config)
    p3d.materialize(model, device="cpu", seed=1)
    trainer = Trainer(
        model,
        p3d.optim.clip_grad_norm_,
        Schedule(1e-3, case.steps),
        micro_batch=case.micro,
        accumulate=p3d.optim.accumulate,
    )
    return model, trainer, mesh


def train(case: Training) -> Trainer:
    """The whole program; the model and the optimizer are the trainer's."""
    _, trainer, _ = prepare(case)
    make_steps(case, trainer)
    return trainer


def make_steps(case: Training, trainer: Trainer) -> None:
    """The steps, on tokens that are the same on all ranks."""
    tokens = torch.arange(case.rows * 33).view(case.rows, 33) % case.vocabulary
    for _ in range(case.steps):
        trainer.step(tokens)


def recorded(case: Training) -> list[Collective]:
    """The collectives of the steps on real tensors; making the model has none."""
    _, trainer, mesh = prepare(case)
    with record_collectives(mesh) as recorder:
        make_steps(case, trainer)
    return recorder.calls
