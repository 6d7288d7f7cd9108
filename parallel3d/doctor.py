"""``parallel3d.tools.doctor`` by its shorter name."""

from parallel3d.tools.doctor import *  # noqa: F403
