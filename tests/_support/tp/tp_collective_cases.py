"""Models and plans of which our tensor-parallel collectives are compared with torch's.

torch's side is ``parallelize_module`` with the same plan, and once more with its ``PrepareModuleInput`` on
each module whose children read one input: the best that a plan can say there.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.nn import functional as F

from parallel3d import MeshLayout, build_mesh, tp
from parallel3d.fsdp import fully_shard
from parallel3d.testing import fake_world, record_collectives

Totals = dict[str, tuple[int, int]]
"""(calls, bytes) over tp, by kind of collective."""

SIZES = LlamaConfig(dim=32, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=64, max_seq_len=8)
RANKS = 2


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.o = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Whole(nn.Module):
    """A model of one block: embedding, block, head."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.block, self.head = block, nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.norm(self.embed(ids))))


@dataclass(frozen=True)
class Case:
    """One model and plan.

    Attributes:
        readers: by the module around them, children that read one input.
        rows: linears that sum, and the embedding.
        norms: what is sequence-parallel.
        sequence: whether the plan is.
    """

    name: str
    build: Callable[[], nn.Module]
    embed: str
    readers: dict[str, tuple[str, ...]]
    rows: tuple[str, ...]
    norms: tuple[str, ...]
    head: str
    sequence: bool = False

    def __str__(self) -> str:
        return self.name

    def ours(self) -> dict[str, Any]:
        part: Any = "sequence" if self.sequence else "replicate"
        plan: dict[str, Any] = {
            self.embed: tp.VocabParallel(output=part),
            self.head: tp.Colwise(input=part, output="replicate"),
        }
        for parent, children in self.readers.items():
            plan |= {f"{parent}.{child}": tp.Colwise(input=part) for child in children}
        plan |= {name: tp.Rowwise(output=part) for name in self.rows}
        return plan | ({n: tp.SequenceParallel() for n in self.norms} if self.sequence else {})

    def torchs(self, *, prepared: bool) -> dict[str, Any]:
        part = Shard(1) if self.sequence else Replicate()
        plan: dict[str, Any] = {
            self.embed: torchs.RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
            self.head: torchs.ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
        }
        for parent, children in self.readers.items():
            options = {} if prepared else {"input_layouts": part}
            plan |= {f"{parent}.{child}": torchs.ColwiseParallel(**options) for child in children}
            if prepared:
                plan[parent] = torchs.PrepareModuleInput(
                    input_layouts=(part,), desired_input_layouts=(Replicate(),)
                )
        plan |= {name: torchs.RowwiseParallel(output_layouts=part) for name in self.rows}
        norms = {name: torchs.SequenceParallel() for name in self.norms}
        return plan | (norms if self.sequence else {})


def _whole(block: type[nn.Module], *readers: str, row: str) -> dict[str, Any]:
    return {
        "build": lambda: Whole(block()),
        "embed": "embed",
        "readers": {"block": readers},
        "rows": (f"block.{row}",),
        "norms": ("norm",),
        "head": "head",
    }


MLP = _whole(GatedMlp, "gate", "up", row="down")
ATTENTION = _whole(Attention, "q", "k", "v", row="o")
LLAMA: dict[str, Any] = {
    "build": lambda: Llama(SIZES),
    "embed": "tok_embeddings",
    "readers": {"layers.*.attention": ("wq", "wk", "wv"), "layers.*.feed_forward": ("w1", "w3")},
    "rows": ("layers.*.attention.wo", "layers.*.feed_forward.w2"),
    "norms": ("layers.*.attention_norm", "layers.*.ffn_norm", "norm"),
    "head": "output",
}
CASES = [
    Case(f"{name}{', sequence-parallel' if sequence else ''}", **given, sequence=sequence)
    for name, given in (("gated MLP", MLP), ("attention", ATTENTION), ("Llama, 2 blocks", LLAMA))
    for sequence in (False, True)
]


def compare(case: Case) -> dict[str, Totals]:
    """What a step communicates over tp: ours, torch's, and torch's with ``PrepareModuleInput``."""
    torch.manual_seed(0)
    plain = case.build()

    def ours(model: nn.Module, mesh: DeviceMesh) -> None:
        tp.resolve_plan(model, case.ours(), RANKS).apply(model, mesh)
        for block in getattr(model, "layers", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def theirs(prepared: bool) -> Callable[[nn.Module, DeviceMesh], None]:
        def apply(model: nn.Module, mesh: DeviceMesh) -> None:
            plan = case.torchs(prepared=prepared)
            torchs.parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
            for block in getattr(model, "layers", ()):
                torch_fsdp.fully_shard(block, mesh=mesh["shard"])
            torch_fsdp.fully_shard(model, mesh=mesh["shard"])

        return apply

    return {
        "torch": _record(plain, theirs(False)),
        "torch, prepared": _record(plain, theirs(True)),
        "ours": _record(plain, ours),
    }


def _record(plain: nn.Module, apply: Callable[[nn.Module, DeviceMesh], None]) -> Totals:
    with fake_world(0, 2 * RANKS):
        mesh = build_mesh(MeshLayout(1, 2, RANKS), device_type="cpu")
        model = copy.deepcopy(plain)
        apply(model, mesh)
        with record_collectives(mesh) as recorder:
            model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    calls = recorder.select(axis="tp")
    numbers = Counter(call.op for call in calls)
    return {op: (n, sum(c.bytes for c in calls if c.op == op)) for op, n in numbers.items()}


PAGE = Path(__file__).parents[3] / "docs" / "tp_collectives.md"

HEAD = f"""\
# Tensor-parallel collectives, compared with torch's

What one training step communicates over `tp`, of {RANKS} ranks, on rank 0 of a fake process group:
calls, and bytes (the larger of each call's input and output). Three times the same styles on the same
modules: by torch's `parallelize_module` (2.13); by it with a `PrepareModuleInput` on each module whose
children read one input, which is the best a plan can say there; and ours, which shares by itself what
reads one tensor. Both are under their `fully_shard`. Our single sum of the norms' gradients (all-reduce,
sequence-parallel) is for each unit; torch's are one a parameter.
Written by `python tests/_support/collectives_table.py`; `tests/tp/test_tp_collectives_equal.py` checks
that it is up to date, and that ours are never more.

| model and plan | collective | torch | bytes | torch, prepared | bytes | ours | bytes |
|---|---|---:|---:|---:|---:|---:|---:|
"""

Results = dict[str, dict[str, Totals]]


def collect() -> Results:
    """Runs all cases."""
    with warnings.catch_warnings():
        # torch warns of a view that the model returns: its own hook, unused here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        return {case.name: compare(case) for case in CASES}


def table(results: Results) -> str:
    """The comparison as Markdown."""
    lines = []
    for name, sides in results.items():
        for kind in sorted(set().union(*sides.values())):
            numbers = [n for side in sides.values() for n in side.get(kind, (0, 0))]
            cells = [name, kind, *(f"{n:,}" for n in numbers)]
            lines.append(f"| {' | '.join(cells)} |\n")
            name = ""
    return HEAD + "".join(lines)
