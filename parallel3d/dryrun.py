"""``parallel3d.tools.dryrun`` by its shorter name."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_as

if TYPE_CHECKING:
    from parallel3d.tools.dryrun import *  # noqa: F403
else:
    export_as(__name__, "parallel3d.tools.dryrun")
