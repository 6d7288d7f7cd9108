"""Random small models and layouts, and what the planner is told of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d import MeshLayout, MixedPrecisionPolicy
from parallel3d._util.units import find_units
from parallel3d.planner import ModelSpec, Workload
from parallel3d.planner.model_spec import Parameter, UnitSpec
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel

HEAD = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A model, a layout, and how it is trained.

    Attributes:
        blocks: kinds of the blocks, in order: "attention", "mlp", "adapter".
        frozen: names of leaves that aren't trained, within any block, or "embed".
        large: bytes from which a parameter travels in place.
        dtypes: of parameters, of computing, of reducing. wire: in which gradients are sent.
    """

    blocks: tuple[str, ...]
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    bias: bool
    tied: bool
    positions: bool
    frozen: tuple[str, ...]
    layout: MeshLayout
    sequence_parallel: bool
    reshard: bool
    dtypes: tuple[str, str, str]
    large: int
    wire: str | None = None

    @property
    def workload(self) -> Workload:
        """As the planner takes it."""
        rest, compute, reduce = self.dtypes
        return Workload(
            seq_len=8,
            micro_batch=2,
            precision=compute,
            param_dtype=rest,
            reduce_dtype=reduce,
            wire_dtype=self.wire,
            sequence_parallel=self.sequence_parallel,
            reshard_after_forward=self.reshard,
        )

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """As ``parallelize`` takes it."""
        rest, compute, reduce = (DTYPES[name] for name in self.dtypes)
        if self.wire is not None:
            return MixedPrecisionPolicy(compute, reduce, wire_dtype=DTYPES[self.wire])
        if rest == compute == reduce:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)

    def plan(self) -> dict | None:
        """The plan for tensor parallelism, None where there is none."""
        if self.layout.tp == 1:
            return None
        sequence = self.sequence_parallel
        whole, part = ("sequence", "sequence") if sequence else ("replicate", "replicate")
        plan: dict = {
            "embed": VocabParallel(output=part),
            "head": Colwise(input=whole, output="replicate"),
        }
        if "attention" in self.blocks:
            plan["layers.*.attention.{q,k,v}"] = Colwise(input=whole)
            plan["layers.*.attention.o"] = Rowwise(output=part)
            plan["layers.*.gate"] = Colwise(input=whole)
        plan["layers.*.up"] = Colwise(input=whole)
        plan["layers.*.down"] = Rowwise(output=part)
        if sequence:
            plan.update({"layers.*.norm*": SequenceParallel(), "norm": SequenceParallel()})
        return plan


def random_case(seed: int) -> Case:
    """One of many; layouts of up to 64 ranks."""
    rng = random.Random(seed)
    tp = rng.choice([1, 1, 2, 2, 3, 4, 8])
    shard = rng.choice([n for n in (1, 2, 2, 3, 4, 5, 8, 16, 32, 64) if n * tp <= 64])
    replicate = rng.choice([n for n in (1, 1, 2, 3, 4, 8) if n * shard * tp <= 64])
    kv_heads = rng.choice([1, 2, 3, 4, 8])
    kinds = ["attention", "mlp"] if tp > 1 else ["attention", "mlp", "adapter"]
    blocks = [rng.choice(kinds)] * rng.choice([1, 2, 3, 6])
    if rng.random() < 0.4:
        blocks += [rng.choice(kinds)] * rng.choice([1, 2])
    frozen = [] if rng.random() < 0.6 else rng.sample(["up", "norm", "embed", "v", "down"], 2)
    dtypes = rng.choice(
        [
            ("fp32", "fp32", "fp32"),
            ("fp32", "bf16", "fp32"),
            ("fp32", "bf16", "fp32"),
            ("fp32", "bf16", "bf16"),
            ("bf16", "bf16", "fp32"),
        ]
    )
    return Case(
        blocks=tuple(blocks),
        hidden=rng.choice([9, 16, 17, 24, 32]),
        heads=kv_heads * rng.choice([1, 2, 3]),
        kv_heads=kv_heads,
        ffn=rng.choice([24, 33, 40, 64]),
        vocab=rng.choice([17, 41, 64, 96]),
        bias=rng.random() < 0.5,
        tied=tp == 1 and rng.random() < 0.3,
        positions=tp == 1 and rng.random() < 0.3,
        frozen=tuple(frozen),
        layout=MeshLayout(replicate, shard, tp),
        sequence_parallel=tp > 1 and rng.random() < 0.5,
        reshard=rng.random() < 0.75,
        dtypes=dtypes,
        large=rng.choice([2**10, 2**11, 2**12, 2**20]),
    )


def wired_case(seed: int) -> Case:
    """``random_case`` with gradients that are sent in another dtype, or in the same, by all-to-alls."""
    case, rng = random_case(seed), random.Random(~seed)
    kinds = [("fp32", "bf16", "fp32"), ("fp32", "fp32", "fp32"), ("bf16", "bf16", "fp32")]
    layout = MeshLayout(1, max(case.layout.shard, 2), case.layout.tp)
    wire = rng.choice(["bf16", "bf16", "fp32"])
    return replace(case, layout=layout, dtypes=rng.choice(kinds), wire=wire)


class Attention(nn.Module):
    """Causal, with fewer heads of keys and values."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        h, bias = case.hidden, case.bias
        self.head_dim = HEAD
        self.q = nn.Linear(h, case.heads * HEAD, bias=bias)
        self.k = nn.Linear(h, case.kv_heads * HEAD, bias=bias)
        self.v = nn.Linear(h, case.kv_heads * HEAD, bias=bias)
        self.o = nn.Linear(case.heads * HEAD, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    """Norm, attention, norm, gated MLP. Parameters in the order of their use."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        h, bias = case.hidden, case.bias
        self.norm1 = nn.RMSNorm(h)
        self.attention = Attention(case)
        self.norm2 = nn.RMSNorm(h)
        self.gate = nn.Linear(h, case.ffn, bias=bias)
        self.up = nn.Linear(h, case.ffn, bias=bias)
        self.down = nn.Linear(case.ffn, h, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class MlpBlock(nn.Module):
    """Norm and MLP."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(case.hidden)
        self.up = nn.Linear(case.hidden, case.ffn, bias=case.bias)
        self.down = nn.Linear(case.ffn, case.hidden, bias=case.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class AdapterBlock(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.base = nn.Linear(case.hidden, case.hidden, bias=False).requires_grad_(False)
        self.a = nn.Linear(case.hidden, 3, bias=False)
        self.b = nn.Linear(3, case.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.b(self.a(x))


_BLOCKS = {"attention": AttentionBlock, "mlp": MlpBlock, "adapter": AdapterBlock}


class Net(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocab, case.hidden)
        self.positions = nn.Embedding(16, case.hidden) if case.positions else None
        self.layers = nn.ModuleList(_BLOCKS[kind](case) for kind in case.blocks)
        self.norm = nn.RMSNorm(case.hidden)
        self.head = nn.Linear(case.hidden, case.vocab, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        for name in case.frozen:
            if name == "embed":
                self.embed.requires_grad_(case.tied)
                continue
            for layer in self.layers:
                for inner, module in layer.named_modules():
                    if inner.rpartition(".")[2] == name:
                        module.requires_grad_(False)
        self.to(DTYPES[case.dtypes[0]])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def spec_of(model: Net, case: Case) -> ModelSpec:
    """What the planner is told: names, shapes, and what the plan says of them."""
    found = find_units(model)
    taken: set[int] = set()
    units: list[UnitSpec] = []
    for name, module in found.embeddings:
        units.append(UnitSpec(name, "embedding", _parameters([(name, module)], case, taken)))
    for name, module in found.blocks:
        made = UnitSpec("block", "block", _parameters([(name, module)], case, taken))
        if units and units[-1].kind == "block" and units[-1].parameters == made.parameters:
            units[-1] = replace(units[-1], count=units[-1].count + 1)
        else:
            units.append(made)
    if found.final_norm_and_head:
        units.append(UnitSpec("tail", "tail", _parameters(found.final_norm_and_head, case, taken)))
    rest = _parameters([("", model)], case, taken)
    if rest:
        units.insert(0, UnitSpec("root", "root", rest))
    return ModelSpec("net", tuple(units), case.hidden, case.vocab, tied=case.tied)


_CUT = {"embed": 0, "head": 0, "q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1}


def _parameters(
    modules: list[tuple[str, nn.Module]], case: Case, taken: set[int]
) -> tuple[Parameter, ...]:
    result = []
    for name, module in modules:
        for inner, parameter in module.named_parameters():
            if id(parameter) in taken:
                continue
            taken.add(id(parameter))
            path = f"{name}.{inner}".split(".")
            leaf, kind = path[-2], path[-1]
            cut = _CUT.get(leaf)
            if kind == "bias" and cut == 1:
                cut = None
            heads = leaf in ("q", "k", "v", "o") and cut is not None
            result.append(
                Parameter(
                    inner,
                    tuple(parameter.shape),
                    cut,
                    trainable=parameter.requires_grad,
                    heads=(case.heads, case.kv_heads) if heads else None,
                    kv=leaf in ("k", "v"),
                )
            )
    return tuple(result)
