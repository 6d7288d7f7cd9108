"""LaunchError: a child of Parallel3dError."""

from parallel3d.errors import Parallel3dError

__all__ = ["LaunchError"]


class LaunchError(Parallel3dError):
    """A job that can't be launched so, or a value that a launch file can't hold."""
