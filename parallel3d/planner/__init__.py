"""The planner: which mesh, does it fit, how fast, and why. Needs no GPU and no process group."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.planner.cluster import Cluster as Cluster
    from parallel3d.planner.cluster import Gpu as Gpu
    from parallel3d.planner.cluster import gpu as gpu
    from parallel3d.planner.cluster import gpus as gpus
    from parallel3d.planner.comparison import compare_pipelines as compare_pipelines
    from parallel3d.planner.decoder import spec_from_shapes as spec_from_shapes
    from parallel3d.planner.from_module import spec_from_module as spec_from_module
    from parallel3d.planner.hf_config import known_models as known_models
    from parallel3d.planner.hf_config import spec_from_hf_config as spec_from_hf_config
    from parallel3d.planner.model_spec import Lora as Lora
    from parallel3d.planner.model_spec import ModelSpec as ModelSpec
    from parallel3d.planner.pipeline import Pipeline as Pipeline
    from parallel3d.planner.planning import MeshPlan as MeshPlan
    from parallel3d.planner.planning import plan as plan
    from parallel3d.planner.prediction import Prediction as Prediction
    from parallel3d.planner.prediction import predict as predict
    from parallel3d.planner.workload import CHECKPOINTING as CHECKPOINTING
    from parallel3d.planner.workload import Workload as Workload
else:
    export_lazily(
        __name__,
        {
            ".cluster": "Cluster Gpu gpu gpus",
            ".comparison": "compare_pipelines",
            ".decoder": "spec_from_shapes",
            ".from_module": "spec_from_module",
            ".hf_config": "known_models spec_from_hf_config",
            ".model_spec": "Lora ModelSpec",
            ".pipeline": "Pipeline",
            ".planning": "MeshPlan plan",
            ".prediction": "Prediction predict",
            ".workload": "CHECKPOINTING Workload",
        },
    )
