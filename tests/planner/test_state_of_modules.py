"""Specs from modules and from shapes have the engine's state and buffers."""

import pytest
import torch
from _support.planner.held_by_engine import Held
from _support.planner.specs import spec_of, tp_plan
from llama import Llama, LlamaConfig

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, parallelize
from parallel3d.fsdp import param
from parallel3d.fsdp.inspect import units_of
from parallel3d.planner import Workload, spec_from_hf_config, spec_from_module
from parallel3d.planner.memory import StateMemory, state_memory
from parallel3d.testing import fake_world

LARGE = 2**13
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYOUTS = [
    (MeshLayout(1, 8, 1), False),
    (MeshLayout(2, 4, 2), True),
    (MeshLayout(1, 2, 4), False),
    (MeshLayout(1, 3, 4), True),
]


def work_of(sequence: bool) -> Workload:
    return Workload(seq_len=8, micro_batch=2, sequence_parallel=sequence)


def on_cpu(spec, layout: MeshLayout, sequence: bool) -> StateMemory:
    work = work_of(sequence)
    return state_memory(spec, layout, work, zero_copy_bytes=LARGE, streams=False)


def held(model, layout: MeshLayout, plan, patch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """The engine's bytes in a second step: unsharded at the loss, the backward's peak, gradients."""
    patch.setattr(param, "CPU_BYTES", LARGE)
    tokens = torch.zeros(2, 8, dtype=torch.long)

    def loss():
        out = model(tokens)
        return getattr(out, "logits", out).float().sum()

    with fake_world(0, layout.world_size):
        found = Held(patch)
        mesh = build_mesh(layout, device_type="cpu")
        parallelize(model, mesh, plan if layout.tp > 1 else None, mp_policy=MIXED)
        loss().backward()
        model.zero_grad()
        with found.following(model):
            end = loss()
            at_loss = found.begin_backward()
            end.backward()
    return at_loss, found.peak, found.most_reduced


QUICK = {((8, 2), 1), ((6, 3), 2), ((6, 1), 1), ((6, 2), 2), ((6, 6), 3), ((6, 2), 3)}
CASES = [
    pytest.param(heads, *layout, marks=() if (heads, at) in QUICK else pytest.mark.full)
    for heads in [(8, 2), (6, 3), (6, 2), (6, 1), (6, 6)]
    for at, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("heads", "layout", "sequence"), CASES, ids=str)
def test_examples_llama(heads, layout, sequence, monkeypatch):
    """9 rows of the vocabulary and 67 hidden features, which nothing divides."""
    config = LlamaConfig(48 if 6 in heads else 64, 4, *heads, 67, 9, 16)
    with torch.device("meta"):
        spec = spec_from_module(Llama(config), tp_plan=tp_plan(sequence))
    assert spec.tp_ready and not spec.divisible
    found = on_cpu(spec, layout, sequence)
    assert found == on_cpu(spec_of(config), layout, sequence)
    engine = held(Llama(config), layout, tp_plan(sequence), monkeypatch)
    assert engine == (found.unsharded_at_loss, found.unsharded + found.buffers, found.gradients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3", {"head_dim": 16}),
        pytest.param("phi3", {}, marks=pytest.mark.full),
    ],
    ids=["llama", "tied", "qwen3", "phi3"],
)
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.full), 4])
def test_hugging_face_models_with_uneven_heads(kind, more, tp, monkeypatch):
    """6 query heads and 2 of keys and values for 4 ranks."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 75,
        "vocab_size": 9,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.CONFIG_MAPPING[kind](**sizes, **more)
    with torch.device("meta"):
        spec = spec_from_module(transformers.AutoModelForCausalLM.from_config(config))
    assert spec.tp_ready and not spec.divisible
    layout = MeshLayout(1, 4, tp)
    found = on_cpu(spec, layout, False)
    assert found == on_cpu(spec_from_hf_config(config), layout, False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    engine = held(model, layout, "auto", monkeypatch)
    assert engine == (found.unsharded_at_loss, found.unsharded + found.buffers, found.gradients)


@pytest.mark.ci
@pytest.mark.parametrize("layout", [layout for layout, _ in LAYOUTS[:3]], ids=str)
def test_experts(layout):
    """Four experts, of which every rank of tp has a part: as the engine holds them, at rest."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 72, "vocab_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads)
    spec = spec_from_hf_config(config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    found = on_cpu(spec, layout, False)
    with fake_world(0, layout.world_size):
        mesh = build_mesh(layout, device_type="cpu")
        parallelize(model, mesh, "auto" if layout.tp > 1 else None, mp_policy=MIXED)
        buckets = [b for unit in units_of(model, recurse=True) for b in unit.group.buckets]
        assert sum(bucket.flat.nbytes for bucket in buckets) == found.parameters


@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        (MeshLayout(1, 4, 1, ep=2), 8),
        (MeshLayout(1, 8, 1, ep=8), 8),
        (MeshLayout(2, 4, 1, ep=4), 6),
        (MeshLayout(1, 4, 2, ep=4), 4),
        (MeshLayout(1, 8, 1, ep=2), 6),
        (MeshLayout(1, 4, 2, ep=2), 4),
    ],
    ids=str,
)
def test_experts_on_ep(layout, experts, monkeypatch):
    """Experts are units of their own, in blocks, sharded over what ep leaves: as the engine holds them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 72, "vocab_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": experts}
    config = transformers.MixtralConfig(**sizes, **heads)
    found = on_cpu(spec_from_hf_config(config), layout, False)
    with torch.device("meta"):
        spec = spec_from_module(transformers.AutoModelForCausalLM.from_config(config))
    assert found == on_cpu(spec, layout, False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    engine = held(model, layout, "auto", monkeypatch)
    assert engine == (found.unsharded_at_loss, found.unsharded + found.buffers, found.gradients)
