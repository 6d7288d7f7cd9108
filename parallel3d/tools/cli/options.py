"""The options that commands share, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from parallel3d.errors import PlanningError
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.workload import ATTENTION, CHECKPOINTING, SHARDING, Workload

_MODEL, _CLUSTER, _WORK, _LAYOUT, _SHOW = "Model", "Cluster", "Workload", "Layout", "Output"


def _option(*names: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, **more)


ModelName = Annotated[
    str | None,
    _option(
        "--model",
        panel=_MODEL,
        help="A name such as llama-3.1-8b, a Hugging Face config.json, or shapes: "
        "layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256.",
    ),
]

GpuName = Annotated[
    str | None, _option("--gpu", panel=_CLUSTER, help="For example h100-80gb-sxm, a100, h200.")
]
Nodes = Annotated[int, _option("--nodes", panel=_CLUSTER, help="How many nodes.")]
GpusPerNode = Annotated[
    int | None,
    _option("--gpus-per-node", panel=_CLUSTER, help="The GPU's usual number if not given."),
]
Nic = Annotated[
    float | None,
    _option("--nic", panel=_CLUSTER, help="GB/s from each GPU to other nodes, one direction."),
]
Profile = Annotated[
    Path | None,
    _option(
        "--profile", panel=_CLUSTER, help="A TOML file with more GPUs, in hardware.toml's form."
    ),
]

SeqLen = Annotated[int | None, _option("--seq-len", panel=_WORK, help="Tokens of a sequence.")]
GlobalBatch = Annotated[
    int | None, _option("--global-batch", panel=_WORK, help="Sequences per optimizer step.")
]
MicroBatch = Annotated[
    int | None,
    _option("--micro-batch", panel=_WORK, help="Sequences per data rank and forward."),
]
Precision = Annotated[
    str, _option("--precision", panel=_WORK, help="Of the computation: bf16, fp16, fp32.")
]
ParamDtype = Annotated[
    str, _option("--param-dtype", panel=_WORK, help="Of parameters and optimizer state at rest.")
]
ReduceDtype = Annotated[
    str, _option("--reduce-dtype", panel=_WORK, help="Of the gradients' reduction.")
]
Optimizer = Annotated[
    str, _option("--optimizer", panel=_WORK, help="adamw, adam, sgd, sgd_momentum, adamw_8bit.")
]
Checkpointing = Annotated[
    str, _option("--checkpointing", panel=_WORK, help=f"{', '.join(CHECKPOINTING)}.")
]
CheckpointingKinds = Annotated[
    list[str] | None,
    _option(
        "--checkpointing",
        panel=_WORK,
        help=f"{', '.join(CHECKPOINTING)}; several by repeating it; all are tried if not given.",
    ),
]
Compile = Annotated[
    bool, _option("--compile/--no-compile", panel=_WORK, help="torch.compile of each block.")
]
AttentionKernel = Annotated[
    str | None,
    _option(
        "--attention", panel=_WORK, help=f"{', '.join(ATTENTION)}; the GPU's best if not given."
    ),
]
FusedLoss = Annotated[
    bool, _option("--fused-loss/--no-fused-loss", panel=_WORK, help="No fp32 copies of the logits.")
]
SequenceParallel = Annotated[
    bool,
    _option(
        "--sequence-parallel/--no-sequence-parallel",
        panel=_WORK,
        help="Norms and residuals divided over tp.",
    ),
]
LossParallel = Annotated[
    bool,
    _option(
        "--loss-parallel/--no-loss-parallel", panel=_WORK, help="Logits and loss divided over tp."
    ),
]
Reshard = Annotated[
    bool,
    _option(
        "--reshard/--no-reshard", panel=_WORK, help="Free parameters between forward and backward."
    ),
]
ReshardOrBoth = Annotated[
    bool | None,
    _option(
        "--reshard/--no-reshard",
        panel=_WORK,
        help="Free parameters after forward; both are tried if not given.",
    ),
]
Sharding = Annotated[str, _option("--sharding", panel=_WORK, help=f"{', '.join(SHARDING)}.")]

Replicate = Annotated[
    int, _option("--replicate", panel=_LAYOUT, help="Copies of the sharded model.")
]
Shard = Annotated[
    int,
    _option("--shard", panel=_LAYOUT, help="Ranks that share a copy; -1: what the others leave."),
]
Tp = Annotated[
    int, _option("--tp", panel=_LAYOUT, help="Ranks that share each layer's computation.")
]
ReplicateSizes = Annotated[
    list[int] | None,
    _option("--replicate", panel=_LAYOUT, help="Only this size; several by repeating it."),
]
ShardSizes = Annotated[
    list[int] | None,
    _option("--shard", panel=_LAYOUT, help="Only this size; several by repeating it."),
]
TpSizes = Annotated[
    list[int] | None,
    _option("--tp", panel=_LAYOUT, help="Only this size; several by repeating it."),
]
MemoryLimit = Annotated[
    float | None,
    _option("--memory-limit", panel=_LAYOUT, help="GiB that a GPU may use, of what it has."),
]

Top = Annotated[int, _option("--top", panel=_SHOW, min=1, help="How many layouts are shown.")]
Explain = Annotated[
    bool,
    _option(
        "--explain", panel=_SHOW, help="Every number with its formula, constants and their sources."
    ),
]
Json = Annotated[bool, _option("--json", panel=_SHOW, help="JSON alone on stdout.")]
Html = Annotated[
    Path | None,
    _option("--html", panel=_SHOW, help="Write a page with charts that needs no network."),
]

_WORKLOAD = (
    *(
        "seq_len",
        "micro_batch",
        "global_batch",
        "precision",
        "param_dtype",
        "reduce_dtype",
        "optimizer",
    ),
    *("compile", "attention", "fused_loss", "sequence_parallel", "loss_parallel", "sharding"),
)


def cluster_of(given: Mapping[str, Any]) -> Cluster:
    """Of a command's options by name.

    Raises:
        PlanningError: none is named, or there is no such GPU.
    """
    if given["gpu"] is None:
        raise PlanningError("which GPU? Give --gpu a name, for example h100-80gb-sxm")
    return Cluster.of(
        given["gpu"], given["nodes"], given["gpus_per_node"], given["nic"], given["profile"]
    )


def workload_of(given: Mapping[str, Any], checkpointing: str, reshard: bool) -> Workload:
    """Of a command's options by name.

    Raises:
        PlanningError: a value that can't be, or no sequence length.
    """
    if given["seq_len"] is None:
        raise PlanningError("how long are the sequences? Give --seq-len, for example 4096")
    return Workload(
        checkpointing=checkpointing,
        reshard_after_forward=reshard,
        **{name: given[name] for name in _WORKLOAD},
    )
