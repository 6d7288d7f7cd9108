"""A spec from shapes has the engine's state and buffers too."""

import pytest
import torch
from held_by_engine import Held
from llama import Llama, LlamaConfig
from test_plan_is_legal import spec_of, tp_plan

from parallel3d import MeshLayout, MixedPrecisionPolicy, build_mesh, parallelize
from parallel3d.fsdp.buckets import in_place
from parallel3d.planner import Workload
from parallel3d.planner.state_memory import state_memory
from parallel3d.testing import fake_world

LARGE = 2**13
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (6, 6)])
@pytest.mark.parametrize(
    ("layout", "sequence"),
    [(MeshLayout(1, 8, 1), False), (MeshLayout(2, 4, 2), True), (MeshLayout(1, 2, 4), False)],
    ids=str,
)
def test_examples_llama(heads, layout, sequence, monkeypatch):
    config = LlamaConfig(48 if 6 in heads else 64, 4, *heads, 100, 67, 16)
    monkeypatch.setattr(in_place, "CPU_BYTES", LARGE)
    with fake_world(0, layout.world_size):
        held, model = Held(monkeypatch), Llama(config)
        plan = tp_plan(sequence) if layout.tp > 1 else None
        parallelize(model, build_mesh(layout, device_type="cpu"), plan, mp_policy=MIXED)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        model(tokens).float().sum().backward()
        model.zero_grad()
        with held.following(model):
            loss = model(tokens).float().sum()
            at_loss = held.begin_backward()
            loss.backward()
    work = Workload(seq_len=8, micro_batch=2, sequence_parallel=sequence)
    found = state_memory(spec_of(config), layout, work, in_place_bytes=LARGE, streams=False)
    assert at_loss == found.unsharded_at_loss
    assert held.peak == found.unsharded + found.buffers
    assert held.most_reduced == found.gradients == found.parameters
