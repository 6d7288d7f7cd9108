"""Launch files for torchrun, SLURM, Kubeflow, JobSet, SkyPilot and Ray. Imports no torch."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.tools.launch.job import LaunchError as LaunchError
    from parallel3d.tools.launch.job import LaunchJob as LaunchJob
    from parallel3d.tools.launch.targets import TARGETS as TARGETS
    from parallel3d.tools.launch.targets import launch_file as launch_file
else:
    export_lazily(__name__, {".job": "LaunchError LaunchJob", ".targets": "TARGETS launch_file"})
