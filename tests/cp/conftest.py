"""What the tests of cp share."""

import pytest

import parallel3d as p3d
from parallel3d.testing import local_world


@pytest.fixture
def world():
    """Two simulated ranks, and their mesh."""
    with local_world(2) as made:
        made.mesh = p3d.build_mesh(p3d.MeshLayout(cp=2), device_type="cpu")
        yield made
