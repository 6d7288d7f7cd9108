"""For testing your own models: worlds of many ranks in one process or several, and a recorder.

| what | numbers | processes |
| --- | --- | --- |
| ``fake_world(rank, world_size)`` | none: shapes, placements, counts | this one, as one rank |
| ``local_world(n)`` | real | this one, as all ranks |
| ``EmulatedNetwork(...)`` | none; collectives take the time they would | this one, as one rank |
| ``GlooPool(size)`` | real | one for each rank |

``record_collectives(mesh)`` lists what was communicated in any of them.
"""

from parallel3d.testing.emulated_network import EmulatedNetwork, Link, Transfer, VirtualClock
from parallel3d.testing.gloo_pool import GlooPool, WorkerError, WorkerTimeout
from parallel3d.testing.parity import Parity, assert_parity, shards_of
from parallel3d.testing.recorder import Collective, Recorder, record_collectives
from parallel3d.testing.worlds import FakeWorld, LocalWorld, fake_world, local_world

__all__ = [
    "Collective",
    "EmulatedNetwork",
    "FakeWorld",
    "GlooPool",
    "Link",
    "LocalWorld",
    "Parity",
    "Recorder",
    "Transfer",
    "VirtualClock",
    "WorkerError",
    "WorkerTimeout",
    "assert_parity",
    "fake_world",
    "local_world",
    "record_collectives",
    "shards_of",
]
