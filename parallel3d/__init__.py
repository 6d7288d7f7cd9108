"""FSDP, HSDP, tensor, context and expert parallelism on a (replicate, shard, cp, tp) mesh, in one call."""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily
from parallel3d._util.version import __version__ as __version__

if TYPE_CHECKING:
    from parallel3d import activations as activations
    from parallel3d import audit as audit
    from parallel3d import checkpoint as checkpoint
    from parallel3d import cp as cp
    from parallel3d import ep as ep
    from parallel3d import fsdp as fsdp
    from parallel3d import guards as guards
    from parallel3d import integrations as integrations
    from parallel3d import mesh as mesh
    from parallel3d import observability as observability
    from parallel3d import optim as optim
    from parallel3d import planner as planner
    from parallel3d import testing as testing
    from parallel3d import tp as tp
    from parallel3d.activations import ActivationOffload as ActivationOffload
    from parallel3d.errors import AgreementError as AgreementError
    from parallel3d.errors import AuditError as AuditError
    from parallel3d.errors import CheckpointError as CheckpointError
    from parallel3d.errors import CorruptCheckpointError as CorruptCheckpointError
    from parallel3d.errors import DryRunError as DryRunError
    from parallel3d.errors import MeshError as MeshError
    from parallel3d.errors import Parallel3dError as Parallel3dError
    from parallel3d.errors import PeerFailureError as PeerFailureError
    from parallel3d.errors import PlanError as PlanError
    from parallel3d.errors import PlanningError as PlanningError
    from parallel3d.errors import StateError as StateError
    from parallel3d.errors import WrongTypeError as WrongTypeError
    from parallel3d.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
    from parallel3d.fsdp import fully_shard as fully_shard
    from parallel3d.guards import diagnose as diagnose
    from parallel3d.materialize import materialize as materialize
    from parallel3d.mesh import MeshLayout as MeshLayout
    from parallel3d.mesh import build_mesh as build_mesh
    from parallel3d.mesh.seeding import seed_step as seed_step
    from parallel3d.optim import capture as capture
    from parallel3d.parallelize import Checks as Checks
    from parallel3d.parallelize import Sharding as Sharding
    from parallel3d.parallelize import parallelize as parallelize
    from parallel3d.tools import doctor as doctor
    from parallel3d.tools import dryrun as dryrun
    from parallel3d.tools import launch as launch
    from parallel3d.tp import resolve_plan as resolve_plan
else:
    export_lazily(
        __name__,
        {
            ".": (
                "activations audit checkpoint cp ep fsdp guards integrations mesh observability optim "
                "planner testing tp"
            ),
            ".activations": "ActivationOffload",
            ".errors": (
                "AgreementError AuditError CheckpointError CorruptCheckpointError DryRunError "
                "MeshError Parallel3dError PeerFailureError PlanError PlanningError StateError "
                "WrongTypeError"
            ),
            ".fsdp": "MixedPrecisionPolicy fully_shard",
            ".guards": "diagnose",
            ".materialize": "materialize",
            ".mesh": "MeshLayout build_mesh",
            ".mesh.seeding": "seed_step",
            ".optim": "capture",
            ".parallelize": "Checks Sharding parallelize",
            ".tools": "doctor dryrun launch",
            ".tp": "resolve_plan",
        },
    )
