"""What stands where a unit's Parameter was: whether its values may become the unit's, and its gradient."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor, make_dtensor
from parallel3d.errors import Parallel3dError
from parallel3d.fsdp.param import ShardedParam

__all__ = ["check_replacement", "gradient_for"]


def gradient_for(param: ShardedParam, given: torch.Tensor) -> torch.Tensor | None:
    """What ``.grad`` becomes when ``given`` takes the Parameter's place: that of ``given``, or None."""
    grad, dtype = given.grad, param.sharded.dtype
    if grad is None or isinstance(grad, DTensor):
        return None if grad is None else grad.to(dtype)
    return make_dtensor(param.shard_of(grad, tp_local=False).to(dtype, copy=True), param.spec)


def _is_of(param: ShardedParam, given: torch.Tensor) -> bool:
    """Whether ``given`` has the memory of ``param``."""
    if not isinstance(given, DTensor) or given.is_meta or param.sharded.is_meta:
        return False
    return get_local_tensor(given).is_set_to(param.local)


def check_replacement(param: ShardedParam, given: torch.Tensor) -> None:
    """Whether the values of ``given`` may become those of ``param``.

    Raises:
        Parallel3dError: it is no Parameter, or of another shape.
    """
    if not (isinstance(given, nn.Parameter) or _is_of(param, given)):
        raise Parallel3dError(
            f"a tensor that is no Parameter stands in place of parameter {param.name}, as "
            "torch.func.functional_call puts it there; its values would become the model's for good. Call it "
            "with the model's own parameters (or .detach() of them), or before fully_shard"
        )
    if given.shape != param.global_shape:
        raise Parallel3dError(
            f"parameter {param.name} of shape {tuple(param.global_shape)} was replaced by one of shape "
            f"{tuple(given.shape)}; give one of the same shape, or replace it before fully_shard"
        )
