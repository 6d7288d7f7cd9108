"""plan proposes no layout that parallelize refuses, and refuses few that it accepts."""

import random
from collections import Counter

import pytest
import torch
from _support.planner.specs import spec_of, tp_plan
from llama import Llama, LlamaConfig

from parallel3d import MeshLayout, build_mesh, parallelize
from parallel3d.errors import Parallel3dError
from parallel3d.planner import Cluster, Workload, plan
from parallel3d.testing import fake_world

WORLDS = [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64]
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 32))]
REASONS = ("fast links join", "global_batch", "would compute all attention")


def random_config(seed: int) -> LlamaConfig:
    """Odd numbers of heads, hidden sizes and vocabularies that nothing divides."""
    rng = random.Random(seed)
    kv = rng.choice([1, 2, 3, 5, 7, 8])
    heads = kv * rng.choice([1, 2, 3])
    return LlamaConfig(
        dim=heads * 2 * rng.choice([1, 2, 3]),
        n_layers=2,
        n_heads=heads,
        n_kv_heads=kv,
        hidden_dim=rng.choice([8, 27, 31, 64, 88]),
        vocab_size=rng.choice([11, 50, 67, 128]),
        max_seq_len=16,
    )


def error_of(config: LlamaConfig, layout: MeshLayout, sequence: bool) -> Exception | None:
    """What ``build_mesh`` and ``parallelize`` raise for a model on meta, if anything."""
    with fake_world(0, layout.world_size):
        with torch.device("meta"):
            model = Llama(config)
        try:
            mesh = build_mesh(layout, device_type="cpu")
            parallelize(model, mesh, tp_plan(sequence))
        except Parallel3dError as error:
            return error
    return None


def case_of(seed: int) -> tuple[LlamaConfig, Cluster, Workload]:
    """A model, machines, a batch."""
    rng = random.Random(seed)
    world = rng.choice(WORLDS)
    per_node = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if world % n == 0])
    cluster = Cluster.of("h100-80gb-sxm", world // per_node, per_node)
    work = Workload(
        seq_len=rng.choice([7, 16]),
        global_batch=rng.choice([12, 16, 64]),
        sequence_parallel=rng.random() < 0.5,
    )
    return random_config(seed), cluster, work


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_proposed_is_accepted(seed):
    config, cluster, work = case_of(seed)
    found = plan(spec_of(config), cluster, work)
    layouts = [each.layout for each in found.layouts]
    assert layouts or found.refused
    for layout in layouts:
        assert error_of(config, layout, work.sequence_parallel) is None, str(layout)


@pytest.mark.slow
def test_what_is_refused_has_a_reason_of_the_machines_or_the_batch():
    """``parallelize`` would take nearly all that plan refuses: what is left are rules about what pays, and
    about the batch, of which ``parallelize`` knows nothing."""
    reasons: Counter[str] = Counter()
    for seed in range(50):
        config, cluster, work = case_of(seed)
        for refused in plan(spec_of(config), cluster, work).refused:
            kind = next((k for k in REASONS if k in refused.reason), refused.reason)
            reasons[kind] += 1
    assert set(reasons) <= set(REASONS), reasons
