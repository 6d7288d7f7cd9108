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
from parallel3d.planner.engine import unit_layout
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


def held_as(found: StateMemory, model, layout: MeshLayout, plan, patch: pytest.MonkeyPatch) -> None:
    """Equal are the engine's bytes of a second step: unsharded at the loss, backward's peak, gradients."""
    patch.setattr(param, "CPU_BYTES", LARGE)
    tokens = torch.zeros(2, 8, dtype=torch.long)

    def loss():
        out = model(tokens)
        return getattr(out, "logits", out).float().sum()

    with fake_world(0, layout.world_size):
        engine = Held(patch)
        mesh = build_mesh(layout, device_type="cpu")
        parallelize(model, mesh, plan if layout.tp > 1 else None, mp_policy=MIXED)
        loss().backward()
        model.zero_grad()
        with engine.following(model):
            end = loss()
            at_loss = engine.begin_backward()
            end.backward()
    assert at_loss == found.played.at_loss
    assert engine.peak == found.played.unsharded + found.played.buffers
    assert engine.most_reduced == found.gradients


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
    held_as(found, Llama(config), layout, tp_plan(sequence), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3", {"head_dim": 16}),
        pytest.param("phi3", {}, marks=pytest.mark.full),
    ],
    ids=["tied", "qwen3", "phi3"],
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
    held_as(found, model, layout, "auto", monkeypatch)


def mixtral(hidden: int, experts: int):
    """Its config, the model, and what is predicted of it: the same from the config and from the module."""
    transformers = pytest.importorskip("transformers")
    sizes = {"intermediate_size": 72, "vocab_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": experts}
    config = transformers.MixtralConfig(hidden_size=hidden, **sizes, **heads)
    with torch.device("meta"):
        spec = spec_from_module(transformers.AutoModelForCausalLM.from_config(config))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return spec_from_hf_config(config), spec, model


def predicted(closed, spec, layout: MeshLayout) -> StateMemory:
    found = on_cpu(closed, layout, False)
    assert found == on_cpu(spec, layout, False)
    return found


@pytest.mark.ci
@pytest.mark.parametrize("layout", [layout for layout, _ in LAYOUTS[:3]], ids=str)
def test_experts(layout):
    """Four experts, of which every rank of tp has a part: as the engine holds them, at rest."""
    *specs, model = mixtral(64, 4)
    found = predicted(*specs, layout)
    with fake_world(0, layout.world_size):
        mesh = build_mesh(layout, device_type="cpu")
        parallelize(model, mesh, "auto" if layout.tp > 1 else None, mp_policy=MIXED)
        buckets = [b for unit in units_of(model, recurse=True) for b in unit.group.buckets]
        assert sum(bucket.flat.nbytes for bucket in buckets) == found.parameters


@pytest.mark.parametrize(
    "layout",
    [MeshLayout(1, 8, 1), MeshLayout(2, 8, 2), MeshLayout(1, 6, 1), MeshLayout(1, 5, 1)],
    ids=str,
)
def test_experts_that_would_be_padded(layout, monkeypatch):
    """Four on more shards: another dim is sharded, if the shards divide one."""
    monkeypatch.setattr("parallel3d.fsdp.layout.LEAST_ELEMENTS", 2**12)
    monkeypatch.setattr("parallel3d.planner.memory.unit_layout", unit_layout.__wrapped__)
    closed, spec, model = mixtral(96, 4)
    found = predicted(closed, spec, layout)
    is_divided = layout.shard in (6, 8)
    whole = spec.numel * 4 / layout.shard
    assert layout.tp > 1 or (found.parameters < 1.05 * whole) == is_divided
    held_as(found, model, layout, "auto", monkeypatch)


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
    *specs, model = mixtral(64, experts)
    found = predicted(*specs, layout)
    held_as(found, model, layout, "auto", monkeypatch)
