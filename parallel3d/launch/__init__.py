"""Launch files for torchrun, SLURM, Kubeflow, JobSet, SkyPilot and Ray. Imports no torch."""

from parallel3d.launch.error import LaunchError
from parallel3d.launch.job import LaunchJob
from parallel3d.launch.targets import TARGETS, launch_file

__all__ = ["TARGETS", "LaunchError", "LaunchJob", "launch_file"]
