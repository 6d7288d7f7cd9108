"""Policies of the sharding engine."""

from dataclasses import dataclass

import torch

from parallel3d.errors import Parallel3dError

__all__ = ["MixedPrecisionPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
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
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, field)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise Parallel3dError(
                    f"MixedPrecisionPolicy.{field} is {dtype!r}; it must be a floating-point "
                    "torch.dtype such as torch.bfloat16, or None"
                )
