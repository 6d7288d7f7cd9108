"""Options that several commands share, and the functions and objects that options name."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import reduce
from inspect import Parameter, Signature
from operator import or_
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from parallel3d.errors import Parallel3dError
from parallel3d.planner.pipeline import SCHEDULES
from parallel3d.planner.recompute import OWN
from parallel3d.planner.stacks import OURS, stacks
from parallel3d.planner.workload import ATTENTION, CHECKPOINTING, CP_ATTENTION, SHARDING, Workload


def panel(name: str | None) -> Callable[..., Any]:
    """Returns a function that makes ``typer.Option``s, which the help lists under ``name``."""

    def option(help: str, *names: str, **more: Any) -> Any:
        return typer.Option(*names, rich_help_panel=name, help=help, **more)

    return option


plain = panel(None)

Options = dict[str, tuple[Any, Any]]
"""Name of a parameter -> (its annotation for typer, its default)."""


def takes(*groups: Options) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that gives a command these options, as keyword arguments."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = Signature(  # type: ignore[attr-defined]
            [
                Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
                for name, (annotation, default) in reduce(or_, groups).items()
            ]
        )
        return command

    return decorate


_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def _metavar(kind: Any) -> str | None:
    """Returns what the help calls a value of this type, optional or in a list; None: no value follows."""
    return next((_METAVARS[each] for each in (kind, *get_args(kind)) if each in _METAVARS), None)


def made(under: Callable[..., Any], table: Mapping[str, tuple[Any, ...]]) -> Options:
    """Returns the options that ``table`` describes; ``under`` (from ``panel``) sets their heading in the
    help.

    Args:
        table: name of the parameter -> (type, default, help), then if needed the option's name on the command
            line, and a dict of more arguments of ``typer.Option``.
    """
    found: Options = {}
    for name, (kind, default, *words) in table.items():
        more = words.pop() if isinstance(words[-1], dict) else {}
        more = {"metavar": _metavar(kind)} | more
        annotation = kind if default is not None else kind | None
        found[name] = Annotated[annotation, under(*words, **more)], default
    return found


def of_fields(kind: type, under: Callable[..., Any], texts: Mapping[str, Any]) -> Options:
    """Returns options for the fields of the dataclass ``kind`` that ``texts`` names: field -> help, or (help,
    name). ``under``: see ``made``."""
    types, known = get_type_hints(kind), {each.name: each for each in fields(kind)}
    words = {name: (text,) if isinstance(text, str) else text for name, text in texts.items()}
    defaults = {n: None if known[n].default is MISSING else known[n].default for n in words}
    return made(under, {n: (types[n], defaults[n], *words[n]) for n in words})


def without(options: Options, *names: str) -> Options:
    """Returns ``options`` without those called ``names``."""
    return {name: option for name, option in options.items() if name not in names}


_HFSDP, _RESHARD = "--hfsdp/--no-hfsdp", "--reshard/--no-reshard"
_CHUNKED = 'The logits of some tokens at a time: parallelize(loss_parallel="chunked")'
_HYBRID = "Parameters at rest and the optimizer's state sharded over replicate too"
_MODEL = (
    "A name such as llama-3.1-8b, a Hugging Face config.json, package.module:function of your own that "
    "builds it (or returns it and an example, (args, kwargs)), or shapes as layers=32,hidden=4096,...: "
    "also heads, kv_heads, ffn and vocab."
)
_STACK = (
    f"The software that trains: {', '.join(stacks())}; or a file of calibrate --run, name.toml."
)
_LORA = (
    "Adapters beside frozen layers: their rank, or rank=16,targets=q+v,base_dtype=bf16; of all linear layers "
    "of the blocks if no targets are given."
)
_KINDS = ", ".join(CHECKPOINTING)
_TRIED_KINDS = (
    f"several by repeating it; {', '.join(OWN)}, which parallelize has, are tried if not given"
)

MODEL = made(panel("Model"), {"model": (str, None, _MODEL)})
CLUSTER = made(
    panel("Cluster"),
    {
        "gpu": (str, None, "For example h100-80gb-sxm, a100, h200."),
        "nodes": (int, 1, "Number of nodes."),
        "gpus_per_node": (int, None, "The usual number for the GPU if not given."),
        "nic": (float, None, "GB/s from each GPU to other nodes, one direction."),
        "profile": (Path, None, "A TOML file with more GPUs, in hardware.toml's form."),
    },
)
WORK = of_fields(
    Workload,
    panel("Workload"),
    {
        "seq_len": "Tokens per sequence; by default the config's, 8192 at most.",
        "global_batch": "Sequences per optimizer step; by default 4M tokens.",
        "micro_batch": "Sequences per data rank and forward; plan tries several.",
        "precision": "Dtype of the computation: bf16, fp16, fp32.",
        "float8": "Matmuls of blocks in float8, as torchao's.",
        "float8_scaling": "What shares a scale: tensorwise, rowwise, blockwise (MXFP8).",
        "param_dtype": "Dtype of parameters and optimizer state at rest.",
        "reduce_dtype": "Dtype in which gradients are reduced.",
        "wire_dtype": "Dtype in which they are sent, to be summed by each rank: bf16, fp32.",
        "optimizer": "adamw, adam, sgd, sgd_momentum, adamw_8bit, adamw_4bit.",
        "checkpointing": f"{_KINDS}.",
        "compile": "torch.compile of each block.",
        "attention": f"{', '.join(ATTENTION)}; the GPU's best if not given.",
        "cp_attention": f"auto, {', '.join(CP_ATTENTION)}: how attention communicates over cp.",
        "routing": "uniform, zipf:1.2 or hot: how tokens are spread over experts that ep divides.",
        "fused_loss": "No fp32 copies of the logits.",
        "chunked_loss": f"{_CHUNKED}.",
        "shard_optimizer_over_replicate": (f"{_HYBRID}.", _HFSDP),
        "sequence_parallel": "Norms and residuals sharded over tp.",
        "loss_parallel": "Logits and loss sharded over tp.",
        "reshard_after_forward": ("Free parameters between forward and backward.", _RESHARD),
        "memory": "static: buffers are allocated once, at fixed addresses.",
        "sharding": f"{', '.join(SHARDING)}.",
    },
) | made(panel("Workload"), {"stack": (str, OURS, _STACK), "lora": (str, None, _LORA)})
WORK_OR_TRIED = WORK | made(
    panel("Workload"),
    {
        "checkpointing": (list[str], None, f"{_KINDS}; {_TRIED_KINDS}."),
        "chunked_loss": (
            bool,
            None,
            f"{_CHUNKED}; tried where logits are much of the memory if not given.",
        ),
        "shard_optimizer_over_replicate": (bool, None, f"{_HYBRID}; tried if not given.", _HFSDP),
        "reshard_after_forward": (
            bool,
            None,
            "Free parameters after forward; both are tried if not given.",
            _RESHARD,
        ),
    },
)
"""``WORK`` where several are tried if an option isn't given."""
LAYOUT = made(
    panel("Layout"),
    {
        "replicate": (int, 1, "Copies of the sharded model."),
        "shard": (int, -1, "Ranks that share a copy; -1: all that the other axes leave."),
        "cp": (int, 1, "Ranks that share each sequence (context parallelism)."),
        "tp": (int, 1, "Ranks that share each layer's computation."),
        "ep": (int, 1, "Ranks that share the experts; it divides shard x cp x tp."),
    },
)
STAGES = made(
    panel("Pipeline (of other software: parallelize has none)"),
    {
        "pp": (int, 1, "Stages that have different blocks, outside of the layout's axes."),
        "schedule": (str, None, f"{', '.join(SCHEDULES)}; 1f1b if not given, or interleaved."),
        "virtual": (int, 1, "Chunks of blocks of each stage, of interleaved."),
    },
)
_SIZE = "Only this size; several by repeating it."
_CP_SIZE = "The same; by default 1, and those that leave a rank 16,384 tokens of a sequence."
_EP_SIZE = "The same; by default 1, and of a mixture those that divide its experts, in or of nodes."
SIZES = made(
    panel("Layout"),
    dict.fromkeys(LAYOUT, (list[int], None, _SIZE))
    | {"cp": (list[int], None, _CP_SIZE), "ep": (list[int], None, _EP_SIZE)}
    | {"memory_limit": (float, None, "GiB of a GPU's memory that may be used.")},
)
Json = Annotated[bool, panel("Output")("Print only JSON on stdout.", "--json")]
Html = Annotated[
    Path | None, panel("Output")("Write a page with charts that needs no network.", metavar="PATH")
]
_EXPLAIN = "Every number with its formula, constants and sources."
SHOW = made(panel("Output"), {"explain": (bool, False, _EXPLAIN, "--explain")})
SHOW |= {"as_json": (Json, False), "html": (Html, None)}
TOP = made(panel("Output"), {"top": (int, 10, "Number of layouts to show.", {"min": 1})})


def fields_among(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of ``options`` that have the name of a field of the dataclass ``kind``."""
    return {each.name: options[each.name] for each in fields(kind) if each.name in options}


def function_named(what: str, text: str | None) -> Any:
    """Returns the function that "package.module:name" names; ``what``: the option's name, for errors."""
    if text is None:
        return None
    value = object_named(what, text)
    if not callable(value):
        raise Parallel3dError(f"{what}: {text} is a {type(value).__name__}, which can't be called")
    return value


def add_current_folder() -> None:
    """Makes modules of the current folder importable, as python -m does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def object_named(what: str, text: str) -> Any:
    """Returns the object that "package.module:name" names; ``what``: the option's name, for errors."""
    module_name, colon, path = text.partition(":")
    if not colon or not module_name or not path:
        raise Parallel3dError(f"{what}: {text!r} must be package.module:name")
    add_current_folder()
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
