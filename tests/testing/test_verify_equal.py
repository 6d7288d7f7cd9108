"""verify raises no false alarm on correct models and plans."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.testing.verify_models import PLAN, SEQUENCE, VOCAB, Decoder, by_hand, ids
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d import MeshLayout
from parallel3d.testing import verify
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel

LLAMA = LlamaConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, vocab_size=VOCAB)
LLAMA_PLAN = {
    "tok_embeddings": VocabParallel(output="sequence"),
    "layers.*.{attention,ffn}_norm": SequenceParallel(),
    "layers.*.attention.w{q,k,v}": Colwise(input="sequence"),
    "layers.*.attention.wo": Rowwise(output="sequence"),
    "layers.*.feed_forward.w{1,3}": Colwise(input="sequence"),
    "layers.*.feed_forward.w2": Rowwise(output="sequence"),
    "norm": SequenceParallel(),
    "output": Colwise(input="sequence", output="replicate"),
}


def llama_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Gpt(nn.Module):
    """GPT-2's: learned positions, one projection for query, key and value, biases, tied head, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(8, 16)
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 30), nn.Linear(30, 16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids) + self.places(torch.arange(ids.shape[1])))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 4)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return self.head(x)


GPT_PLAN = {
    "embed": "embedding",
    "qkv": Colwise(packed=3, multiple_of=4),
    "out": Rowwise(multiple_of=4),
    "up": "colwise",
    "down": "rowwise",
    "head": "colwise_gather_output",
}


class Conv(nn.Module):
    """No batch norm, which sees other batches on data ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3)
        self.norm, self.head = nn.GroupNorm(2, 6), nn.Linear(5, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(image)), inplace=True)
        return self.head(F.relu_(self.second(x)).mean((2, 3)))


def image(index: int) -> Tensor:
    return torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(index))


def named(index: int) -> dict[str, Tensor]:
    return {"ids": ids(index)}


class Mha(nn.Module):
    """torch's attention, a mask among the arguments, outputs in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attn(x, x, x, attn_mask=mask)
        return self.norm(x + y), weights


def masked(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(2, 5, 16, generator=generator), torch.ones(5, 5).tril().log()


def torchs_own(model: nn.Module, mesh: Any) -> nn.Module:
    """torch's parallelize_module, no sharding of the data axes."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for layer in model.layers:
        parallelize_module(
            layer.mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    return model


llama = functools.partial(Llama, LLAMA)
CASES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, int, int], dict]] = {
    "llama, sequence and loss parallel": (
        llama, ids, (2, 2, 2),
        {"tp_plan": LLAMA_PLAN, "loss_parallel": True, "loss": llama_loss, "steps": 2}),
    "fewer kv heads than tp ranks": (
        llama, ids, (1, 1, 4), {"tp_plan": LLAMA_PLAN, "loss": llama_loss}),
    "tied, uneven vocabulary, shards of few rows": (
        functools.partial(Decoder, tied=True, layers=1), ids, (1, 4, 2), {"tp_plan": PLAN}),
    "gpt2 with dropout": (Gpt, ids, (3, 1, 2), {"tp_plan": GPT_PLAN}),
    "dropout under sequence parallelism": (
        functools.partial(Decoder, drop=0.2, layers=1), ids, (2, 1, 2), {"tp_plan": SEQUENCE}),
    "convolutions": (Conv, image, (1, 2, 1), {}),
    "micro-batches, checkpointing, inputs by name": (
        functools.partial(Decoder, layers=1), named, (2, 1, 2),
        {"tp_plan": PLAN, "micro_batches": 2, "activation_checkpointing": True}),
    "layers by hand, biases": (
        functools.partial(Decoder, vocab=20, bias=True), ids, (2, 1, 2), {"apply": by_hand}),
    "torch's attention": (Mha, masked, (1, 1, 2), {"tp_plan": {"attn": "attention"}}),
    "torch's parallelize_module": (
        functools.partial(Decoder, layers=1), ids, (1, 1, 2), {"apply": torchs_own}),
}  # fmt: skip


SLOW = {
    *("llama, sequence and loss parallel", "fewer kv heads than tp ranks", "gpt2 with dropout"),
    *(
        "tied, uneven vocabulary, shards of few rows",
        "micro-batches, checkpointing, inputs by name",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_no_false_alarm(name: str) -> None:
    build, batch, sizes, options = CASES[name]
    found = verify(build, batch, MeshLayout(*sizes), **{"steps": 1, **options})
    assert found.difference is None, str(found.difference)
    assert ("dropout" in name) <= (found.dropouts > 0)
