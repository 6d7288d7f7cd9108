"""``parallelize`` on our engine, and with ``engine="torch"``, beside one plain process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import parallel3d as p3d
from _support.integrations.rows import STEPS, Result, Row, Run, difference, whole_weights
from _support.models import SEQUENCE_PLAN, Lm, tokens

VOCAB = 32


def llama(**more: Any) -> nn.Module:
    """Hugging Face's; two key and value heads of four."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **heads, **more))


def qwen3_tied() -> nn.Module:
    """With norms on each head, and one weight for embedding and head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=VOCAB, **sizes, **heads, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config)


def lm() -> nn.Module:
    return Lm(dim=12, hidden=24, vocab=VOCAB)


def plain(build: Callable[[], nn.Module]) -> nn.Module:
    """The same values on every rank, in float64."""
    torch.manual_seed(0)
    return build().double()


def batch(step: int) -> torch.Tensor:
    """(8, 8) ids: of all data ranks."""
    return tokens(step, batch=8, length=8, vocab=VOCAB)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    output = model(ids)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model: nn.Module, layout: p3d.MeshLayout | None = None, steps: int = STEPS) -> Run:
    """SGD with clipping, two micro-batches a step; without ``layout`` in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(steps):
        ids = batch(step)
        if layout is not None:
            rank = layout.data_rank(torch.distributed.get_rank())
            ids = ids.chunk(layout.data_size)[rank]
        halves = ids.chunk(2)
        total = torch.zeros((), dtype=torch.float64)
        for half in halves if layout is None else p3d.optim.accumulate(model, halves):
            loss = loss_of(model, half) / len(halves)
            loss.backward()
            total += loss.detach()
        p3d.optim.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if layout is not None:
            torch.distributed.all_reduce(total)
            total /= layout.world_size
        losses.append(total.item())
    return Run(losses, whole_weights(model))


def parallel(
    build: Callable[[], nn.Module], sizes: tuple[int, int, int], engine: str, plan: Any, **more: Any
) -> tuple[nn.Module, p3d.MeshLayout]:
    """The parallel model, and its layout."""
    layout = p3d.MeshLayout(*sizes)
    mesh = p3d.build_mesh(layout, device_type="cpu")
    plan = plan if layout.tp > 1 else None
    return p3d.parallelize(plain(build), mesh, tp_plan=plan, engine=engine, **more), layout


def run(build: Callable[[], nn.Module], sizes: tuple[int, int, int], plan: Any) -> Result:
    """Ten steps on either engine; the peer is torch's."""
    want = train(plain(build))
    ours, peers = (
        difference(train(*parallel(build, sizes, engine, plan)), want)
        for engine in ("parallel3d", "torch")
    )
    return Result(ours, peers)


_PROGRAMS: tuple[
    tuple[str, Callable[[], nn.Module], Any, tuple[tuple[int, int, int], ...]], ...
] = (
    ("Llama", llama, "auto", ((1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2))),
    ("Qwen3, tied", qwen3_tied, "auto", ((1, 2, 2),)),
    ("sequence parallel", lm, SEQUENCE_PLAN, ((1, 2, 2), (1, 1, 4))),
)

_row = partial(Row, lines=1, peer='engine="torch"', run=run)
ROWS = [
    _row(
        f'torch: parallelize(engine="torch"), {name}',
        packages=("torch", "transformers") if plan == "auto" else ("torch",),
        mesh=sizes,
        arguments=(build, sizes, plan),
    )
    for name, build, plan, meshes in _PROGRAMS
    for sizes in meshes
]
