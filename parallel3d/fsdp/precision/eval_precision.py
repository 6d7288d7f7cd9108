"""Full precision in eval: a bucket computes in one of two dtypes, and keeps what belongs to the other aside.

Only a bucket that has been in both has buffers and unsharded parameters for both; those that are not in use
have no storage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from parallel3d.errors import StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket
    from parallel3d.fsdp.running.call import Call
    from parallel3d.fsdp.running.context import RunContext
    from parallel3d.fsdp.state import Unit

__all__ = ["follow_mode", "go_back_to", "in_own_dtype", "switch_precision"]


def in_own_dtype(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """``policy`` for parameters that compute in ``dtype``, their own, and are reduced in no lower one."""
    if not dtype.is_floating_point:
        return policy
    wanted = torch.promote_types(dtype, policy.reduce_dtype or policy.param_dtype or dtype)
    return replace(policy, param_dtype=None, reduce_dtype=None if wanted == dtype else wanted)


def switch_precision(bucket: Bucket, full: bool) -> None:
    """Lets ``bucket``, which is sharded, compute in its parameters' own dtype, or in the policy's again."""
    if bucket.full is full:
        return
    bucket.leave_precision()
    bucket.full = full
    before = {name: getattr(bucket, name) for name in bucket.by_precision}
    # Also during inference: tensors made in inference mode could not be trained with later.
    with torch.inference_mode(False), torch.no_grad():
        if bucket.other_precision is not None:
            vars(bucket).update(bucket.other_precision)
            bucket.enter_precision()
        else:
            bucket.set_dtypes()
            if bucket.compute_dtype != before["compute_dtype"]:
                bucket.small = None
                bucket.build_unsharded()
    bucket.other_precision = before


def follow_mode(unit: Unit, context: RunContext) -> None:
    """Before a forward of ``unit``: full precision if its modules are in eval mode."""
    # What is recomputed within the unit's own backward is in the precision that this has.
    if not unit.backward_begun:
        full = not any(module.training for module in unit.modules)
        unit.group.use_precision(full, context.comm)


def go_back_to(unit: Unit, call: Call, context: RunContext) -> None:
    """Before the backward of a ``call`` in another precision than that of the unit's last forward.

    Where one backward comes to both, it comes to the later call first, and is through with it when all
    gradients have arrived.

    Raises:
        StateError: it is not, or a forward of the unit is under way.
    """
    if unit.backward_begun and unit.arrived >= unit.group.trainable:
        unit.finish_backward(context)
        unit.begun = {id(call)}
    if unit.backward_begun or unit.depth:
        raise StateError(
            f"unit {unit.label} has full_precision_in_eval, and one backward came to a forward in train mode "
            "and to one in eval mode before either was over; call backward for each on its own"
        )
    unit.group.use_precision(call.full, context.comm)
