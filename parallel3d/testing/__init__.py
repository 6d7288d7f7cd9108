"""Tools to test your own models: worlds of many ranks in one process or several, and a recorder.

| name | values | processes |
| --- | --- | --- |
| ``fake_world(rank, world_size)`` | not real: for shapes, placements, counts | this one, as one rank |
| ``local_world(n)`` | real | this one, as all ranks |
| ``GlooPool(size)`` | real | one for each rank |

``audit`` checks relations that must hold between trainings, on any engine. ``verify`` compares a parallel
model with the plain one, and names the first module that differs.
``record_collectives(mesh)`` lists the collectives issued in any of them.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d._util.recorder import Collective as Collective
    from parallel3d._util.recorder import Recorder as Recorder
    from parallel3d._util.recorder import record_collectives as record_collectives
    from parallel3d.testing.differences.forward import Difference as Difference
    from parallel3d.testing.first_difference import Verification as Verification
    from parallel3d.testing.first_difference import first_difference as first_difference
    from parallel3d.testing.first_difference import verify as verify
    from parallel3d.testing.gloo_pool import GlooPool as GlooPool
    from parallel3d.testing.gloo_pool import WorkerError as WorkerError
    from parallel3d.testing.gloo_pool import WorkerTimeout as WorkerTimeout
    from parallel3d.testing.parity import Parity as Parity
    from parallel3d.testing.parity import assert_parity as assert_parity
    from parallel3d.testing.parity import shards_of as shards_of
    from parallel3d.testing.relations.engines import ENGINES as ENGINES
    from parallel3d.testing.relations.engines import Engine as Engine
    from parallel3d.testing.relations.relation import RELATIONS as RELATIONS
    from parallel3d.testing.relations.relation import AuditTable as AuditTable
    from parallel3d.testing.relations.relation import Outcome as Outcome
    from parallel3d.testing.relations.relation import audit as audit
    from parallel3d.testing.worlds import FakeWorld as FakeWorld
    from parallel3d.testing.worlds import LocalWorld as LocalWorld
    from parallel3d.testing.worlds import fake_world as fake_world
    from parallel3d.testing.worlds import local_world as local_world
else:
    export_lazily(
        __name__,
        {
            "parallel3d._util.recorder": "Collective Recorder record_collectives",
            ".differences.forward": "Difference",
            ".first_difference": "Verification first_difference verify",
            ".gloo_pool": "GlooPool WorkerError WorkerTimeout",
            ".parity": "Parity assert_parity shards_of",
            ".relations.engines": "ENGINES Engine",
            ".relations.relation": "RELATIONS AuditTable Outcome audit",
            ".worlds": "FakeWorld LocalWorld fake_world local_world",
        },
    )
