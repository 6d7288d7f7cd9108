"""Random language models and random plans for them, for tests/tp/test_random_plans.py.

The models are written as people write them: for one process, with sizes that divide by little.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.tp import (
    Colwise,
    PrepareInput,
    Replicated,
    Rowwise,
    SequenceParallel,
    VocabParallel,
)

HEAD_DIM = 2


@dataclass(frozen=True)
class BlockSpec:
    """One block and its part of the plan.

    Attributes:
        kv_heads, groups: numbers of key and value heads and of query heads for each.
        attention, mlp: how the plan splits them, see ``PLANS``.
        mlp_kind: ``"plain"``, ``"gated"`` or ``"packed"`` (gate and up in one weight).
    """

    kv_heads: int
    groups: int
    qk_norm: bool
    bias: bool
    hidden: int
    mlp_kind: str
    attention: str
    mlp: str


@dataclass(frozen=True)
class Case:
    """A model, its plan and the mesh."""

    blocks: tuple[BlockSpec, ...]
    dim: int
    vocab: int
    length: int
    tied: bool
    norm: str
    sequence: bool
    head: str
    embedding: str
    mesh: tuple[int, int, int]


class Attention(nn.Module):
    def __init__(self, dim: int, spec: BlockSpec) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = spec.kv_heads * spec.groups, spec.kv_heads
        self.num_key_value_groups = spec.groups
        self.head_dim = HEAD_DIM
        self.q_proj = nn.Linear(dim, self.num_heads * HEAD_DIM, bias=spec.bias)
        self.k_proj = nn.Linear(dim, self.num_key_value_heads * HEAD_DIM, bias=spec.bias)
        self.v_proj = nn.Linear(dim, self.num_key_value_heads * HEAD_DIM, bias=spec.bias)
        self.o_proj = nn.Linear(self.num_heads * HEAD_DIM, dim, bias=spec.bias)
        self.q_norm = nn.RMSNorm(HEAD_DIM) if spec.qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.num_heads, HEAD_DIM))
        k = self.k_proj(x).view(batch, length, self.num_key_value_heads, HEAD_DIM)
        v = self.v_proj(x).view(batch, length, self.num_key_value_heads, HEAD_DIM)
        k = k.repeat_interleave(self.num_key_value_groups, 2)
        v = v.repeat_interleave(self.num_key_value_groups, 2)
        # Written out: simulated ranks with different numbers of heads can't do matmul of four dims.
        scores = (q.unsqueeze(2) * k.unsqueeze(1)).sum(-1) / HEAD_DIM**0.5  # (batch, q, k, heads)
        y = (scores.softmax(2).unsqueeze(-1) * v.unsqueeze(1)).sum(2)
        return self.o_proj(y.reshape(batch, length, self.num_heads * HEAD_DIM))


class Mlp(nn.Module):
    def __init__(self, dim: int, spec: BlockSpec) -> None:
        super().__init__()
        self.kind = spec.mlp_kind
        hidden, bias = spec.hidden, spec.bias
        if self.kind == "packed":
            self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias)
        else:
            self.up = nn.Linear(dim, hidden, bias=bias)
            if self.kind == "gated":
                self.gate = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "packed":
            gate, up = self.gate_up(x).chunk(2, -1)
            return self.down(F.silu(gate) * up)
        if self.kind == "gated":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int, spec: BlockSpec, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(dim), norm(dim)
        self.attention, self.mlp = Attention(dim, spec), Mlp(dim, spec)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class RandomLm(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        norm = nn.LayerNorm if case.norm == "layer" else nn.RMSNorm
        self.embed = nn.Embedding(case.vocab, case.dim)
        self.layers = nn.ModuleList(Block(case.dim, spec, norm) for spec in case.blocks)
        self.norm = norm(case.dim)
        self.head = nn.Linear(case.dim, case.vocab, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan_of(case: Case) -> dict[str, Any]:
    """The case's plan."""
    plan: dict[str, Any] = {}
    taken, given = ("sequence", "sequence") if case.sequence else ("replicate", "replicate")
    if case.sequence or case.embedding == "vocabulary":
        plan["embed"] = VocabParallel(output=given)
    elif case.embedding == "width":
        plan["embed"] = "embedding_colwise"
    for i, spec in enumerate(case.blocks):
        at = f"layers.{i}"
        if case.sequence:
            plan[at + ".norm_{1,2}"] = "sequence_parallel"
        plan |= _attention(f"{at}.attention", spec, taken, given, case.sequence)
        plan |= _mlp(f"{at}.mlp", spec, taken, given, case.sequence)
    if case.sequence:
        plan["norm"] = SequenceParallel(output="replicate")
    if case.head == "split":
        plan["head"] = "colwise_gather_output"
    return plan


def _attention(at: str, spec: BlockSpec, taken: Any, given: Any, sequence: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    # Its forward reads the length of its input: it must be given all of the sequence.
    how = "prepared" if sequence else spec.attention
    if how == "whole":
        return plan
    if how == "gathered":
        plan[at + ".{q,k,v}_proj"] = "colwise_gather_output"
        plan[at + ".o_proj"] = "rowwise_split_input"
        return plan
    if how == "prepared":
        plan[at] = PrepareInput(layout=taken)
        taken = "gathered"
    plan[at + ".{q,k,v}_proj"] = Colwise(input=taken)
    plan[at + ".o_proj"] = Rowwise(output=given)
    if spec.qk_norm:
        plan[at + ".q_norm"] = Replicated("partial")
    return plan


def _mlp(at: str, spec: BlockSpec, taken: Any, given: Any, sequence: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    how = spec.mlp if not sequence or spec.mlp in ("split", "prepared") else "split"
    if how == "whole":
        return plan
    into = {"plain": "up", "gated": "{gate,up}", "packed": "gate_up"}[spec.mlp_kind]
    packed = 2 if spec.mlp_kind == "packed" else 1
    if how == "gathered":
        plan[f"{at}.{into}"] = Colwise(output="replicate", packed=packed)
        plan[f"{at}.down"] = Rowwise(input="replicate")
        return plan
    if how == "prepared":
        plan[at] = PrepareInput(layout=taken)
        taken = "gathered"
    plan[f"{at}.{into}"] = Colwise(input=taken, packed=packed)
    plan[f"{at}.down"] = Rowwise(output=given)
    return plan


PLANS = ("split", "split", "prepared", "gathered", "whole")
MESHES = ((1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 3, 2), (1, 2, 3), (2, 2, 2))

blocks = st.builds(
    BlockSpec,
    kv_heads=st.integers(1, 4),
    groups=st.integers(1, 3),
    qk_norm=st.booleans(),
    bias=st.booleans(),
    hidden=st.integers(1, 9),
    mlp_kind=st.sampled_from(("plain", "gated", "packed")),
    attention=st.sampled_from(PLANS),
    mlp=st.sampled_from(PLANS),
)
cases = st.builds(
    Case,
    blocks=st.lists(blocks, min_size=1, max_size=2).map(tuple),
    dim=st.integers(4, 7),
    vocab=st.integers(4, 13),
    length=st.integers(1, 7),
    tied=st.booleans(),
    norm=st.sampled_from(("layer", "rms")),
    sequence=st.booleans(),
    head=st.sampled_from(("split", "split", "whole")),
    embedding=st.sampled_from(("vocabulary", "width", "whole")),
    mesh=st.sampled_from(MESHES),
).filter(lambda c: _is_possible(c))


def _is_possible(case: Case) -> bool:
    """Not what is refused for good reasons: a tied weight split in two ways, a plan that splits nothing."""
    splits_table = case.sequence or case.embedding == "vocabulary"
    if case.tied and (case.head == "split") != splits_table:
        return False
    if case.tied and case.embedding == "width" and not case.sequence:
        return False
    return bool(plan_of(case))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Of the next token; the one of the first where there is only one."""
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def batch_of(case: Case, index: int) -> Tensor:
    """Two samples, different for each index."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, case.vocab, (2, case.length), generator=generator)
