"""Models and policies of which our list of collectives is compared with torch's ``fully_shard``'s."""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh, fsdp
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from _support.models import LM_PLAN, SEQUENCE_PLAN, TORCHS_PLAN, Lm, lm_loss, tokens
from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, parallelize, tp
from parallel3d._torch.autograd import follows_grad_dtype
from parallel3d.fsdp import fully_shard
from parallel3d.testing import Recorder, fake_world, record_collectives

Key = tuple[str, str | None]
"""(kind of collective, mesh axis)"""

Totals = dict[Key, tuple[int, int]]
"""(calls, bytes) by kind and axis"""

NONE = (0, 0)

Apply = Callable[[nn.Module, DeviceMesh], Any]


# ---- models ----


class LoraLinear(nn.Module):
    """A frozen weight and two trained factors."""

    def __init__(self, width_in: int, width_out: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width_out).requires_grad_(False)
        self.down = nn.Linear(width_in, rank, bias=False)
        self.up = nn.Linear(rank, width_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def lora() -> Lm:
    """All frozen but the blocks' factors."""
    model = Lm().requires_grad_(False)
    for block in model.layers:
        block.up, block.down = LoraLinear(12, 20), LoraLinear(20, 12)
    return model


class Checkpointed(Lm):
    """Recomputes each block in backward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


# ---- the same model under both engines ----


@dataclass(frozen=True)
class Engine:
    """What differs between the two."""

    fully_shard: Callable[..., Any]
    policy: Callable[..., Any]
    mesh: Callable[[DeviceMesh], DeviceMesh]

    def blocks_and_root(
        self, model: nn.Module, mesh: DeviceMesh, *, mixed: bool = False, **options: Any
    ) -> nn.Module:
        """Each block a unit, then the root."""
        for layer in model.layers:
            self.unit(layer, mesh, mixed=mixed, **options)
        return self.unit(model, mesh, mixed=mixed, **options)

    def unit(
        self,
        module: Any,
        mesh: DeviceMesh,
        *,
        mixed: bool = False,
        wire: torch.dtype | None = None,
        **options: Any,
    ) -> Any:
        """One ``fully_shard`` call."""
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
        if wire is not None:
            dtypes["wire_dtype"] = wire
        return self.fully_shard(
            module, mesh=self.mesh(mesh), mp_policy=self.policy(**dtypes), **options
        )


def _data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """torch takes one or two axes, and would use a replicate axis of size 1."""
    return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]


OURS = Engine(fully_shard, MixedPrecisionPolicy, lambda mesh: mesh)
TORCHS = Engine(fsdp.fully_shard, fsdp.MixedPrecisionPolicy, _data_axes)


def both(method: Callable[..., Any], **options: Any) -> tuple[Apply, Apply]:
    """The same calls for each engine."""
    return tuple(functools.partial(method, engine, **options) for engine in (OURS, TORCHS))


TORCHS_SEQUENCE_PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm": SequenceParallel(),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def _tp(
    ours: dict[str, Any], torchs: dict[str, Any], *, mixed: bool = False
) -> tuple[Apply, Apply]:
    """Tensor parallelism of each, then each block and the root."""

    def apply_ours(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        tp.resolve_plan(model, ours, tp_size=mesh["tp"].size()).apply(model, mesh)
        return OURS.blocks_and_root(model, mesh, mixed=mixed)

    def apply_torchs(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        # None: every rank has the same values, nothing to send.
        parallelize_module(model, mesh["tp"], torchs, src_data_rank=None)
        return TORCHS.blocks_and_root(model, mesh, mixed=mixed)

    return apply_ours, apply_torchs


# ---- steps ----


def one_backward(model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor]) -> None:
    loss(model, 0).backward()


def accumulated(
    switch: str, model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor]
) -> None:
    """Three micro-batches; ``switch`` is off until the last."""
    for micro in range(3):
        getattr(model, switch)(micro == 2)
        loss(model, micro).backward()


@dataclass(frozen=True)
class Case:
    """One row group of the table.

    Attributes:
        name: model and policy, in words.
        apply: makes the model parallel: ours, torch's.
        sizes: (replicate, shard, tp).
        build: the plain model.
        step: what is recorded, twice.
        smaller: why ours communicates less, for each (kind, axis) where it does.
        torchs_fault: why ours communicates more bytes, in no more calls, where torch's sum is wrong.
    """

    name: str
    apply: tuple[Apply, Apply]
    sizes: tuple[int, int, int] = (1, 4, 1)
    build: Callable[[], nn.Module] = Lm
    step: Callable[..., None] = one_backward
    smaller: dict[Key, str] = field(default_factory=dict)
    torchs_fault: dict[Key, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def loss_of(model: nn.Module, index: int) -> torch.Tensor:
    """4 tokens: two tensor-parallel ranks share them evenly."""
    return lm_loss(model, tokens(index, length=4))


def _even() -> Lm:
    """torch's tensor parallelism needs a vocabulary that tp divides."""
    return Lm(vocab=20)


def _run_parallelize() -> tuple[Apply, Apply]:
    """One call of ours, and the same units under torch's engine."""

    def torchs(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for layer in model.layers:
            TORCHS.unit(layer, mesh)
        TORCHS.unit(model.embed, mesh)
        TORCHS.unit([model.norm, model.head], mesh, reshard_after_forward=False)
        return TORCHS.unit(model, mesh, reshard_after_forward=False)

    return parallelize, torchs


BLOCKS = Engine.blocks_and_root
PER_UNIT = (
    "one sum over tp for each unit, of shards, after the reduce-scatter; torch: one a parameter"
)
IN_REDUCE_DTYPE = (
    "torch sums over tp in bf16 although reduce_dtype is fp32; ours is as many bytes as in fp32"
)
CASES = [
    Case("fp32", both(BLOCKS)),
    Case("bf16, reduced in fp32", both(BLOCKS, mixed=True)),
    Case("HSDP", both(BLOCKS), (2, 2, 1)),
    Case("HSDP, bf16, reduced in fp32", both(BLOCKS, mixed=True), (2, 2, 1)),
    Case("root only", both(Engine.unit)),
    Case("reshard_after_forward=False", both(BLOCKS, reshard_after_forward=False)),
    Case("LoRA in frozen blocks, bf16, reduced in fp32", both(BLOCKS, mixed=True), build=lora),
    Case(
        "set_requires_gradient_sync(False) on 2 of 3 micro-batches",
        both(BLOCKS),
        step=functools.partial(accumulated, "set_requires_gradient_sync"),
    ),
    Case(
        "HSDP, set_requires_all_reduce(False) on 2 of 3 micro-batches",
        both(BLOCKS),
        (2, 2, 1),
        step=functools.partial(accumulated, "set_requires_all_reduce"),
    ),
    Case(
        "uneven: rows of 7, 11 and 19 on 4 ranks",
        both(BLOCKS),
        build=functools.partial(Lm, dim=7, hidden=11, vocab=19),
    ),
    Case(
        "shard axis of one rank",
        both(BLOCKS),
        (4, 1, 1),
        smaller={
            ("all_reduce", "replicate"): "units of up to 25 MiB together are reduced by one call"
        },
    ),
    Case("activation checkpointing of each block", both(BLOCKS), build=Checkpointed),
    Case(
        "parallelize",
        _run_parallelize(),
        smaller={("all_gather", "shard"): "the embedding's backward doesn't read its table"},
    ),
    Case("TP", _tp(LM_PLAN, TORCHS_PLAN), (1, 2, 2), _even),
    Case(
        "HSDP, sequence-parallel TP",
        _tp(SEQUENCE_PLAN, TORCHS_SEQUENCE_PLAN),
        (2, 2, 2),
        _even,
        smaller={("all_reduce", "tp"): PER_UNIT},
    ),
    Case(
        "HSDP, sequence-parallel TP, bf16, reduced in fp32",
        _tp(SEQUENCE_PLAN, TORCHS_SEQUENCE_PLAN, mixed=True),
        (2, 2, 2),
        _even,
        **(
            {"smaller": {("all_reduce", "tp"): PER_UNIT}}
            if follows_grad_dtype  # torch 2.15, which has mended it
            else {"torchs_fault": {("all_reduce", "tp"): f"{PER_UNIT}; {IN_REDUCE_DTYPE}"}}
        ),
    ),
]


WIRED = [
    Case(
        "bf16 on the wire",
        (
            functools.partial(BLOCKS, OURS, mixed=True, wire=torch.bfloat16),
            functools.partial(BLOCKS, OURS, mixed=True),
        ),
        sizes,
    )
    for sizes in ((1, 4, 1), (2, 2, 1), (4, 1, 1))
]
"""Ours with ``wire_dtype``, and without."""

# ---- recording ----


@contextmanager
def _recorded(case: Case, apply: Apply) -> Iterator[Callable[[], Recorder]]:
    """Yields what runs a step of ``case`` and returns its collectives."""
    replicate, shard, tensor = case.sizes
    torch.manual_seed(0)
    plain = case.build()
    with fake_world(0, replicate * shard * tensor):
        mesh = build_mesh(MeshLayout(*case.sizes), device_type="cpu")
        model = copy.deepcopy(plain)
        apply(model, mesh)

        def step() -> Recorder:
            with record_collectives(mesh) as recorder:
                case.step(model, loss_of)
            model.zero_grad()
            return recorder

        yield step


def totals(recorder: Recorder) -> Totals:
    """Calls and bytes by kind and axis; a call over one rank moves nothing."""
    result: Totals = {}
    for call in recorder.calls:
        if call.group_size > 1:
            calls, size = result.get((call.op, call.axis), (0, 0))
            result[call.op, call.axis] = (calls + 1, size + call.bytes)
    return result


def compare(case: Case) -> list[tuple[Totals, Totals]]:
    """(ours, torch's) of the first two steps."""
    sides = []
    for apply in case.apply:
        with _recorded(case, apply) as step:
            sides.append([totals(step()) for _ in range(2)])
    return list(zip(*sides, strict=True))


# ---- the page ----

PAGE = Path(__file__).parents[3] / "docs" / "collectives.md"

HEAD = """\
# Collectives, compared with torch's

What one training step communicates under `parallel3d.fsdp` and under torch's `fully_shard` (2.13), on
rank 0 of a fake process group: forward and backward of a language model of two blocks in fp32, each
block a unit and the root, unless the first column says otherwise. Calls, and bytes (the larger of each
call's input and output), torch's before ours. They are those of the first step and of the second alike.
Written by `python tests/_support/collectives_table.py`; `tests/fsdp/test_collectives_equal.py` checks
that it is up to date.

| model and policy | (replicate, shard, tp) | collective | over | torch | bytes | ours | bytes | why |
|---|---|---|---|---:|---:|---:|---:|---|
"""


WIRE_HEAD = """
## Gradients sent in bf16

The same model, computed in bf16 and reduced in fp32, without and with `wire_dtype=torch.bfloat16`
([engine.md](engine.md#gradients-sent-in-bf16)): the bytes of reductions. Of an all-reduce's bytes a rank
sends twice (n - 1) / n, of each of the others' once: so with it half as much is sent, over replicate too.

| (replicate, shard, tp) | collective | over | without | bytes | with | bytes |
|---|---|---|---:|---:|---:|---:|
"""


Results = dict[str, list[tuple[Totals, Totals]]]
"""By case: ours and torch's, of each step."""


def collect() -> Results:
    """Runs all cases."""
    with warnings.catch_warnings():
        # torch warns of a view that the model returns: its own hook, unused here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        return {case.name: compare(case) for case in CASES}


def table(results: Results) -> str:
    """The comparison as Markdown."""
    lines = []
    for case in CASES:
        ours, torchs = results[case.name][0]
        name, sizes = case.name, str(case.sizes)
        for key in sorted({*ours, *torchs}, key=str):
            kind, axis = key
            left, right = torchs.get(key, NONE), ours.get(key, NONE)
            why = case.smaller.get(key) or case.torchs_fault.get(key)
            why = why or ("equal" if left == right else "UNEXPLAINED")
            cells = [name, sizes, kind, axis or "-"]
            cells += [f"{number:,}" for number in (*left, *right)]
            lines.append(f"| {' | '.join([*cells, why])} |\n")
            name = sizes = ""
    return HEAD + "".join(lines) + WIRE_HEAD + "".join(_wired())


def _wired() -> Iterator[str]:
    for case in WIRED:
        wired, usual = compare(case)[0]
        sizes = str(case.sizes)
        for key in sorted({*wired, *usual}, key=str):
            left, right = usual.get(key, NONE), wired.get(key, NONE)
            if left != right:  # not of parameters
                cells = [sizes, *map(str, key), *(f"{number:,}" for number in (*left, *right))]
                yield f"| {' | '.join(cells)} |\n"
                sizes = ""
