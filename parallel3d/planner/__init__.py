"""The planner: which mesh, does it fit, how fast, and why. Needs no GPU and no process group."""

from typing import TYPE_CHECKING

from parallel3d._lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.planner.cluster import Cluster, Gpu, gpu, gpus
    from parallel3d.planner.mesh_plan import MeshPlan
    from parallel3d.planner.model_spec import ModelSpec
    from parallel3d.planner.planning import plan
    from parallel3d.planner.prediction import Prediction, predict
    from parallel3d.planner.shapes import spec_from_shapes
    from parallel3d.planner.workload import CHECKPOINTING, Workload

__all__ = [
    "CHECKPOINTING",
    "Cluster",
    "Gpu",
    "MeshPlan",
    "ModelSpec",
    "Prediction",
    "Workload",
    "gpu",
    "gpus",
    "plan",
    "predict",
    "spec_from_shapes",
]

export_lazily(
    __name__,
    {
        "planner.cluster": "Cluster Gpu gpu gpus",
        "planner.mesh_plan": "MeshPlan",
        "planner.model_spec": "ModelSpec",
        "planner.planning": "plan",
        "planner.prediction": "Prediction predict",
        "planner.shapes": "spec_from_shapes",
        "planner.workload": "CHECKPOINTING Workload",
    },
)
