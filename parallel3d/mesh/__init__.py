"""Everything about the (replicate, shard, tp) mesh: sizes, ranks, agreement between ranks."""

from parallel3d.mesh.agreement import check_agreement
from parallel3d.mesh.build import build_mesh, read_layout
from parallel3d.mesh.layout import AXES, MeshLayout

__all__ = ["AXES", "MeshLayout", "build_mesh", "check_agreement", "read_layout"]
