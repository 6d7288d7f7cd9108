"""spec_from_module: what a run on the meta device finds, against the closed forms."""

import dataclasses

import pytest
import torch
from llama import Llama, LlamaConfig
from torch import nn
from torch.nn import functional as F

from parallel3d import MeshLayout
from parallel3d.errors import PlanningError
from parallel3d.planner import (
    Cluster,
    Workload,
    predict,
    spec_from_hf_config,
    spec_from_module,
    spec_from_shapes,
)
from parallel3d.planner.kernels import activations_of
from parallel3d.planner.workload import Local

PLAN = {
    "tok_embeddings": "embedding",
    "layers.*.attention.{wq,wk,wv}": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.{w1,w3}": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "output": "colwise_gather_output",
}
SIZES = {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 2, "ffn": 3584, "vocab": 8000}
H100 = Cluster.of("h100")


def our_llama(n_layers=4):
    config = LlamaConfig(
        dim=1024,
        n_layers=n_layers,
        n_heads=8,
        n_kv_heads=2,
        hidden_dim=3584,
        vocab_size=8000,
        max_seq_len=1024,
    )
    with torch.device("meta"):
        return Llama(config)


def hugging_face(kind, **values):
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](**values)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config), spec_from_hf_config(config)


def flops(spec):
    return sum(2 * m.times * m.n * m.k * u.count for u in spec.units for m in u.matmuls)


def kept(spec, work, tp=1):
    """Bytes that the blocks keep of a micro-batch."""
    blocks = tuple(u for u in spec.units if u.kind == "block")
    return activations_of(dataclasses.replace(spec, units=blocks), Local(H100.gpu, work, tp)).kept


def speed(spec, work, tp):
    layout = MeshLayout(replicate=1, shard=8 // tp, tp=tp)
    return predict(spec, layout, H100, work).tokens_per_second_per_gpu


HF = {
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 3584,
    "vocab_size": 8000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a norm of each head, or one product for all of q, k and v, takes of a step is less in these.
WIDER = HF | {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 7168}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = [
    ("llama", HF),
    ("qwen3", WIDER | {"head_dim": 128}),
    ("phi3", WIDER),
    (
        "gpt2",
        dict(n_layer=4, n_embd=512, n_head=8, activation_function="gelu", **NO_DROPOUT)
        | {"vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2},
    ),
    ("mpt", {"n_layers": 4, "d_model": 512, "n_heads": 8, "vocab_size": 8192}),
    ("mixtral", WIDER | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    pytest.param("mistral", HF, marks=pytest.mark.full),
]


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "values"), MODELS, ids=lambda v: v if isinstance(v, str) else "")
def test_as_the_closed_form_of_hugging_face_models(kind, values):
    model, closed = hugging_face(kind, **values)
    spec = spec_from_module(model, seq_len=512)
    assert spec.tp_ready, spec.source
    assert spec.numel == closed.numel == sum(p.numel() for p in model.parameters())
    assert flops(spec) == flops(closed)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (
        closed.heads,
        closed.kv_heads,
        closed.head_dim,
    )
    assert (spec.hidden, spec.vocab, spec.tied, spec.blocks) == (
        closed.hidden,
        closed.vocab,
        closed.tied,
        closed.blocks,
    )
    for tp in (1, 2):
        # So many tokens that the host, which starts other kernels in each, is not what a step waits for.
        work = Workload(seq_len=1024, micro_batch=16)
        for each in (work, dataclasses.replace(work, compile=True)):
            assert kept(spec, each, tp) == pytest.approx(kept(closed, each, tp), rel=0.10)
            assert speed(spec, each, tp) == pytest.approx(speed(closed, each, tp), rel=0.10)


def test_as_the_closed_form_of_our_llama():
    model, closed = our_llama(), spec_from_shapes(**SIZES)
    spec = spec_from_module(model, tp_plan=PLAN)
    assert spec.tp_ready, spec.source
    assert spec.numel == closed.numel and flops(spec) == flops(closed)
    assert [(u.kind, u.count) for u in spec.units] == [("embedding", 1), ("block", 4), ("tail", 1)]
    block = spec.units[1]
    assert (block.tp_inputs, block.tp_outputs) == ((1024, 1024), (1024, 1024))
    assert {m.name: m.split for m in block.matmuls}["feed_forward.w2"] == "k"
    work = Workload(seq_len=1024, micro_batch=4)
    for tp in (1, 2):
        assert kept(spec, work, tp) == pytest.approx(kept(closed, work, tp), rel=0.10)
        assert speed(spec, work, tp) == pytest.approx(speed(closed, work, tp), rel=0.10)


def test_what_tp_leaves_whole():
    """Gradients of a colwise layer's input are added up before their sum over tp, all tokens are looked up in
    each rank's part of the vocabulary, and tables of positions are whole: none of it is divided."""
    spec = spec_from_module(our_llama(), tp_plan=PLAN)
    whole = [[e for e in u.elementwise if e.split in ("gathered", "masked")] for u in spec.units]
    embedding, block, tail = ([(e.split, *e.eager) for e in each] for each in whole)
    assert embedding == [  # an id is as large as 4 numbers
        ("gathered", 2 * 1024 + 4, 3 * 1024 + 4),
        ("masked", 2 * 1024, 2 * 1024),
    ]
    tables = 2 * 4 * 128  # of q and k: 4 products with 64 fp32 numbers each
    sums = 3 * 3 * 1024  # q + k + v, gate + up
    assert block == [("gathered", tables, sums + tables)] and tail == []


def test_kept_activations_are_those_of_a_real_run():
    """Distinct storages that autograd keeps of a block on the CPU, where attention is one kernel too."""
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(dim=64, n_layers=1, n_kv_heads=8, hidden_dim=176, max_seq_len=64)
    ).bfloat16()
    spec = spec_from_module(model, tp_plan=None, seq_len=64)
    block, storages = model.layers[0], {}
    own = {t.untyped_storage().data_ptr() for t in [*block.parameters(), *block.buffers()]}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    class Fused(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):  # one kernel, which keeps its input, as on a GPU
            return F.layer_norm(x, x.shape[-1:], self.norm.weight)

    block.attention_norm, block.ffn_norm = Fused(block.attention_norm), Fused(block.ffn_norm)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(torch.randn(1, 64, 64, dtype=torch.bfloat16, requires_grad=True))
    real = sum(s.nbytes() for at, s in storages.items() if at not in own)
    assert kept(spec, Workload(seq_len=64, micro_batch=1)) == pytest.approx(real, rel=0.03)


def test_equal_blocks_run_once_and_deep_models_are_quick():
    from time import perf_counter

    begun = perf_counter()
    spec = spec_from_module(our_llama(n_layers=40), tp_plan=None)
    assert spec.blocks == 40 and len(spec.units) == 3
    assert perf_counter() - begun < 20


def test_the_model_is_unchanged():
    model = our_llama().eval()
    before = {n: (id(p), p.grad) for n, p in model.named_parameters()}
    forwards = [vars(m).get("forward") for m in model.modules()]
    spec_from_module(model, tp_plan=None)
    assert {n: (id(p), p.grad) for n, p in model.named_parameters()} == before
    assert [vars(m).get("forward") for m in model.modules()] == forwards
    assert not any(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not torch.distributed.is_initialized()


class Mlp(nn.Module):
    def __init__(self, look=False):
        super().__init__()
        self.up, self.down, self.look = nn.Linear(32, 128), nn.Linear(128, 32), look

    def forward(self, x):
        y = F.gelu(self.up(x))
        if self.look and bool((y > 0).any()):
            y = y * 2
        return self.down(y)


def test_a_model_without_tokens():
    with torch.device("meta"):
        model = Mlp()
    spec = spec_from_module(model, tp_plan={"up": "colwise", "down": "rowwise"})
    assert spec.vocab == spec.heads == 0 and spec.tp_ready
    assert spec.numel == sum(p.numel() for p in model.parameters())
    matmuls = [(m.n, m.k, m.split) for u in spec.units for m in u.matmuls]
    assert matmuls == [(128, 32, "n"), (32, 128, "k")]
    given = spec_from_module(model, torch.empty(2, 16, 32), tp_plan=None)
    assert flops(given) == flops(spec)
    assert not given.tp_ready and "tp_plan is None" in given.source


def test_eager_attention_is_attention():
    class Eager(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x):
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            scores = q @ k.transpose(-1, -2) / 4
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            p = scores.masked_fill(mask, float("-inf")).softmax(-1)
            return self.out((p @ v).transpose(1, 2).flatten(2))

    with torch.device("meta"):
        model = Eager()
    spec = spec_from_module(model, torch.empty(2, 48, 64), tp_plan=None)
    (attention,) = [a for u in spec.units for a in u.attention]
    assert (attention.heads, attention.head_dim, attention.causal) == (4, 16, True)
    assert len([m for u in spec.units for m in u.matmuls]) == 2
    for unit in spec.units:  # nothing of the size of the scores
        assert all(a.elements < 4 * 48 * 2 for a in unit.activations)


def test_its_sequences_can_be_cut_over_cp():
    """What blocks keep is divided, and attention communicates, as in a model from shapes."""
    with torch.device("meta"):
        model = Llama(LlamaConfig.named("small"))
    spec = spec_from_module(model, seq_len=256)
    work = Workload(seq_len=65536, micro_batch=1, cp_attention="ring")
    whole, part = (activations_of(spec, Local(H100.gpu, work, cp=cp)).kept for cp in (1, 4))
    assert part == pytest.approx(whole / 4, rel=1e-3)
    found = predict(spec, MeshLayout(1, 2, 1, cp=4), H100, work)
    assert found.time.terms["context parallel"].value > 0


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        (3, None, "nn.Module"),
        (nn.Identity(), None, "no parameters"),
        (Mlp(look=True), None, "values of activations"),
        (Mlp(), "x", "str"),
        (Mlp(), ((), {}), "no tensor"),
    ],
)
def test_says_what_is_wrong(model, example, says):
    with pytest.raises(PlanningError, match=says):
        spec_from_module(model, example, tp_plan=None)
