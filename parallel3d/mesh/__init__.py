"""Everything about the (replicate, shard, tp) mesh: sizes, ranks, agreement between ranks."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.mesh.agreement import check_agreement as check_agreement
    from parallel3d.mesh.axes import AXES as AXES
    from parallel3d.mesh.build import build_mesh as build_mesh
    from parallel3d.mesh.build import read_layout as read_layout
    from parallel3d.mesh.layout import MeshLayout as MeshLayout
else:
    export_lazily(
        __name__,
        {
            ".agreement": "check_agreement",
            ".axes": "AXES",
            ".build": "build_mesh read_layout",
            ".layout": "MeshLayout",
        },
    )
