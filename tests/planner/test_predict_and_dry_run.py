"""A step as predict makes it up of a spec, and as the library runs it, on one clock: the same within 5 %."""

import dataclasses

import pytest
import torch
from llama import Llama, LlamaConfig
from plans import LLAMA_SEQUENCE_PLAN
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d.planner import Cluster, Workload, predict, spec_from_module
from parallel3d.planner.stacks import stack_of
from parallel3d.tools.dryrun import record, timeline

CONFIG = LlamaConfig(4096, 3, 32, 8, 14336, 32_000, 4096)
WORK = Workload(
    seq_len=4096,
    micro_batch=1,
    cp_attention="gather",
    sequence_parallel=True,
    stack=stack_of("parallel3d").with_values(
        "parallel3d, of which a dry run knows",
        {"host_unit": 0.0, "host_tp": 0.0, "straggler": 0.0},
        "not played",
    ),
)
KINDS = {"none": False, "full": True, "offload": p3d.ActivationOffload(pool_gib=256)}


def train(layout: p3d.MeshLayout, kind: str) -> None:
    mesh = p3d.build_mesh(layout, device_type="cpu")
    with torch.device("meta"):
        model = Llama(CONFIG)
    cp = layout.cp > 1
    p3d.parallelize(
        model,
        mesh,
        tp_plan=LLAMA_SEQUENCE_PLAN,
        mp_policy=p3d.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        activation_checkpointing=KINDS[kind],
        loss_parallel=True,
        context_parallel="gather" if cp else None,
        example=((torch.ones(2, 16, dtype=torch.long), torch.arange(16).expand(2, -1)), {})
        if cp
        else None,
    )
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    places = torch.arange(CONFIG.max_seq_len)[None]
    for _ in range(2):
        ids = torch.zeros_like(places)
        given = p3d.cp.shard_batch((ids, ids.clone(), places), mesh) if cp else (ids, ids, places)
        logits = model(given[0], given[2]).flatten(0, 1)
        F.cross_entropy(logits.float(), given[1].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("layout", "kind", "nic"),
    [
        (p3d.MeshLayout(1, 8, 1), "none", None),
        *(
            pytest.param(p3d.MeshLayout(*sizes, cp=cp), kind, nic, marks=pytest.mark.slow)
            for sizes, cp, kind, nic in (
                ((8, 8, 1), 1, "full", 10.0),
                ((1, 64, 1), 1, "offload", 10.0),
                ((2, 4, 8), 1, "none", None),
                ((1, 4, 1), 2, "full", None),
            )
        ),
    ],
    ids=str,
)
def test_the_same_step(layout: p3d.MeshLayout, kind: str, nic: float | None) -> None:
    world = layout.world_size
    node = min(world, 8)
    cluster = Cluster.of("h100-80gb-sxm", world // node, node, nic)
    with torch.device("meta"):
        spec = spec_from_module(Llama(CONFIG), tp_plan=LLAMA_SEQUENCE_PLAN, seq_len=4096)
    found = predict(spec, layout, cluster, dataclasses.replace(WORK, checkpointing=kind))
    run = record(lambda: train(layout, kind), world, world // 2, gpus_per_node=node)
    played = timeline(run, cluster).step_seconds
    assert found.step_seconds == pytest.approx(played, rel=0.05)


def train_experts(config, layout: p3d.MeshLayout, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    mesh = p3d.build_mesh(layout, device_type="cpu")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    p3d.parallelize(
        model,
        mesh,
        mp_policy=p3d.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        activation_checkpointing={**KINDS, "selective": "selective"}[kind],
    )
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(1, 4096, dtype=torch.long)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_the_same_step_with_experts_on_ep(kind: str) -> None:
    """Parameters to the byte, the peak within 8 %; a step as without ep. The dry run's routing is uniform."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_cache=False,
    )
    layout, cluster = p3d.MeshLayout(1, 8, 1, ep=4), Cluster.of("h100-80gb-sxm")
    with torch.device("meta"):
        spec = spec_from_module(transformers.AutoModelForCausalLM.from_config(config), seq_len=4096)
    stack = WORK.profile.with_values("of which a dry run knows", {"host_sync": 0.0}, "not played")
    work = dataclasses.replace(WORK, checkpointing=kind, fused_norm=False, stack=stack)
    found = predict(spec, layout, cluster, dataclasses.replace(work, sequence_parallel=False))
    run = record(lambda: train_experts(config, layout, kind), 8, 5)
    assert run.axis_ranks["efsdp"] == (1, 5) and run.axis_ranks["ep"] == (4, 5, 6, 7)
    held = run.peak.by_kind
    assert found.memory.terms["parameters"].value == held["parameters"]
    assert found.memory.allocated == pytest.approx(run.peak.bytes, rel=0.08)
    assert found.step_seconds == pytest.approx(timeline(run, cluster).step_seconds, rel=0.05)
