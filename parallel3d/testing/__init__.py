"""Tools to test your own models: worlds of many ranks in one process or several, and a recorder.

| name | values | processes |
| --- | --- | --- |
| ``fake_world(rank, world_size)`` | not real: for shapes, placements, counts | this one, as one rank |
| ``local_world(n)`` | real | this one, as all ranks |
| ``EmulatedNetwork(...)`` | not real; collectives take a network's time | this one, as one rank |
| ``GlooPool(size)`` | real | one for each rank |

``verify`` compares a parallel model with the plain one, and names the first module that differs.
``record_collectives(mesh)`` lists the collectives issued in any of them.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d._util.recorder import Collective, Recorder, record_collectives
    from parallel3d.testing.differences.forward import Difference
    from parallel3d.testing.emulated_network import EmulatedNetwork, Link, Transfer, VirtualClock
    from parallel3d.testing.first_difference import Verification, first_difference, verify
    from parallel3d.testing.gloo_pool import GlooPool, WorkerError, WorkerTimeout
    from parallel3d.testing.parity import Parity, assert_parity, shards_of
    from parallel3d.testing.worlds import FakeWorld, LocalWorld, fake_world, local_world

_EXPORTS = {
    "_util.recorder": "Collective Recorder record_collectives",
    "testing.emulated_network": "EmulatedNetwork Link Transfer VirtualClock",
    "testing.differences.forward": "Difference",
    "testing.first_difference": "Verification first_difference verify",
    "testing.gloo_pool": "GlooPool WorkerError WorkerTimeout",
    "testing.parity": "Parity assert_parity shards_of",
    "testing.worlds": "FakeWorld LocalWorld fake_world local_world",
}
__all__ = [name for names in _EXPORTS.values() for name in names.split()]

export_lazily(__name__, _EXPORTS)
