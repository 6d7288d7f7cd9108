"""Policies of the sharding engine. torch's own objects are taken as well, and torch takes these."""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from parallel3d._compat import (
    DataParallelMeshDims,
    ShardPlacementResult,
    TorchMixedPrecisionPolicy,
)
from parallel3d.errors import Parallel3dError

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "check_offload",
    "check_policy",
    "own_policy",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy(TorchMixedPrecisionPolicy):
    """Which dtypes a unit computes and communicates in. Sharded parameters keep their own dtype.

    Attributes:
        param_dtype: dtype of the unsharded parameters, of the all-gather, and of the floating-point
            inputs of ``forward``. None: the parameters' own.
        reduce_dtype: dtype of the gradient reduction. None: the dtype of the unsharded parameters.
        output_dtype: dtype that floating-point outputs of ``forward`` are cast to. None: as they are.
        cast_forward_inputs: whether inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        check_policy(self)


def check_policy(policy: TorchMixedPrecisionPolicy) -> None:
    """Raises if ``policy``, of ours or torch's, is none or holds what can't be.

    Raises:
        Parallel3dError: see above.
    """
    if not isinstance(policy, TorchMixedPrecisionPolicy):
        raise Parallel3dError(f"mp_policy is {policy!r}; it must be a MixedPrecisionPolicy")
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, field)
        if dtype is None:
            continue
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise Parallel3dError(
                f"MixedPrecisionPolicy.{field} is {dtype!r}; it must be a floating-point "
                "torch.dtype such as torch.bfloat16, or None"
            )
    if not isinstance(policy.cast_forward_inputs, bool):
        raise Parallel3dError(
            f"MixedPrecisionPolicy.cast_forward_inputs is {policy.cast_forward_inputs!r}; it must be "
            "True or False"
        )


def check_offload(policy: OffloadPolicy) -> None:
    """Raises if ``policy`` is no offload policy.

    Raises:
        Parallel3dError: see above.
    """
    if not isinstance(policy, OffloadPolicy):
        raise Parallel3dError(
            f"offload_policy is {policy!r}; it must be an OffloadPolicy() (everything stays on the mesh's "
            "device) or a CPUOffloadPolicy(pin_memory=...)"
        )
    if isinstance(policy, CPUOffloadPolicy) and not isinstance(policy.pin_memory, bool):
        raise Parallel3dError(
            f"CPUOffloadPolicy.pin_memory is {policy.pin_memory!r}; it must be True or False"
        )


def own_policy(policy: TorchMixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``policy``, which may be torch's, as one of ours; checked."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    check_policy(policy)
    return MixedPrecisionPolicy(
        policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
    )
