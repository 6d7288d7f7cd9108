"""``parallel3d.tools.launch`` by its shorter name."""

from parallel3d.tools.launch import *  # noqa: F403
