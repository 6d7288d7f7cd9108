"""The table of axes, and MeshLayout: sizes, -1, rank <-> coordinates, groups, what its errors say."""

import ast
import dataclasses
import inspect
import math
import pickle
from itertools import pairwise

import pytest

from parallel3d.errors import MeshError, Parallel3dError, WrongTypeError
from parallel3d.mesh import AXES, MeshLayout, layout
from parallel3d.mesh.axes import (
    DATA_AXES,
    TABLE,
    TOKEN_AXES,
    Role,
    axis_named,
    guess,
    is_data_axis,
    names_of,
)


def test_layout_module_needs_no_torch() -> None:
    tree = ast.parse(inspect.getsource(layout))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [node.names[0].name])
    }
    assert "torch" not in imported


def test_the_table_is_what_layouts_have() -> None:
    assert AXES == ("replicate", "shard", "cp", "tp")
    assert DATA_AXES == ("replicate", "shard") and TOKEN_AXES == ("replicate", "shard", "cp")
    names = [name for axis in TABLE for name in (axis.name, *axis.other_names)]
    assert len(set(names)) == len(names)
    assert [axis_named(name) for name in ("dp_shard", "tp", "x")] == [TABLE[1], TABLE[3], None]


def test_roles() -> None:
    assert names_of(Role.SHARDED) == ("shard", "dp_shard", "shard_cp", "dp_shard_cp", "efsdp")
    data = ("replicate", "dp_shard", "dp", "shard_cp")
    assert all(map(is_data_axis, data)) and not any(map(is_data_axis, ("cp", "tp", None, "pp")))
    named = {"tensor_parallel": "tp", "ddp": "replicate", "data": "shard", "context_parallel": "cp"}
    assert {name: guess(name) for name in named} == named


def test_value_semantics() -> None:
    assert MeshLayout() == MeshLayout(1, 1, 1)
    assert hash(MeshLayout(tp=2)) == hash(MeshLayout(1, 1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        MeshLayout().tp = 2  # type: ignore[misc]


def test_str() -> None:
    assert str(MeshLayout(2, 2, 2)) == "replicate 2 x shard 2 x tp 2 = 8 ranks"
    assert str(MeshLayout()) == "replicate 1 x shard 1 x tp 1 = 1 rank"
    assert str(MeshLayout(2, -1, 4)) == "replicate 2 x shard -1 x tp 4"
    assert str(MeshLayout(2, 2, 4, cp=8)) == "replicate 2 x shard 2 x cp 8 x tp 4 = 128 ranks"
    assert repr(MeshLayout(2, 3)) == "MeshLayout(replicate=2, shard=3, tp=1)"
    assert repr(MeshLayout(cp=-1)) == "MeshLayout(replicate=1, shard=1, cp=-1, tp=1)"


def test_cp_is_given_by_name_and_lies_between_shard_and_tp() -> None:
    mesh = MeshLayout(2, 2, 2, cp=3)
    assert mesh.axes == ("replicate", "shard", "cp", "tp") and mesh.sizes == (2, 2, 3, 2)
    assert mesh.as_dict() == {"replicate": 2, "shard": 2, "cp": 3, "tp": 2}
    assert mesh.coordinates(9) == {"replicate": 0, "shard": 1, "cp": 1, "tp": 1}
    assert mesh.groups("cp")[:2] == [(0, 2, 4), (1, 3, 5)]
    assert (mesh.data_size, mesh.data_rank(9), mesh.data_rank(23)) == (4, 1, 3)
    assert MeshLayout(2, cp=-1, tp=2).resolve(24) == MeshLayout(2, cp=6, tp=2)
    assert MeshLayout(2, cp=-1, tp=2).resolve(4) == MeshLayout(2, tp=2)
    with pytest.raises(
        WrongTypeError, match=r"given 4 .* replicate, shard and tp so: give cp= and ep= by"
    ):
        MeshLayout(2, 2, 2, 3)  # type: ignore[misc]
    with pytest.raises(MeshError, match=r"Nearest that fit: replicate 1 x shard 1 x cp 2 x tp 1"):
        MeshLayout(cp=3).resolve(2)
    with pytest.raises(MeshError) as without:
        MeshLayout(shard=3).resolve(2)
    assert "cp" not in str(without.value)


@pytest.mark.parametrize(
    ("sizes", "world_size", "resolved"),
    [
        ((2, -1, 4), 64, (2, 8, 4)),
        ((-1, 2, 4), 64, (8, 2, 4)),
        ((2, 2, -1), 4, (2, 2, 1)),
        ((-1, 1, 1), 1, (1, 1, 1)),
        ((2, 3, 4), 24, (2, 3, 4)),
    ],
)
def test_resolve(sizes, world_size, resolved) -> None:
    done = MeshLayout(*sizes).resolve(world_size)
    assert done == MeshLayout(*resolved)
    assert done.is_resolved
    assert done.world_size == world_size
    assert done.resolve(world_size) is done


@pytest.mark.parametrize("axis", AXES)
def test_groups_partition_the_world_and_differ_in_one_coordinate(axis) -> None:
    mesh = MeshLayout(2, 3, 4, cp=2)
    groups = mesh.groups(axis)
    assert {b - a for group in groups for a, b in pairwise(group)} == {mesh.stride(axis)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert groups == sorted(groups)
    for group in groups:
        at = [mesh.coordinates(rank) for rank in group]
        assert [c.pop(axis) for c in at] == list(range(getattr(mesh, axis)))
        assert all(c == at[0] for c in at)


def test_round_trip_of_any_layout() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    sizes = st.integers(1, 64)

    @hypothesis.given(sizes, sizes, sizes, sizes, st.data())
    @hypothesis.settings(max_examples=200, deadline=None)
    def check(replicate, shard, tp, cp, data) -> None:
        mesh = MeshLayout(replicate, shard, tp, cp=cp)
        rank = data.draw(st.integers(0, mesh.world_size - 1))
        at = mesh.coordinates(rank)
        assert mesh.rank(**at) == rank
        data_rank = at["replicate"] * shard + at["shard"]
        assert rank == (data_rank * cp + at.get("cp", 0)) * tp + at["tp"]
        assert mesh.data_rank(rank) == rank // (tp * cp) == data_rank
        axis = data.draw(st.sampled_from(AXES))
        unknown = dataclasses.replace(mesh, **{axis: -1})
        assert unknown.resolve(mesh.world_size) == mesh

    check()


# Errors


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -2, -8])
def test_size_below_one(axis, size) -> None:
    with pytest.raises(MeshError, match=f"{axis}={size}: .* 1 or more .* or -1"):
        MeshLayout(**{axis: size})


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [True, 2.0, "2", None, [2]])
def test_size_not_an_int(axis, size) -> None:
    with pytest.raises(MeshError, match=rf"^{axis}=.* is a {type(size).__name__}: .* int"):
        MeshLayout(**{axis: size})


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((-1, -1, 1), "replicate and shard"),
        ((-1, 2, -1), "replicate and tp"),
        ((-1, -1, -1), "replicate, shard and tp"),
    ],
)
def test_more_than_one_unknown(sizes, named) -> None:
    with pytest.raises(MeshError, match=f"^{named} are -1: only one .* for example [a-z]*=1"):
        MeshLayout(*sizes)


def test_wrong_product_says_what_would_fit() -> None:
    with pytest.raises(MeshError) as info:
        MeshLayout(tp=8).resolve(12)
    text = str(info.value)
    assert "replicate 1 x shard 1 x tp 8 = 8 ranks, but the world has 12 ranks." in text
    assert "tp may be 1, 2, 3, 4, 6 or 12." in text
    assert "Nearest that fit: replicate 1 x shard 1 x tp 12;" in text
    assert text.endswith("Or start 8 ranks.")
    assert isinstance(info.value, Parallel3dError) and isinstance(info.value, ValueError)
    with pytest.raises(MeshError) as each_divides:
        MeshLayout(2, 2, 2).resolve(4)
    assert "may be" not in str(each_divides.value)
    assert "Nearest that fit: replicate 1 x shard 2 x tp 2; replicate 2" in str(each_divides.value)


def test_world_that_does_not_divide_says_what_would() -> None:
    with pytest.raises(MeshError) as info:
        MeshLayout(replicate=2, shard=-1, tp=8).resolve(24)
    text = str(info.value)
    assert "24 is not a multiple of replicate 2 x tp 8 = 16." in text
    assert "replicate may be 1 or 3; tp may be 1, 2, 3, 4, 6 or 12." in text
    assert text.endswith("Or start a multiple of 16 ranks.")


@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, -1, 8), (5, 7, -1), (5, 7, 11), (-1, 3, 9)])
@pytest.mark.parametrize("world_size", [1, 2, 13, 96, 4096, 5040])
def test_layouts_named_as_fitting_do_fit(sizes, world_size) -> None:
    known = math.prod(size for size in sizes if size != -1)
    if world_size % known == 0 if -1 in sizes else world_size == known:
        assert MeshLayout(*sizes).resolve(world_size).world_size == world_size
        return
    with pytest.raises(MeshError) as info:
        MeshLayout(*sizes).resolve(world_size)
    named = str(info.value).split("Nearest that fit: ")[1].split(".")[0].split("; ")
    assert 1 <= len(named) <= 3
    for text in named:
        replicate, shard, tp = (int(part.split()[1]) for part in text.split(" x "))
        assert MeshLayout(replicate, shard, tp).resolve(world_size).is_resolved


def test_choices_of_a_large_world_stay_readable() -> None:
    with pytest.raises(MeshError) as info:
        MeshLayout(shard=-1, tp=11).resolve(720720 // 11)
    assert len(str(info.value)) < 500


@pytest.mark.parametrize("world_size", [0, -1, True, 8.0, "8", None])
def test_bad_world_size(world_size) -> None:
    with pytest.raises(MeshError, match="world_size is"):
        MeshLayout(shard=-1).resolve(world_size)


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m.world_size,
        lambda m: m.data_size,
        lambda m: m.data_rank(0),
        lambda m: m.coordinates(0),
        lambda m: m.rank(),
        lambda m: m.groups("tp"),
    ],
)
def test_unresolved_layout_has_no_ranks(use) -> None:
    with pytest.raises(MeshError, match=r"replicate 1 x shard -1 x tp 2 is not resolved.*resolve"):
        use(MeshLayout(shard=-1, tp=2))


@pytest.mark.parametrize("rank", [-1, 8, 1.0, True, None])
def test_rank_out_of_range(rank) -> None:
    mesh = MeshLayout(2, 2, 2)
    with pytest.raises(MeshError, match=r"ranks go from 0 to 7"):
        mesh.coordinates(rank)
    with pytest.raises(MeshError, match=r"ranks go from 0 to 7"):
        mesh.data_rank(rank)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("coordinate", [-1, 2, 1.0])
def test_coordinate_out_of_range(axis, coordinate) -> None:
    with pytest.raises(MeshError, match=rf"^{axis} coordinate .* from 0 to 1"):
        MeshLayout(2, 2, 2, cp=2).rank(**{axis: coordinate})


@pytest.mark.parametrize(
    ("name", "meant"),
    [("replicas", "; did you mean replicate?"), ("shards", "; did you mean shard?"), ("dp", ".")],
)
def test_a_misspelt_axis_is_told_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(WrongTypeError) as caught:
        MeshLayout(**{name: 2})
    assert isinstance(caught.value, TypeError)
    assert (
        str(caught.value) == f"{name} is no axis{meant} The axes are replicate, shard, cp, tp, ep"
    )
    assert [*inspect.signature(MeshLayout).parameters] == ["replicate", "shard", "tp", "cp", "ep"]
    assert pickle.loads(pickle.dumps(MeshLayout(2, tp=3))) == MeshLayout(replicate=2, tp=3)


def test_unknown_axis() -> None:
    with pytest.raises(MeshError, match=r"^shards is no axis; did you mean shard\?"):
        MeshLayout().groups("shards")
    with pytest.raises(
        MeshError, match=r"^pp is no axis\. The axes are replicate, shard, cp, tp, ep$"
    ):
        MeshLayout().groups("pp")


def test_ep_is_a_second_view_of_the_ranks() -> None:
    layout = MeshLayout(replicate=2, shard=4, tp=2, ep=4)
    assert layout.as_dict() == {"replicate": 2, "shard": 4, "tp": 2}
    assert layout.as_dict(views=True) == {"replicate": 2, "shard": 4, "tp": 2, "ep": 4}
    assert (layout.world_size, layout.data_size, layout.ranks_of_a_copy) == (16, 8, 8)
    assert layout.groups("ep") == [tuple(range(i, i + 4)) for i in (0, 4, 8, 12)]
    assert str(layout) == "replicate 2 x shard 4 x tp 2 = 16 ranks, ep 4"
    assert eval(repr(layout)) == layout
    assert MeshLayout(shard=-1, ep=2).resolve(4) == MeshLayout(shard=4, ep=2)
    with pytest.raises(MeshError, match=r"ep=2 doesn't divide shard 3 x cp 1 x tp 1"):
        MeshLayout(shard=-1, ep=2).resolve(3)
