"""Expert parallelism on real processes: uneven messages, room, load, clipping, checkpoints, the audit."""

import pytest
from _support.ep.on_ranks import clipped, loads, logged, parity, planted, resumed, saved, with_room

from parallel3d import MeshLayout


@pytest.mark.parametrize(
    ("layout", "experts", "hot", "options"),
    [
        ({"shard": 4, "ep": 2}, 8, False, {}),
        ({"shard": 4, "ep": 4}, 6, False, {}),  # the last rank has no expert
        ({"shard": 4, "ep": 4}, 8, True, {}),  # three ranks get no token
        ({"shard": 2, "tp": 2, "ep": 4}, 8, False, {}),
        ({"replicate": 2, "shard": 2, "ep": 2}, 8, True, {"micro_batches": 2}),
        ({"shard": 4, "ep": 4}, 8, True, {"activation_checkpointing": "selective"}),
        ({"shard": 4, "ep": 2}, 8, False, {"activation_checkpointing": True}),
        ({"shard": 4, "ep": 2}, 8, False, {"activation_checkpointing": "offload"}),
    ],
    ids=str,
)
def test_as_the_plain_model(gloo_pool, layout, experts, hot, options) -> None:
    for grads in gloo_pool.run(parity, layout, experts, hot, options, world_size=4):
        assert grads < 1e-12


@pytest.mark.parametrize("sizes", [{"shard": 4, "ep": 4}, {"shard": 2, "tp": 2, "ep": 2}], ids=str)
def test_clipping(gloo_pool, sizes) -> None:
    gloo_pool.run(clipped, MeshLayout(**sizes), world_size=4)


def test_room(gloo_pool) -> None:
    dropped = gloo_pool.run(with_room, MeshLayout(shard=4, ep=4), world_size=4)
    assert all(each == dropped[0] for each in dropped)
    assert min(dropped[0]) > 0


def test_load_and_balance_are_equal_on_every_mesh(gloo_pool) -> None:
    layouts = [
        MeshLayout(shard=4, ep=4),
        MeshLayout(replicate=2, shard=2, ep=2),
        MeshLayout(shard=2, tp=2, ep=4),
        MeshLayout(shard=4),  # without ep
    ]
    found = [each for lay in layouts for each in gloo_pool.run(loads, lay, world_size=4)]
    assert all(each == found[0] for each in found)
    tokens, biases = found[0]
    assert all(sum(each) == 4 * 12 * 2 for each in tokens.values())  # samples x tokens x experts
    assert any(bias != 0 for layer in biases for bias in layer)


def test_a_change_of_ep_is_a_resharding(gloo_pool, tmp_path) -> None:
    gloo_pool.run(saved, str(tmp_path), MeshLayout(shard=8, ep=8), world_size=8)
    for sizes in (
        {"shard": 4},
        {"shard": 4, "ep": 2},
        {"shard": 2, "tp": 2, "ep": 4},
        {"replicate": 2, "shard": 2, "ep": 2},
        {"replicate": 4},
        {"tp": 4, "ep": 4},
    ):
        gloo_pool.run(resumed, str(tmp_path), MeshLayout(**sizes), world_size=4)


@pytest.mark.parametrize(
    ("fault", "layout", "said"),
    [
        ("", MeshLayout(shard=4, ep=2), ""),
        ("averaged over efsdp alone", MeshLayout(shard=4, ep=2), "experts: gradient of"),
        (
            "router without gradient",
            MeshLayout(shard=4, ep=2),
            "router.weight|gradient of its input",
        ),
        (
            "gradient missing of what is before the experts",
            MeshLayout(shard=4, ep=2),
            "experts: gradient of its input",
        ),
        (
            "gradient of tokens that went elsewhere missing",
            MeshLayout(shard=4, ep=4),
            "experts: gradient of",
        ),
        ("experts of another rank", MeshLayout(shard=4, ep=2), "experts: output differs"),
        ("tokens counted by each tp rank", MeshLayout(shard=2, tp=2, ep=2), "experts: gradient of"),
    ],
)
def test_the_audit_finds_planted_faults(gloo_pool, fault, layout, said) -> None:
    import re

    for message in gloo_pool.run(planted, fault, layout, world_size=4):
        assert bool(message) == bool(fault), message
        assert re.search(said, message), message


def test_a_step_prints_no_warning_of_torchs(gloo_pool) -> None:
    assert not any(gloo_pool.run(logged, MeshLayout(shard=4, ep=2), world_size=4))
