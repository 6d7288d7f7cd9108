"""train.py's options: a dataclass that argparse reads, and what is checked of them before anything starts."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import sleep
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import torch
from llama import LlamaConfig
from starting import is_first_rank
from training import WARMUP_STEPS

import parallel3d as p3d

__all__ = ["DTYPES", "Options", "Size", "UsageError", "parse"]


class UsageError(p3d.Parallel3dError):
    """Options that can't be: every rank reads the same, so that one of a machine says it."""


@dataclass(frozen=True)
class Option:
    """What an option is for, and the least it can be."""

    help: str
    min: int | None = None
    group: str = ""  # heading in --help, of this option and those after it


class Size(StrEnum):
    nano = "nano"
    tiny = "tiny"
    small = "small"
    b1 = "1b"
    b8 = "8b"
    b70 = "70b"
    b405 = "405b"


class Dtype(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


class Recompute(StrEnum):
    none = "none"
    full = "full"
    selective = "selective"
    offload = "offload"


class CpAttention(StrEnum):
    auto = "auto"
    ulysses = "ulysses"
    gather = "gather"
    ring = "ring"


class LossParallel(StrEnum):
    none = "none"
    split_over_tp = "split"
    chunked = "chunked"


DTYPES = {name: getattr(torch, name) for name in Dtype}


@dataclass(frozen=True)
class Options:
    """What a run is: the mesh, the model, the batch, and where things go."""

    replicate: Annotated[int, Option(group="mesh", help="Copies of the sharded model (HSDP).")] = 1
    shard: Annotated[int, Option(help="Ranks that share one copy; -1: all there are.")] = -1
    cp: Annotated[int, Option(help="Ranks that share each sequence.")] = 1
    tp: Annotated[int, Option(help="Ranks that share each layer's computation.")] = 1
    cp_attention: Annotated[CpAttention, Option(help="How attention communicates over cp.")] = (
        CpAttention.auto
    )
    steps: Annotated[int, Option(group="model and training", min=1, help="Optimizer steps.")] = 300
    size: Annotated[Size, Option(help="Size of the model.")] = Size.tiny
    seq_len: Annotated[
        int | None, Option(min=1, help="Tokens of a sequence; by default the size's own.")
    ] = None
    batch: Annotated[int, Option(min=1, help="Sequences per step, over all ranks.")] = 16
    micro_batch: Annotated[
        int | None,
        Option(min=1, help="Sequences per forward on a rank; by default all it has of the batch."),
    ] = None
    lr: Annotated[float, Option(help="Peak learning rate.")] = 2e-3
    warmup_steps: Annotated[int, Option(min=0, help="Steps until that peak.")] = WARMUP_STEPS
    seed: Annotated[int, Option(min=0, help="Of weights and batches.")] = 0
    data: Annotated[Path | None, Option(help="File or folder; by default Python's own source.")] = (
        None
    )
    dtype: Annotated[
        Dtype,
        Option(group="precision, memory and speed", help="Of weights, gradients and optimizer."),
    ] = Dtype.float32
    double: Annotated[bool, Option(help="The same as --dtype float64.")] = False
    mixed_precision: Annotated[bool, Option(help="Compute in bfloat16, reduce in float32.")] = False
    activation_checkpointing: Annotated[
        Recompute,
        Option(
            help="What layers keep for backward: all, their inputs (full), also matmuls and collectives "
            "(selective), or all in the CPU's memory (offload)."
        ),
    ] = Recompute.none
    offload_gib: Annotated[
        float, Option(help="Of the CPU's memory that a rank may use for that, GiB.")
    ] = 8.0
    compile: Annotated[bool, Option(help="torch.compile each layer.")] = False
    sequence_parallel: Annotated[
        bool, Option(help="Split the sequence over tp between layers.")
    ] = False
    loss_parallel: Annotated[
        LossParallel,
        Option(
            help="Logits split over tp until the loss; or made for some tokens at a time, also without tp."
        ),
    ] = LossParallel.none
    no_reshard: Annotated[bool, Option(help="Keep gathered weights from forward to backward.")] = (
        False
    )
    hfsdp: Annotated[bool, Option(help="Shard the optimizer's state over replicas too.")] = False
    checkpoint: Annotated[
        Path | None,
        Option(
            group="checkpoints", help="Folder to save to, and to go on from if it has a checkpoint."
        ),
    ] = None
    save_every: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 100
    keep: Annotated[int, Option(min=1, help="Checkpoints to leave there.")] = 3
    async_save: Annotated[bool, Option(help="Write checkpoints in the background.")] = False
    check: Annotated[
        bool,
        Option(group="screen and metrics", help="Compare the first steps with the plain model."),
    ] = False
    show_plan: Annotated[bool, Option(help="Print every module of the plan.")] = False
    json: Annotated[
        bool, Option(help="Print nothing but the result, as one line of JSON, for programs.")
    ] = False
    step_log: Annotated[
        Path | None, Option(help="File to append to: what each step consumed, and its loss.")
    ] = None
    metrics: Annotated[
        Path | None, Option(help="File to append to: a line of JSON a step: speed, memory, waits.")
    ] = None
    tensorboard: Annotated[Path | None, Option(help="Folder for the same as curves.")] = None
    metrics_every: Annotated[
        int, Option(min=0, help="Steps between two samples of waits and slow ranks; 0: none.")
    ] = 10
    peak_tflops: Annotated[
        float | None, Option(help="Of one device, for MFU; by default that of a GPU known.")
    ] = None
    profile_steps: Annotated[
        str | None,
        Option(group="profiles", help="FIRST:LAST, both included: write a trace of these steps."),
    ] = None
    profile_ranks: Annotated[str, Option(help="Ranks that do, such as 0,3 or all.")] = "0"
    oom_snapshots: Annotated[
        bool, Option(help="Write what memory held when there was too little.")
    ] = False
    traces: Annotated[Path, Option(help="Folder for traces and snapshots.")] = Path("traces")

    def __post_init__(self) -> None:
        _ = self.window  # refused before anything starts

    @property
    def model(self) -> LlamaConfig:
        """The model's sizes."""
        config = LlamaConfig.named(self.size)
        return config if self.seq_len is None else replace(config, max_seq_len=self.seq_len)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the weights at rest."""
        return torch.float64 if self.double else DTYPES[self.dtype]

    @property
    def window(self) -> p3d.observability.ProfilerWindow | None:
        """The steps to profile."""
        if self.profile_steps is None:
            return None
        first, last = p3d.observability.parse_steps(self.profile_steps)
        try:
            ranks = None if self.profile_ranks == "all" else map(int, self.profile_ranks.split(","))
            return p3d.observability.ProfilerWindow(
                self.traces, first, last, ranks=None if ranks is None else set(ranks)
            )
        except ValueError:
            raise UsageError(
                f"--profile-ranks {self.profile_ranks}: give ranks with commas, such as 0,3, or all"
            ) from None

    @property
    def fixed(self) -> dict[str, Any]:
        """What must be the same when a run goes on; the sequence's length where it isn't the size's own."""
        named = {"--seed": self.seed, "--size": str(self.size), "--lr": self.lr}
        return named if self.seq_len is None else {**named, "--seq-len": self.seq_len}

    def check_sizes(self, layout: p3d.MeshLayout) -> None:
        """Refuses what the mesh does not divide: rows of the batch by data ranks, heads by tp ranks."""
        if self.batch % layout.data_size:
            nearest = math.ceil(self.batch / layout.data_size) * layout.data_size
            raise UsageError(
                f"--batch {self.batch} is not divisible by the {layout.data_size} data ranks "
                f"(replicate x shard) of {layout}; the next that is: {nearest}"
            )
        length, parts = self.model.max_seq_len, 2 * layout.cp
        if layout.cp > 1 and length % parts:
            raise UsageError(
                f"--seq-len {length} is not divisible by the {parts} parts that --cp {layout.cp} cuts "
                f"sequences into; the next that is: {math.ceil(length / parts) * parts}"
            )
        rows = self.batch // layout.data_size
        if self.micro_batch is not None and rows % self.micro_batch:
            fits = max(n for n in range(1, self.micro_batch) if rows % n == 0)
            raise UsageError(
                f"--micro-batch {self.micro_batch} does not divide the {rows} sequences that each data rank "
                f"has of --batch {self.batch}; the next below that does: {fits}"
            )
        heads = self.model.n_kv_heads
        if heads % layout.tp:
            raise UsageError(
                f"--tp {layout.tp}: the model's {heads} key and value heads can't be "
                f"shared evenly; --tp must divide {heads}"
            )


def parse(description: str, words: Sequence[str] | None = None) -> Options:
    """The command line's options; ``words``: others. What can't be ends the process, as ``--help`` does."""
    parser = argparse.ArgumentParser(
        usage="[torchrun --nproc-per-node RANKS] %(prog)s [options]",
        description=description,
        allow_abbrev=False,
    )
    group: argparse._ActionsContainer = parser
    hints = get_type_hints(Options, include_extras=True)
    for field in fields(Options):
        kind, option = get_args(hints[field.name])
        if option.group:
            group = parser.add_argument_group(option.group)
        # --tp for tp, --micro-batch for micro_batch
        name = f"--{field.name.replace('_', '-')}"
        if kind is bool:
            group.add_argument(name, action="store_true", help=option.help)
            continue
        kind = next((each for each in get_args(kind) if each is not NoneType), kind)
        shown = "" if field.default is None else f" By default {field.default}."
        group.add_argument(
            name,
            type=partial(_convert, kind, option),
            default=field.default,
            metavar="|".join(kind) if issubclass(kind, StrEnum) else kind.__name__.upper(),
            help=f"{option.help}{shown}".replace("%", "%%"),
        )
    if not is_first_rank():  # which says what is wrong, or helps: all read the same words
        parser._print_message = lambda *_: sleep(1)  # type: ignore[method-assign]
    return Options(**vars(parser.parse_args(words)))


def _convert(kind: type, option: Option, text: str) -> Any:
    """Raises ArgumentTypeError, which argparse tells with the option's name."""
    try:
        value = kind(text)
    except ValueError:
        what = (
            f"one of {', '.join(kind)}" if issubclass(kind, StrEnum) else f"of type {kind.__name__}"
        )
        raise argparse.ArgumentTypeError(f"{text!r} must be {what}") from None
    if option.min is not None and value < option.min:
        raise argparse.ArgumentTypeError(f"{text} must be at least {option.min}")
    return value
