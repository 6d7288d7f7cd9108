"""The internals of the engine that other packages may import, besides ``layout`` and ``schedule``."""

# ruff: noqa: F401 (others import these names from here)
from parallel3d.fsdp.accumulated import waits_for_reduction
from parallel3d.fsdp.api import as_instance, check_block, check_policy, strategy_options
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.events import Option
from parallel3d.fsdp.gradients import flat_gradient, flat_gradients_of
from parallel3d.fsdp.members import (
    check_param,
    class_name,
    get_unit,
    note_ignored,
    parameters_at_rest,
    refuse_torch_units,
    unit_of,
    units_of,
)
from parallel3d.fsdp.options.checks import StepGuard, guard_of
from parallel3d.fsdp.options.finalization import refuse_unfinalized
from parallel3d.fsdp.options.gather_extension import ExtensionBucket
from parallel3d.fsdp.options.precision import buffer_dtypes, cast_around
from parallel3d.fsdp.param import ShardedParam, owner_of
from parallel3d.fsdp.placement import data_axes
from parallel3d.fsdp.state_dict.full_params import check_at_rest, to_rest
from parallel3d.fsdp.state_dict.state_dicts import check_optimizer, named_params, state_keys
from parallel3d.fsdp.unit import Unit
from parallel3d.fsdp.watch import explain_mixed
from parallel3d.mesh.joined import joined_mesh
