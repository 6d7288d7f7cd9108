"""The planner: which mesh, does it fit, how fast, and why. Needs no GPU and no process group."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.planner.cluster import Cluster, Gpu, gpu, gpus
    from parallel3d.planner.from_module import spec_from_module
    from parallel3d.planner.hf_config import known_models, spec_from_hf_config
    from parallel3d.planner.model_spec import ModelSpec, spec_from_shapes
    from parallel3d.planner.planning import MeshPlan, plan
    from parallel3d.planner.prediction import Prediction, predict
    from parallel3d.planner.workload import CHECKPOINTING, Workload

_EXPORTS = {
    "planner.cluster": "Cluster Gpu gpu gpus",
    "planner.from_module": "spec_from_module",
    "planner.hf_config": "known_models spec_from_hf_config",
    "planner.model_spec": "ModelSpec spec_from_shapes",
    "planner.planning": "MeshPlan plan",
    "planner.prediction": "Prediction predict",
    "planner.workload": "CHECKPOINTING Workload",
}
__all__ = [name for names in _EXPORTS.values() for name in names.split()]

export_lazily(__name__, _EXPORTS)
