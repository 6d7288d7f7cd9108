"""The table of axes, and that layouts and meshes are what it says."""

from dataclasses import fields
from itertools import pairwise, product

import pytest

from parallel3d.mesh import AXES, MeshLayout
from parallel3d.mesh.axes import (
    DATA_AXES,
    TABLE,
    Role,
    axis_named,
    guess,
    is_data_axis,
    names_of,
)


def test_the_table_is_what_layouts_have() -> None:
    assert tuple(field.name for field in fields(MeshLayout)) == AXES == ("replicate", "shard", "tp")
    assert DATA_AXES == ("replicate", "shard")
    names = [name for axis in TABLE for name in (axis.name, *axis.other_names)]
    assert len(set(names)) == len(names)
    assert [axis_named(name) for name in ("dp_shard", "tp", "x")] == [TABLE[1], TABLE[2], None]


@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 5, 2), (3, 1, 1)])
def test_ranks_and_coordinates(sizes: tuple[int, ...]) -> None:
    """The last axis's ranks are neighbours; data axes number the parts of the data."""
    layout = MeshLayout(*sizes)
    numbers = {}
    for rank, at in enumerate(product(*map(range, sizes))):
        coordinates = dict(zip(AXES, at, strict=True))
        assert layout.coordinates(rank) == coordinates and layout.rank(**coordinates) == rank
        parts = tuple(coordinates[axis] for axis in DATA_AXES)
        assert numbers.setdefault(parts, len(numbers)) == layout.data_rank(rank)
    assert len(numbers) == layout.data_size
    for axis in AXES:
        for group in layout.groups(axis):
            steps = {b - a for a, b in pairwise(group)}
            assert steps <= {layout.stride(axis)} and len(group) == getattr(layout, axis)


def test_roles() -> None:
    assert names_of(Role.SHARDED) == ("shard", "dp_shard")
    assert [is_data_axis(name) for name in ("replicate", "dp_shard", "dp", "tp", None, "pp")] == [
        True, True, True, False, False, False
    ]  # fmt: skip
    assert [guess(name) for name in ("tensor_parallel", "ddp", "data")] == [
        "tp",
        "replicate",
        "shard",
    ]
