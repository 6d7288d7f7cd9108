"""Small models for context parallelism, and their training beside the plain ones."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d import MeshLayout
from parallel3d.testing import assert_parity
from parallel3d.testing.parity import Parity

VOCABULARY, HIDDEN = 64, 32

# (replicate, shard, cp, tp)
MESHES = ((1, 1, 2, 1), (1, 2, 2, 1), (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 4, 1))


def layout_of(sizes: tuple[int, int, int, int]) -> MeshLayout:
    """(replicate, shard, cp, tp)."""
    return MeshLayout(sizes[0], sizes[1], sizes[3], cp=sizes[2])


class Block(nn.Module):
    """README's."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Lm(nn.Module):
    """Two blocks, with learned positions made by ``p3d.cp.positions``, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList([Block(HIDDEN, 4), Block(HIDDEN, 4)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        at = p3d.cp.positions(self, input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids) + self.places(at)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own encoder, bidirectional, on nn.MultiheadAttention."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        layer = functools.partial(
            nn.TransformerEncoderLayer, HIDDEN, 4, 64, dropout=0.0, batch_first=batch_first
        )
        self.layers = nn.ModuleList([layer(), layer()])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


HF: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {},
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 1.5,
    },
    "llama4_text": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_chunk_size": 5,
        "attn_temperature_tuning": False,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Families -> what their small configs have: plain, learned positions, caps and windows, chunks, sinks."""


def hf_model(name: str) -> nn.Module:
    """A small float64 model of a family of ``HF`` with random weights."""
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48}
    sizes |= {"num_attention_heads": 4, "num_hidden_layers": 2}
    if name == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_head": 4, "n_layer": 2}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    config = transformers.AutoConfig.for_model(name, **sizes, **HF[name])
    eager = name in ("gemma2", "gpt_oss")  # they have no other that knows caps and sinks
    model = transformers.AutoModelForCausalLM.from_config(
        config,
        attn_implementation="eager" if eager else "sdpa",
        experts_implementation="eager" if name == "gpt_oss" else None,
    )
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.double().train()


def batches(
    length: int, *, documents: tuple[int, ...] = (), padding: int = 0
) -> Callable[[int], dict[str, Tensor]]:
    """Function of the sample's number -> ids and labels; packed documents, in the other order in the second
    row; or rows with padding at the end."""

    def batch(number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        made = {"input_ids": ids, "labels": ids.clone()}
        if documents:
            rows = (documents, documents[::-1])
            made["position_ids"] = torch.stack([torch.cat([*map(torch.arange, r)]) for r in rows])
        if padding:
            made["attention_mask"] = mask = torch.ones_like(ids)
            mask[0, length - padding :], mask[1, length - 1 :] = 0, 0
            made["labels"] = torch.where(mask == 1, ids, -100)
        return made

    return batch


def samples() -> dict[str, Tensor]:
    """Two rows of 16 tokens and labels."""
    ids = torch.arange(32).view(2, 16) % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def hf_loss(model: nn.Module, **inputs: Tensor) -> Tensor:
    """The loss of a model of transformers."""
    return model(**inputs, use_cache=False).loss


def lm_loss(model: nn.Module, **inputs: Tensor) -> Tensor:
    """The loss of a model that returns logits, by the labels that ``shard_batch`` has shifted."""
    logits = model(inputs["input_ids"]).flatten(0, 1)
    if "shift_labels" not in inputs:
        ends = inputs["labels"].new_full((2, 1), -100)
        labels = torch.cat([inputs["labels"][:, 1:], ends], 1)
        return F.cross_entropy(logits, labels.flatten())
    total = F.cross_entropy(logits, inputs["shift_labels"].flatten(), reduction="sum")
    return total / inputs["num_items_in_batch"]


def parity(
    build: Callable[[], nn.Module], batch: Any, sizes: tuple[int, int, int, int], **options: Any
) -> Parity:
    """Loss, gradients and five AdamW steps in float64, plain and on the mesh; ``options`` of parallelize."""
    plain = build()
    loss = hf_loss if hasattr(plain, "config") else lm_loss
    return assert_parity(
        build,
        batch,
        layout_of(sizes),
        loss=loss,
        fp32=False,
        **({"tp_plan": "auto"} | options),
    )
