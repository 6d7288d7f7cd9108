"""What the fullest rank computes of attention whose heads tp doesn't divide."""

import pytest
import torch
from _support.planner.specs import spec_of, tp_plan
from llama import Llama, LlamaConfig

from parallel3d.mesh import MeshLayout
from parallel3d.planner import Cluster, Workload, spec_from_module, spec_from_shapes
from parallel3d.planner.decoder import Decoder
from parallel3d.planner.engine import local_numels
from parallel3d.planner.kernels import activations_of, kernels_of, local_sizes
from parallel3d.planner.model_spec import head_share, local_heads
from parallel3d.planner.workload import Local
from parallel3d.tp import resolve_plan

GPU = Cluster.of("h100").gpu
WORK = Workload(seq_len=512, micro_batch=1)
CASES = [(8, 2, 4), (6, 2, 4), (6, 3, 2), (6, 3, 4), (6, 6, 4), (7, 1, 3), (12, 4, 8), (8, 8, 8)]


def block(heads, kv, **more):
    shapes = spec_from_shapes(
        layers=1, hidden=64 * heads, heads=heads, kv_heads=kv, ffn=256, vocab=64, **more
    )
    return next(u for u in shapes.units if u.kind == "block")


@pytest.mark.parametrize(("heads", "kv", "tp"), CASES)
def test_as_parallelize_shares_them(heads, kv, tp):
    config = LlamaConfig(8 * heads, 1, heads, kv, 32, 16, 16)
    with torch.device("meta"):
        model = Llama(config)
    plan = resolve_plan(model, tp_plan(False), tp)
    rows = {}
    for planned in plan.modules:
        _, _, name = planned.name.rpartition(".")
        if name in ("wq", "wk", "wv", "wo"):
            (param,) = planned.params
            rows[name] = param.local_shape(tp)
            read = getattr(planned.style, "heads", ())  # of keys and values that are whole at rest
            if read:
                rows[name] = (8 * max(max(r) - min(r) + 1 for r in read), 8 * heads)
    unit = next(u for u in spec_of(config).units if u.kind == "block")
    sizes = {m.name: local_sizes(m, tp) for m in unit.matmuls}
    for ours, name in (("q", "wq"), ("k", "wk"), ("v", "wv"), ("o", "wo")):
        assert sizes[f"attn.{ours}"] == rows[name]
    assert local_heads(unit.attention[0], tp).query * 8 == rows["wq"][0]
    found = spec_from_module(model, tp_plan=tp_plan(False))
    own = next(u for u in found.units if u.kind == "block")
    assert {
        m.name.rpartition(".")[2]: local_sizes(m, tp) for m in own.matmuls
    }.items() >= rows.items()
    layout = MeshLayout(tp=tp)
    assert local_numels(own, layout) == local_numels(unit, layout)


def test_keys_and_values_of_fewer_heads_than_ranks_are_whole():
    """At rest and in gathers; a rank computes what its query heads attend to."""
    unit = block(8, 2)
    pair, rest = 2 * 128 * 512, 2 * 512 * 512 + 3 * 256 * 512
    numel = pair + rest // 4 + 2 * 512
    assert local_numels(unit, MeshLayout(tp=4))["shard"] == (numel, numel)
    assert head_share(8, 2, 4) == (2, 1, 1)
    assert head_share(6, 2, 4) == (2, 2, 2)
    assert head_share(5, 5, 3) == (2, 2, 2)
    # Three query heads on two heads of keys: one comes twice.
    assert head_share(9, 3, 4) == (3, 2, 3)


def test_uneven_heads_cost_what_the_fullest_rank_has():
    """Six heads on four ranks take as long, and keep as much, as eight would."""
    six, eight = block(6, 6, head_dim=64), block(8, 8, head_dim=64)
    kernels = [kernels_of(unit, Local(GPU, WORK, 4)) for unit in (six, eight)]
    assert kernels[0].attention == kernels[1].attention
    sums = [a for unit in (six, eight) for a in unit.activations if a.name == "softmax sums"]
    assert sums[0].elements != sums[1].elements
    assert head_share(6, 6, 4).query == head_share(8, 8, 4).query == 2


def test_fused_projections_of_too_few_groups_are_computed_whole():
    decoder = Decoder(1, 512, 8, 2, 64, 256, 64, fused_qkv=True)
    unit = next(u for u in decoder.spec("", "").units if u.kind == "block")
    assert local_heads(unit.attention[0], 4).query == 8
    qkv = next(m for m in unit.matmuls if m.name == "attn.qkv")
    assert local_sizes(qkv, 4) == (qkv.n, qkv.k)
    assert local_sizes(qkv, 2) == (qkv.n // 2, qkv.k)


def test_kept_activations_of_uneven_heads():
    """Also of a module: as the closed form."""
    config = LlamaConfig(64 * 6, 4, 6, 2, 1024, 64, 512)
    with torch.device("meta"):
        found = spec_from_module(Llama(config), tp_plan=tp_plan(False), seq_len=512)
    splits = {a.split for u in found.units if u.kind == "block" for a in u.activations}
    assert {"heads", "kv", "tp"} <= splits
    for tp in (1, 2, 4):
        kept = [
            activations_of(spec, Local(GPU, WORK, tp)).kept for spec in (found, spec_of(config))
        ]
        assert kept[0] == pytest.approx(kept[1], rel=0.1)
