"""What of a block's activations is kept for backward, and where (``docs/activations.md``)."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.activations.offload import ActivationOffload as ActivationOffload
    from parallel3d.activations.offload import OffloadCounts as OffloadCounts
    from parallel3d.activations.offload import offload_counts as offload_counts
else:
    export_lazily(__name__, {".offload": "ActivationOffload OffloadCounts offload_counts"})
