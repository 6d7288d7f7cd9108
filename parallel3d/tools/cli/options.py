"""The options that commands share, and the cluster and workload that they describe."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from parallel3d.errors import PlanningError
from parallel3d.planner.cluster import Cluster
from parallel3d.planner.workload import ATTENTION, CHECKPOINTING, SHARDING, Workload


def panel(name: str | None) -> Callable[..., Any]:
    """Returns a function that makes options listed under ``name`` in the help."""

    def option(help: str, *names: str, **more: Any) -> Any:
        return typer.Option(*names, rich_help_panel=name, help=help, **more)

    return option


plain = panel(None)
_model, _cluster, _work, _layout = map(panel, ("Model", "Cluster", "Workload", "Layout"))
_show = panel("Output")

ModelName = Annotated[
    str | None,
    _model(
        "A name such as llama-3.1-8b, a Hugging Face config.json, or shapes: "
        "layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256.",
    ),
]

GpuName = Annotated[str | None, _cluster("For example h100-80gb-sxm, a100, h200.")]
Nodes = Annotated[int, _cluster("Number of nodes.")]
GpusPerNode = Annotated[int | None, _cluster("The usual number for the GPU if not given.")]
Nic = Annotated[float | None, _cluster("GB/s from each GPU to other nodes, one direction.")]
Profile = Annotated[Path | None, _cluster("A TOML file with more GPUs, in hardware.toml's form.")]

SeqLen = Annotated[int | None, _work("Tokens per sequence.")]
GlobalBatch = Annotated[int | None, _work("Sequences per optimizer step.")]
MicroBatch = Annotated[int | None, _work("Sequences per data rank and forward.")]
Precision = Annotated[str, _work("Dtype of the computation: bf16, fp16, fp32.")]
ParamDtype = Annotated[str, _work("Dtype of parameters and optimizer state at rest.")]
ReduceDtype = Annotated[str, _work("Dtype in which gradients are reduced.")]
Optimizer = Annotated[str, _work("adamw, adam, sgd, sgd_momentum, adamw_8bit.")]
Checkpointing = Annotated[str, _work(f"{', '.join(CHECKPOINTING)}.")]
CheckpointingKinds = Annotated[
    list[str] | None,
    _work(f"{', '.join(CHECKPOINTING)}; several by repeating it; all are tried if not given."),
]
Compile = Annotated[bool, _work("torch.compile of each block.")]
AttentionKernel = Annotated[
    str | None, _work(f"{', '.join(ATTENTION)}; the GPU's best if not given.", "--attention")
]
FusedLoss = Annotated[bool, _work("No fp32 copies of the logits.")]
SequenceParallel = Annotated[bool, _work("Norms and residuals sharded over tp.")]
LossParallel = Annotated[bool, _work("Logits and loss sharded over tp.")]
Reshard = Annotated[bool, _work("Free parameters between forward and backward.")]
ReshardOrBoth = Annotated[
    bool | None,
    _work("Free parameters after forward; both are tried if not given.", "--reshard/--no-reshard"),
]
Sharding = Annotated[str, _work(f"{', '.join(SHARDING)}.")]

Replicate = Annotated[int, _layout("Copies of the sharded model.")]
Shard = Annotated[int, _layout("Ranks that share a copy; -1: all that the other axes leave.")]
Tp = Annotated[int, _layout("Ranks that share each layer's computation.")]
Sizes = Annotated[list[int] | None, _layout("Only this size; several by repeating it.")]
MemoryLimit = Annotated[float | None, _layout("GiB of a GPU's memory that may be used.")]

Top = Annotated[int, _show("Number of layouts to show.", min=1)]
Explain = Annotated[
    bool, _show("Every number with its formula, constants and sources.", "--explain")
]
Json = Annotated[bool, _show("Print only JSON on stdout.", "--json")]
Html = Annotated[Path | None, _show("Write a page with charts that needs no network.")]


def fields_among(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``options`` that have the name of a field of the dataclass ``kind``."""
    return {each.name: options[each.name] for each in fields(kind) if each.name in options}


def cluster_of(options: Mapping[str, Any]) -> Cluster:
    """Returns the cluster that a command's options describe."""
    if options["gpu"] is None:
        raise PlanningError("which GPU? Give --gpu a name, for example h100-80gb-sxm")
    return Cluster.of(
        *(options[name] for name in ("gpu", "nodes", "gpus_per_node", "nic", "profile"))
    )


def workload_of(options: Mapping[str, Any], checkpointing: str, reshard: bool) -> Workload:
    """Returns the workload that a command's options describe."""
    if options["seq_len"] is None:
        raise PlanningError("how long are the sequences? Give --seq-len, for example 4096")
    own = {"checkpointing": checkpointing, "reshard_after_forward": reshard}
    return Workload(**{**fields_among(Workload, options), **own})
