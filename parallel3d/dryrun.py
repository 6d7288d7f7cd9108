"""``parallel3d.tools.dryrun`` by its shorter name."""

from parallel3d.tools.dryrun import *  # noqa: F403
