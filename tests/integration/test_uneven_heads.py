"""A whole Llama of sizes that don't divide, under the engine: key and value heads fewer than tp, query heads
and a hidden size that don't divide, a vocabulary of 67 and sequences of 5 (complaint 10 of
docs/tensor_parallel.md; 18 and 19 too)."""

import functools
import itertools

import pytest
import torch
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d import MeshLayout
from parallel3d.testing import assert_parity
from parallel3d.tp import Colwise, Rowwise, SequenceParallel, VocabParallel

PLAN = {
    "tok_embeddings": "embedding_rowwise",
    "layers.*.attention.{wq,wk,wv}": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.{w1,w3}": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "output": "colwise_gather_output",
}
SEQUENCE = {
    "tok_embeddings": VocabParallel(output="sequence"),
    "layers.*.{attention_norm,ffn_norm}": SequenceParallel(),
    "layers.*.attention.{wq,wk,wv}": Colwise(input="sequence"),
    "layers.*.attention.wo": Rowwise(output="sequence"),
    "layers.*.feed_forward.{w1,w3}": Colwise(input="sequence"),
    "layers.*.feed_forward.w2": Rowwise(output="sequence"),
    "norm": SequenceParallel(),
    "output": Colwise(input="sequence", output="replicate"),
}
PLANS = {"tp": PLAN, "sequence": SEQUENCE}
MESHES = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4)]
WAYS = list(itertools.product(MESHES, PLANS))
# The rest by -m full.
MARKS = {((1, 2, 2), "sequence"): (), ((1, 1, 4), "tp"): pytest.mark.slow}


def build(heads: int, kv: int) -> nn.Module:
    config = LlamaConfig(
        dim=4 * heads, n_heads=heads, n_kv_heads=kv, hidden_dim=13, vocab_size=67, max_seq_len=8
    )
    return Llama(config)


def batch(sample: int) -> Tensor:
    return torch.randint(67, (2, 6), generator=torch.Generator().manual_seed(sample))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    assert logits.shape == (2, 5, 67)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def parity(heads: list[tuple[int, int]], mesh: tuple[int, int, int], plan: str) -> list[float]:
    """Runs on every rank; returns the gradients' differences."""
    return [
        assert_parity(
            functools.partial(build, *pair),
            batch,
            MeshLayout(*mesh),
            loss=loss,
            tp_plan=PLANS[plan],
            steps=1,
            fp32=False,
        ).grads["float64"]
        for pair in heads
    ]


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [pytest.param(*way, marks=MARKS.get(way, pytest.mark.full)) for way in WAYS],
    ids=str,
)
def test_a_llama_of_uneven_heads(gloo_pool, mesh, plan) -> None:
    # One key and value head; fewer than ranks, shared unevenly; as many as query heads.
    heads = [(4, 1), (6, 3), (5, 5)] if mesh[2] == 2 else [(4, 1), (6, 2), (6, 6)]
    differences = gloo_pool.run(parity, heads, mesh, plan, world_size=mesh[0] * mesh[1] * mesh[2])
    assert all(d < 1e-12 for rank in differences for d in rank)
