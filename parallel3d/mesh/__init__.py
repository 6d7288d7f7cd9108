"""Everything about the (replicate, shard, tp) mesh: sizes, ranks, agreement between ranks."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.mesh.agreement import check_agreement
    from parallel3d.mesh.axes import AXES
    from parallel3d.mesh.build import build_mesh, read_layout
    from parallel3d.mesh.layout import MeshLayout

__all__ = ["AXES", "MeshLayout", "build_mesh", "check_agreement", "read_layout"]

export_lazily(
    __name__,
    {
        "mesh.agreement": "check_agreement",
        "mesh.build": "build_mesh read_layout",
        "mesh.axes": "AXES",
        "mesh.layout": "MeshLayout",
    },
)
