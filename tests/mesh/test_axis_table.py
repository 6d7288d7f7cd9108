"""The table of axes, and that layouts and meshes are what it says."""

from dataclasses import fields
from itertools import pairwise, product

import pytest

from parallel3d.mesh import AXES, MeshLayout
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


def test_the_table_is_what_layouts_have() -> None:
    assert AXES == ("replicate", "shard", "cp", "tp")
    assert {field.name for field in fields(MeshLayout)} == {*AXES}
    assert DATA_AXES == ("replicate", "shard") and TOKEN_AXES == ("replicate", "shard", "cp")
    names = [name for axis in TABLE for name in (axis.name, *axis.other_names)]
    assert len(set(names)) == len(names)
    assert [axis_named(name) for name in ("dp_shard", "tp", "x")] == [TABLE[1], TABLE[3], None]


@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 5, 2), (3, 1, 1), (2, 3, 4, 2), (1, 1, 2, 1)])
def test_ranks_and_coordinates(sizes: tuple[int, ...]) -> None:
    """The last axis's ranks are neighbours; data axes number the parts of the data."""
    axes = AXES if len(sizes) == 4 else ("replicate", "shard", "tp")
    layout = MeshLayout(**dict(zip(axes, sizes, strict=True)))
    assert (layout.axes, layout.sizes, layout.cp) == (
        axes,
        sizes,
        (*sizes, 1)[2] if len(sizes) == 4 else 1,
    )
    numbers = {}
    for rank, at in enumerate(product(*map(range, sizes))):
        coordinates = dict(zip(axes, at, strict=True))
        assert layout.coordinates(rank) == coordinates and layout.rank(**coordinates) == rank
        parts = tuple(coordinates[axis] for axis in DATA_AXES)
        assert numbers.setdefault(parts, len(numbers)) == layout.data_rank(rank)
    assert len(numbers) == layout.data_size
    for axis in AXES:
        for group in layout.groups(axis):
            steps = {b - a for a, b in pairwise(group)}
            assert steps <= {layout.stride(axis)} and len(group) == getattr(layout, axis)


def test_roles() -> None:
    assert names_of(Role.SHARDED) == ("shard", "dp_shard", "shard_cp", "dp_shard_cp")
    data = ("replicate", "dp_shard", "dp", "shard_cp")
    assert all(map(is_data_axis, data)) and not any(map(is_data_axis, ("cp", "tp", None, "pp")))
    named = {"tensor_parallel": "tp", "ddp": "replicate", "data": "shard", "context_parallel": "cp"}
    assert {name: guess(name) for name in named} == named
