"""Launch files for torchrun, SLURM, Kubeflow, JobSet, SkyPilot and Ray. Imports no torch."""

from parallel3d.tools.launch.job import LaunchError, LaunchJob
from parallel3d.tools.launch.targets import TARGETS, launch_file

__all__ = ["TARGETS", "LaunchError", "LaunchJob", "launch_file"]
