"""A step as predict makes it up of a spec, and as the library runs it, on one clock."""

import dataclasses

import pytest
import torch
from llama import Llama, LlamaConfig
from plans import LLAMA_SEQUENCE_PLAN
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d.planner import Cluster, Prediction, Workload, predict, spec_from_module
from parallel3d.planner.engine import local_numels
from parallel3d.planner.stacks import stack_of
from parallel3d.planner.step_time import engine_collectives
from parallel3d.tools.dryrun import record, timeline

CONFIG = LlamaConfig(4096, 3, 32, 8, 14336, 32_000, 4096)
PLACES = torch.arange(4096)[None]
EXAMPLE = ((torch.zeros_like(PLACES), PLACES), {})
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


def train(layout: p3d.MeshLayout, kind: str, wire: torch.dtype | None = None) -> None:
    mesh = p3d.build_mesh(layout, device_type="cpu")
    with torch.device("meta"):
        model = Llama(CONFIG)
    cp = layout.cp > 1
    p3d.parallelize(
        model,
        mesh,
        tp_plan=LLAMA_SEQUENCE_PLAN,
        mp_policy=p3d.MixedPrecisionPolicy(torch.bfloat16, torch.float32, wire_dtype=wire),
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
    ("layout", "kind", "nic", "apart"),
    [
        (p3d.MeshLayout(1, 8, 1), "none", None, 0.001),
        *(
            pytest.param(p3d.MeshLayout(*sizes, cp=cp), kind, nic, apart, marks=pytest.mark.slow)
            for sizes, cp, kind, nic, apart in (
                ((8, 8, 1), 1, "full", 10.0, 0.001),
                ((8, 1, 1), 1, "none", None, 0.001),
                ((1, 8, 1), 1, "offload", None, 0.001),
                # Only predict knows that copies to the host and the network share a link.
                ((1, 64, 1), 1, "offload", 10.0, 0.03),
                ((1, 1, 8), 1, "none", None, 0.001),
                ((2, 4, 8), 1, "none", None, 0.003),
                ((1, 4, 1), 2, "none", None, 0.001),
                ((1, 4, 1), 2, "full", None, 0.001),
            )
        ),
    ],
    ids=str,
)
def test_the_same_step(layout: p3d.MeshLayout, kind: str, nic: float | None, apart: float) -> None:
    world = layout.world_size
    node = min(world, 8)
    cluster = Cluster.of("h100-80gb-sxm", world // node, node, nic)
    with torch.device("meta"):
        spec = spec_from_module(Llama(CONFIG), EXAMPLE, tp_plan=LLAMA_SEQUENCE_PLAN)
    found = predict(spec, layout, cluster, dataclasses.replace(WORK, checkpointing=kind))
    # The last rank of cp has keys of others before both its parts of the sequence.
    run = record(lambda: train(layout, kind), world, world - 1, gpus_per_node=node)
    played = timeline(run, cluster).step_seconds
    assert found.step_seconds == pytest.approx(played, rel=apart)


def bytes_of(found: Prediction, op: str, axis: str) -> float:
    """Of the engine's collectives of a step; 0 where the axis has one rank."""
    if found.links[axis].size == 1:
        return 0.0
    units = [(u.count, local_numels(u, found.layout)["shard"][0]) for u in found.model.units]
    calls = [(n, c) for n, size in units for c in engine_collectives(size, size, found).values()]
    return sum(n * nbytes for n, (kind, nbytes, over) in calls if (kind, over) == (op, axis))


@pytest.mark.parametrize(
    "layout",
    [
        p3d.MeshLayout(1, 8, 1),
        *(
            pytest.param(p3d.MeshLayout(*sizes), marks=pytest.mark.slow)
            for sizes in ((2, 8, 1), (2, 4, 2), (8, 1, 1))
        ),
    ],
    ids=str,
)
def test_the_same_step_with_bf16_on_the_wire(layout: p3d.MeshLayout) -> None:
    """Each reduction sends as many bytes as predicted, which is half of what it sends without; the step takes
    as long, and the peak is as high."""
    world = layout.world_size
    cluster = Cluster.of("h100-80gb-sxm", max(world // 8, 1), min(world, 8))
    with torch.device("meta"):
        spec = spec_from_module(Llama(CONFIG), EXAMPLE, tp_plan=LLAMA_SEQUENCE_PLAN)
    sent, usual = (
        predict(spec, layout, cluster, dataclasses.replace(WORK, wire_dtype=wire))
        for wire in ("bf16", None)
    )
    run = record(lambda: train(layout, "none", torch.bfloat16), world, 0, gpus_per_node=8)
    kinds = [("all_to_all", "shard"), ("all_to_all", "replicate"), ("all_gather", "replicate")]
    for op, axis in kinds:
        moved = sum(c.bytes for c in run.collectives if (c.op, c.axis) == (op, axis))
        assert moved == 2 * bytes_of(sent, op, axis) and not bytes_of(usual, op, axis)
        before = {"shard": "reduce_scatter", "replicate": "all_reduce"}[axis]
        assert 2 * bytes_of(sent, op, axis) == bytes_of(usual, before, axis)
    assert sent.step_seconds == pytest.approx(timeline(run, cluster).step_seconds, rel=0.05)
    if layout.shard > 1:
        assert sent.memory.allocated == pytest.approx(run.peak.bytes, rel=0.08)


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
