"""The options that commands share, and objects that they name."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from parallel3d.errors import Parallel3dError
from parallel3d.planner.recompute import OWN
from parallel3d.planner.stacks import stacks
from parallel3d.planner.workload import ATTENTION, CHECKPOINTING, CP_ATTENTION, SHARDING


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
        "A name such as llama-3.1-8b, a Hugging Face config.json, package.module:function of your own that "
        "builds it (or returns it and an example, (args, kwargs)), or shapes: "
        "layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256.",
    ),
]

GpuName = Annotated[str | None, _cluster("For example h100-80gb-sxm, a100, h200.")]
Nodes = Annotated[int, _cluster("Number of nodes.")]
GpusPerNode = Annotated[int | None, _cluster("The usual number for the GPU if not given.")]
Nic = Annotated[float | None, _cluster("GB/s from each GPU to other nodes, one direction.")]
Profile = Annotated[Path | None, _cluster("A TOML file with more GPUs, in hardware.toml's form.")]

StackName = Annotated[
    str,
    _work(
        f"The software that trains: {', '.join(stacks())}; or a file of calibrate --run, name.toml."
    ),
]
SeqLen = Annotated[int | None, _work("Tokens per sequence; by default the config's, 8192 at most.")]
GlobalBatch = Annotated[int | None, _work("Sequences per optimizer step; by default 4M tokens.")]
MicroBatch = Annotated[
    int | None, _work("Sequences per data rank and forward; plan tries several.")
]
Precision = Annotated[str, _work("Dtype of the computation: bf16, fp16, fp32.")]
ParamDtype = Annotated[str, _work("Dtype of parameters and optimizer state at rest.")]
ReduceDtype = Annotated[str, _work("Dtype in which gradients are reduced.")]
Optimizer = Annotated[str, _work("adamw, adam, sgd, sgd_momentum, adamw_8bit.")]
Checkpointing = Annotated[str, _work(f"{', '.join(CHECKPOINTING)}.")]
CheckpointingKinds = Annotated[
    list[str] | None,
    _work(
        f"{', '.join(CHECKPOINTING)}; several by repeating it; {', '.join(OWN)}, which parallelize has, are "
        "tried if not given."
    ),
]
CpAttention = Annotated[
    str, _work(f"auto, {', '.join(CP_ATTENTION)}: how attention communicates over cp.")
]
Compile = Annotated[bool, _work("torch.compile of each block.")]
AttentionKernel = Annotated[
    str | None, _work(f"{', '.join(ATTENTION)}; the GPU's best if not given.", "--attention")
]
FusedLoss = Annotated[bool, _work("No fp32 copies of the logits.")]
ChunkedLoss = Annotated[
    bool, _work('The logits of some tokens at a time: parallelize(loss_parallel="chunked").')
]
ChunkedLossOrBoth = Annotated[
    bool | None,
    _work(
        'The logits of some tokens at a time: parallelize(loss_parallel="chunked"); tried where logits are '
        "much of the memory if not given."
    ),
]
_HFSDP = "--hfsdp/--no-hfsdp"
Hybrid = Annotated[
    bool, _work("Parameters at rest and the optimizer's state sharded over replicate too.", _HFSDP)
]
HybridOrBoth = Annotated[
    bool | None,
    _work(
        "Parameters at rest and the optimizer's state sharded over replicate too; tried if not given.",
        _HFSDP,
    ),
]
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
Cp = Annotated[int, _layout("Ranks that share each sequence (context parallelism).")]
Tp = Annotated[int, _layout("Ranks that share each layer's computation.")]
Sizes = Annotated[list[int] | None, _layout("Only this size; several by repeating it.")]
CpSizes = Annotated[
    list[int] | None,
    _layout("The same; by default 1, and those that leave a rank 16,384 tokens of a sequence."),
]
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


def function_named(what: str, text: str | None) -> Any:
    """Returns the function ``package.module:name``; ``what`` names the option in errors."""
    if text is None:
        return None
    value = object_named(what, text)
    if not callable(value):
        raise Parallel3dError(f"{what}: {text} is a {type(value).__name__}, which can't be called")
    return value


def object_named(what: str, text: str) -> Any:
    """Returns the object ``package.module:name``; ``what`` names the option in errors."""
    module_name, colon, path = text.partition(":")
    if not colon or not module_name or not path:
        raise Parallel3dError(f"{what}: {text!r} must be package.module:name")
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the current directory, as with python -m
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        raise Parallel3dError(
            f"{what}: importing {module_name!r} raised {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(value, part):
            near = get_close_matches(part, dir(value), n=3, cutoff=0.5)
            hint = f"; the nearest: {', '.join(near)}" if near else ""
            raise Parallel3dError(f"{what}: {module_name!r} has no {part!r}{hint}")
        value = getattr(value, part)
    return value
