"""The inside of the engine that other packages may see: units, shards, flat buffers, owners, checks.

Other packages import of ``fsdp`` its public names, the pure ``layout`` and ``schedule``, and this file; a
test sees to it. What is not here may change without a word.

- Which unit a module belongs to: ``unit_of``, ``get_unit``, ``units_of``, ``class_name``; the parameters that
  an optimizer knows: ``parameters_at_rest``; of a Parameter, what the engine has made of it: ``owner_of``.
- A unit's memory: ``Bucket`` (``flat``: this rank's shards, one buffer) and, for parameters with a way of
  their own to be gathered, ``ExtensionBucket``.
- Gradients: whether neighbours are views of one buffer (``flat_gradient``, ``flat_gradients_of``), and
  whether one is a sum that still waits for its reduction (``waits_for_reduction``).
- What is refused: ``check_at_rest``, ``check_optimizer``, ``check_param``, ``check_policy``,
  ``refuse_unfinalized``; ``to_rest`` brings a model to rest.
- For optimizers that step within the backward: ``StepGuard``.
- State dicts by parameter names: ``named_params``, ``state_keys``.
- Which axes of a mesh are sharded and replicated over: ``data_axes``; FSDP1's strategies:
  ``strategy_options``.
"""

from parallel3d.fsdp.api import check_policy, strategy_options
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.gradients import flat_gradient, flat_gradients_of, waits_for_reduction
from parallel3d.fsdp.members import (
    check_param,
    class_name,
    get_unit,
    parameters_at_rest,
    unit_of,
    units_of,
)
from parallel3d.fsdp.options.checks import StepGuard, guard_of
from parallel3d.fsdp.options.finalization import refuse_unfinalized
from parallel3d.fsdp.options.gather_extension import ExtensionBucket
from parallel3d.fsdp.param import ShardedParam, owner_of
from parallel3d.fsdp.placement import data_axes
from parallel3d.fsdp.state_dict.full_params import check_at_rest, to_rest
from parallel3d.fsdp.state_dict.optim_state_dict import check_optimizer, named_params, state_keys
from parallel3d.fsdp.unit import Unit

__all__ = [
    "Bucket",
    "ExtensionBucket",
    "ShardedParam",
    "StepGuard",
    "Unit",
    "check_at_rest",
    "check_optimizer",
    "check_param",
    "check_policy",
    "class_name",
    "data_axes",
    "flat_gradient",
    "flat_gradients_of",
    "get_unit",
    "guard_of",
    "named_params",
    "owner_of",
    "parameters_at_rest",
    "refuse_unfinalized",
    "state_keys",
    "strategy_options",
    "to_rest",
    "unit_of",
    "units_of",
    "waits_for_reduction",
]
