"""LoRA as a workload: a frozen base in bf16 and adapters in fp32, as peft makes them, on the engine."""

import dataclasses

import pytest
import torch
from _support.planner.held_by_engine import Held, local_of
from torch.nn import functional as F

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, optim, parallelize
from parallel3d.errors import PlanningError
from parallel3d.fsdp import param
from parallel3d.fsdp.inspect import units_of
from parallel3d.planner import (
    Cluster,
    Lora,
    Workload,
    plan,
    predict,
    spec_from_hf_config,
    spec_from_module,
    spec_from_shapes,
)
from parallel3d.planner.lora import with_lora
from parallel3d.planner.memory import state_memory
from parallel3d.testing import fake_world

LARGE = 2**13
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
}
TARGETS = {"all-linear": "all-linear", "q+v": ("q_proj", "v_proj"), "down": ("down_proj",)}
H100 = Cluster.of("h100-80gb-sxm", gpus_per_node=8)


def adapted(targets, device="cpu", **sizes):
    """A Llama in bf16 with peft's adapters in fp32, and its config."""
    transformers, peft = (pytest.importorskip(name) for name in ("transformers", "peft"))
    config = transformers.LlamaConfig(**{**SIZES, **sizes})
    wanted = targets if isinstance(targets, str) else list(targets)
    with torch.device(device):
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=wanted)), config


@pytest.mark.parametrize(
    ("targets", "layout"),
    [
        ("all-linear", MeshLayout(1, 8, 1)),
        ("all-linear", MeshLayout(2, 2, 2)),
        ("q+v", MeshLayout(1, 3, 1)),
        ("down", MeshLayout(2, 4, 1)),
        ("q+v", MeshLayout(1, 1, 1)),
    ],
    ids=str,
)
def test_the_engine_holds_what_is_predicted(targets, layout, monkeypatch):
    """To the byte: at rest, unsharded at the loss, the backward's peak, gradients and the optimizer's state,
    of a spec that was read of the module and of one that was made of the config."""
    model, config = adapted(TARGETS[targets])
    meta, _ = adapted(TARGETS[targets], "meta")
    work = Workload(seq_len=8, micro_batch=2, sequence_parallel=False)
    cpu = {"zero_copy_bytes": LARGE, "streams": False}
    found = state_memory(spec_from_module(meta, seq_len=8), layout, work, **cpu)
    made = with_lora(spec_from_hf_config(config), Lora(4, TARGETS[targets]))
    assert state_memory(made, layout, work, **cpu) == found
    monkeypatch.setattr(param, "CPU_BYTES", LARGE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with fake_world(0, layout.world_size):
        held = Held(monkeypatch)
        mesh = build_mesh(layout, device_type="cpu")
        parallelize(model, mesh, "auto" if layout.tp > 1 else None, mp_policy=policy)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = optim.local(torch.optim.AdamW, trained, foreach=True)
        model(tokens).logits.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with held.following(model):
            end = model(tokens).logits.float().sum()
            at_loss = held.begin_backward()
            end.backward()
        buckets = [
            bucket for unit in units_of(model, recurse=True) for bucket in unit.group.buckets
        ]
        moments = [
            local_of(value).nbytes
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ]
    assert sum(bucket.flat.nbytes for bucket in buckets) == found.parameters
    assert sum(moments) == found.optimizer
    assert at_loss == found.played.at_loss
    assert held.peak == found.played.unsharded + found.played.buffers
    assert held.most_reduced == found.gradients + found.results


STACK = Workload(seq_len=1).profile.with_values(
    "of which a dry run knows",
    {"host_unit": 0.0, "host_tp": 0.0, "straggler": 0.0},
    "not played",
)
LARGER = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 8192,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "use_cache": False,
}
KINDS = {"none": False, "full": True, "selective": "selective"}


def train(targets, layout: MeshLayout, kind: str, tokens: int) -> None:
    mesh = build_mesh(layout, device_type="cpu")
    model, _ = adapted(targets, "meta", **LARGER)
    parallelize(
        model,
        mesh,
        "auto" if layout.tp > 1 else None,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        activation_checkpointing=KINDS[kind],
    )
    model.to_empty(device="cpu")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    for _ in range(2):
        logits = model(input_ids=ids).logits.flatten(0, 1)
        F.cross_entropy(logits.float(), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("targets", "layout", "kind"),
    [
        ("all-linear", MeshLayout(1, 8, 1), "none"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("q+v", MeshLayout(1, 8, 1), "none"),
                ("all-linear", MeshLayout(1, 8, 1), "full"),
                ("all-linear", MeshLayout(2, 4, 1), "selective"),
                ("q+v", MeshLayout(1, 4, 2), "none"),
            )
        ),
    ],
    ids=str,
)
def test_a_step_as_the_library_runs_it(targets, layout, kind):
    """Parameters and optimizer to the byte, the peak within 2 % of a dry run's, the step within 0.2 %."""
    dryrun = pytest.importorskip("parallel3d.tools.dryrun")
    names, tokens = TARGETS[targets], 2048
    meta, config = adapted(names, "meta", **LARGER)
    work = Workload(
        seq_len=tokens,
        micro_batch=1,
        checkpointing=kind,
        fused_norm=False,
        sequence_parallel=False,
        loss_parallel=False,
        stack=STACK,
    )
    run = dryrun.record(lambda: train(names, layout, kind, tokens), 8, 0)
    seconds = dryrun.timeline(run, H100).step_seconds
    own = dataclasses.replace(work, lora=Lora(4, names))
    for found in (
        predict(spec_from_module(meta, seq_len=tokens), layout, H100, work),
        predict(spec_from_hf_config(config), layout, H100, own),
    ):
        terms, held = found.memory.terms, run.peak.by_kind
        assert terms["parameters"].value == held["parameters"]
        assert terms["optimizer"].value == pytest.approx(held["optimizer state"], abs=4096)  # steps
        assert found.memory.allocated == pytest.approx(run.peak.bytes, rel=0.02)
        assert found.step_seconds == pytest.approx(seconds, rel=0.002)


def test_what_is_left_out_and_what_is_added():
    """Adapters' parameters alone have gradients and optimizer state; the base is bf16 and reduces nothing."""
    spec, layout = spec_from_hf_config("llama-3.1-8b"), MeshLayout(1, 8, 1)
    work = Workload(seq_len=4096, micro_batch=1, checkpointing="full")
    plain = predict(spec, layout, H100, work)
    found = predict(spec, layout, H100, dataclasses.replace(work, lora=Lora(16)))
    made = found.model
    assert made.trained_numel == 41_943_040 and made.numel == spec.numel + made.trained_numel
    assert made.size == "8.07 B parameters, 41.9 M trained"
    each = {
        "parameters": 2 * spec.numel + 4 * made.trained_numel,
        "optimizer": 8 * made.trained_numel,
    }
    for name, nbytes in each.items():
        assert found.memory.terms[name].value == pytest.approx(nbytes / 8, rel=1e-3)
    matmuls = {m.name: m for m in made.units[2].matmuls}
    assert not matmuls["mlp.up"].weight_gradient and matmuls["mlp.up"].input_gradient
    assert matmuls["mlp.up.lora_B"].weight_gradient and matmuls["mlp.up.lora_B"].k == 16
    first = {m.name: m for m in made.units[1].matmuls}
    assert not first["attn.q"].input_gradient and first["mlp.up"].input_gradient
    assert made.units[1].count == 1 and made.blocks == spec.blocks
    backward = [p.time.terms["matmul backward"].value for p in (plain, found)]
    assert 0.45 < backward[1] / backward[0] < 0.62  # gradients of inputs, and the small ones
    assert found.time.terms["exposed reduce"].value < 0.1 * plain.time.terms["exposed reduce"].value
    assert "blocks" in found.explain() and "lora_A" in found.explain()
    again = predict(made, layout, H100, dataclasses.replace(work, lora=Lora(16)))
    assert again.memory == found.memory


def test_a_plan_has_adapters():
    """Where all of 70B doesn't fit, LoRA does."""
    work = Workload(seq_len=4096, global_batch=64)
    spec = spec_from_hf_config("llama-3.1-70b")
    with pytest.raises(PlanningError, match="nothing fits"):
        _ = plan(spec, H100, work).best
    found = plan(spec, H100, dataclasses.replace(work, lora=Lora(16, ("q_proj", "v_proj")))).best
    assert found.fits and found.as_dict()["lora"]["targets"] == ["q_proj", "v_proj"]


def test_experts_and_the_router_have_no_adapters():
    made = with_lora(spec_from_hf_config("mixtral-8x7b"), Lora(8))
    names = {m.name for u in made.units for m in u.matmuls if m.is_adapter}
    assert {name.partition(".lora")[0] for name in names} == {f"attn.{n}" for n in "qkvo"}


def test_mfu_by_6n_counts_the_frozen_experts_that_a_token_goes_through():
    spec, cluster = spec_from_hf_config("mixtral-8x7b"), Cluster.of("h100", 2)
    work = Workload(8192, 1, lora=Lora(16))
    found = predict(spec, MeshLayout(1, 16, 1), cluster, work)
    whole = predict(spec, MeshLayout(1, 16, 1), cluster, dataclasses.replace(work, lora=None))
    for each, per_parameter in ((found, 4), (whole, 6)):
        rate = each.tokens_per_second_per_gpu / (cluster.gpu.peak * 1e12)
        attention = 12 * 32 * 32 * 128 * 8192
        expected = (per_parameter * spec.active_numel + attention) * rate
        assert each.mfu_6n == pytest.approx(expected, rel=0.01)  # adapters are a thousandth


def test_targets_that_are_not_there_and_modules_without_adapters():
    shapes = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 96}
    spec = spec_from_shapes(**shapes)
    with pytest.raises(PlanningError, match="'w1'; the linear layers of a block are q, k"):
        with_lora(spec, Lora(4, ("w1",)))
    with pytest.raises(PlanningError, match="they must be 'all-linear' or names"):
        Lora(0, "q")
    with pytest.raises(PlanningError, match="frozen parameters already"):
        with_lora(with_lora(spec, Lora(4)), Lora(8))
    module = torch.nn.Sequential(torch.nn.Embedding(96, 64), torch.nn.Linear(64, 96))
    with pytest.raises(PlanningError, match=r"peft\.get_peft_model"):
        with_lora(spec_from_module(module), Lora(4))
    for text, made in {
        "16": Lora(16),
        "rank=8,targets=q+v": Lora(8, ("q", "v")),
        "targets=all-linear,base_dtype=fp32": Lora(16, "all-linear", "fp32"),
    }.items():
        assert Lora.of(text) == made
    for text in ("r=16", "rank=x", "8,targets=q,v"):
        with pytest.raises(PlanningError, match="lora"):
            Lora.of(text)
