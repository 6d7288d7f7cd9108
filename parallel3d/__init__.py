"""parallel3d: FSDP, HSDP and tensor parallelism on a (replicate, shard, tp) mesh, in one call."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import alias_packages, export_lazily
from parallel3d._util.version import __version__ as __version__

if TYPE_CHECKING:
    from parallel3d import checkpoint, fsdp, guards, observability, optim, planner, tp
    from parallel3d.errors import (
        AgreementError,
        CheckpointError,
        CorruptCheckpointError,
        DryRunError,
        MeshError,
        Parallel3dError,
        PeerFailureError,
        PlanError,
        PlanningError,
        StateError,
        WrongTypeError,
    )
    from parallel3d.fsdp import MixedPrecisionPolicy, fully_shard
    from parallel3d.guards import diagnose
    from parallel3d.materialize import materialize
    from parallel3d.mesh import MeshLayout, build_mesh
    from parallel3d.mesh.seeding import seed_step
    from parallel3d.parallelize import parallelize
    from parallel3d.tools import dryrun
    from parallel3d.tp import resolve_plan

__all__ = [
    "AgreementError",
    "CheckpointError",
    "CorruptCheckpointError",
    "DryRunError",
    "MeshError",
    "MeshLayout",
    "MixedPrecisionPolicy",
    "Parallel3dError",
    "PeerFailureError",
    "PlanError",
    "PlanningError",
    "StateError",
    "WrongTypeError",
    "build_mesh",
    "checkpoint",
    "diagnose",
    "dryrun",
    "fsdp",
    "fully_shard",
    "guards",
    "materialize",
    "observability",
    "optim",
    "parallelize",
    "planner",
    "resolve_plan",
    "seed_step",
    "tp",
]

export_lazily(
    __name__,
    {
        "errors": "AgreementError CheckpointError CorruptCheckpointError DryRunError MeshError "
        "Parallel3dError PeerFailureError PlanError PlanningError StateError WrongTypeError",
        "fsdp": "MixedPrecisionPolicy fully_shard",
        "guards": "diagnose",
        "materialize": "materialize",
        "mesh": "MeshLayout build_mesh",
        "parallelize": "parallelize",
        "mesh.seeding": "seed_step",
        "tp": "resolve_plan",
    },
)
alias_packages(
    __name__,
    {
        "cli": "tools.cli",
        "doctor": "tools.doctor",
        "dryrun": "tools.dryrun",
        "launch": "tools.launch",
        "tp.derive": "tp.auto.derive",
    },
)
