"""ShardingStrategy: the mesh and reshard policy that say the same."""

import pytest
from _support.fsdp.wrapped import cpu_mesh
from _support.models import Lm, lm_loss, tokens
from torch.distributed import fsdp as torch_fsdp

from parallel3d import MeshError, MeshLayout, Parallel3dError, build_mesh, parallelize
from parallel3d.fsdp import ShardingStrategy, fully_shard, strategy_layout, strategy_options
from parallel3d.testing import fake_world, record_collectives

FULL, GRAD_OP, NO = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
HYBRID, ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


def test_it_is_torchs() -> None:
    assert ShardingStrategy is torch_fsdp.ShardingStrategy


@pytest.mark.parametrize(
    ("strategy", "options", "sizes"),
    [
        (FULL, {}, (1, 24, 1)),
        (FULL, {"tp": 3}, (1, 8, 3)),
        (GRAD_OP, {"tp": 2}, (1, 12, 2)),
        (NO, {}, (24, 1, 1)),
        (NO, {"tp": 4}, (6, 1, 4)),
        (HYBRID, {"shard": 6}, (4, 6, 1)),
        (HYBRID, {"shard": 3, "tp": 4}, (2, 3, 4)),
        (HYBRID, {}, (3, 8, 1)),  # LOCAL_WORLD_SIZE
        (ZERO2, {"tp": 2}, (3, 4, 2)),  # of a node's 8 ranks each tp group has 2
    ],
)
def test_layouts(monkeypatch, strategy, options, sizes) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert strategy_layout(strategy, 24, **options) == MeshLayout(*sizes)


@pytest.mark.parametrize(
    ("strategy", "options", "error", "match"),
    [
        ("FULL_SHARD", {}, Parallel3dError, "one of FULL_SHARD, SHARD_GRAD_OP"),
        (FULL, {"shard": 4}, Parallel3dError, "leave it out, or use HYBRID_SHARD"),
        (FULL, {"tp": 5}, MeshError, "not a multiple"),
        (HYBRID, {"shard": 5}, MeshError, "not a multiple"),
        (HYBRID, {"shard": 24}, MeshError, "use FULL_SHARD"),
        (ZERO2, {"shard": 24}, MeshError, "use SHARD_GRAD_OP"),
        (HYBRID, {"shard": 1}, MeshError, "use NO_SHARD"),
        (HYBRID, {"tp": 3}, MeshError, "a node must hold whole tp groups"),
        (HYBRID, {"tp": 0}, MeshError, "a node must hold whole tp groups"),
    ],
)
def test_layouts_that_can_not_be(monkeypatch, strategy, options, error, match) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(error, match=match):
        strategy_layout(strategy, 24, **options)


@pytest.mark.parametrize("given", [None, "", "0", "many"])
def test_ranks_of_a_node_must_be_known(monkeypatch, given) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if given is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    with pytest.raises(Parallel3dError, match="give shard="):
        strategy_layout(HYBRID, 8)


def test_options_and_meshes_that_disagree() -> None:
    with fake_world(0, 8):
        meshes = {sizes: cpu_mesh(*sizes) for sizes in ((2, 4, 1), (1, 8, 1), (8, 1, 1), (2, 2, 2))}
        for strategy, sizes, frees in (
            (FULL, (1, 8, 1), True),
            (GRAD_OP, (1, 8, 1), False),
            (NO, (8, 1, 1), False),
            (HYBRID, (2, 4, 1), True),
            (ZERO2, (2, 2, 2), False),
        ):
            options = strategy_options(strategy, meshes[sizes])
            assert options == {"mesh": meshes[sizes], "reshard_after_forward": frees}
        for strategy, sizes, match in (
            (FULL, (2, 4, 1), r"use HYBRID_SHARD, or MeshLayout\(shard=8\)"),
            (GRAD_OP, (2, 2, 2), r"use _HYBRID_SHARD_ZERO2, or MeshLayout\(shard=4\)"),
            (NO, (2, 4, 1), r"use FULL_SHARD, or MeshLayout\(replicate=8\)"),
            (HYBRID, (1, 8, 1), "use FULL_SHARD"),
            (HYBRID, (8, 1, 1), "use NO_SHARD"),
            (ZERO2, (1, 8, 1), "use SHARD_GRAD_OP"),
        ):
            with pytest.raises(MeshError, match=match):
                strategy_options(strategy, meshes[sizes])
        with pytest.raises(Parallel3dError, match="must be a ShardingStrategy"):
            strategy_options(None, meshes[2, 4, 1])
        with pytest.raises(MeshError, match="must be a DeviceMesh"):
            strategy_options(FULL, "mesh")


@pytest.mark.parametrize(("strategy", "gathers"), [(FULL, 2), (GRAD_OP, 1), (NO, 0)])
def test_gathers_of_a_block(strategy, gathers) -> None:
    """FULL_SHARD gathers it for forward and backward, SHARD_GRAD_OP once, NO_SHARD never."""
    with fake_world(0, 4):
        mesh = build_mesh(strategy_layout(strategy, 4), device_type="cpu")
        model = Lm(layers=1)
        fully_shard(model.layers[0], **strategy_options(strategy, mesh))
        fully_shard(model, mesh=mesh)
        with record_collectives(mesh) as recorder:
            lm_loss(model, tokens(0)).backward()
        found = [c for c in recorder.calls if c.op == "all_gather" and c.unit == "layers.0"]
        assert len(found) == gathers


def test_parallelize_takes_one() -> None:
    with fake_world(0, 4):
        mesh = build_mesh(strategy_layout(GRAD_OP, 4), device_type="cpu")
        model = parallelize(Lm(layers=1), mesh, fsdp=GRAD_OP)
        with record_collectives(mesh) as recorder:
            lm_loss(model, tokens(0)).backward()
        assert recorder.count("all_gather", unit="layers.0") == 1
        for options, error, match in (
            ({"fsdp": HYBRID}, MeshError, "use FULL_SHARD"),
            (
                {"fsdp": FULL, "reshard_after_forward": False},
                Parallel3dError,
                "fsdp is FULL_SHARD, which means True; leave one out",
            ),
            (
                {"fsdp": "full"},
                Parallel3dError,
                "must be True, False, a Sharding or a ShardingStrategy",
            ),
        ):
            plain = Lm(layers=1)
            with pytest.raises(error, match=match):
                parallelize(plain, mesh, **options)
            assert type(plain) is Lm
