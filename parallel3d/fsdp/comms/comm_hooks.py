"""Communication hooks ready-made: what ``register_comm_hook`` takes, named as torch's FSDP1 names them.

A hook takes the place of a collective on gradients: ``hook(state, grad, output)`` of the reduce-scatter over
shard, ``hook(state, grad)``, in place, of each all-reduce (over replicate; over shard too, of parameters that
are whole there). It divides by itself; the engine then doesn't. These average in two steps, as those of
``torch.distributed.algorithms._comm_hooks.default_hooks`` do: float16 ends at 65504, where a sum of many
may overflow, and below 6e-8 there is nothing, where a small part divided by all ranks may vanish. So what
is divided before and after is about the root of the number of ranks.

They return what there is to wait for, so that on a CPU the backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._arguments import is_positive
from parallel3d._trace import issuing
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.buckets.reduce_job import divisor_before_sum
from parallel3d.fsdp.collectives import all_reduce, reduce_scatter

__all__ = [
    "CommHookState",
    "HookWork",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


class CommHookState:
    """What the ready-made hooks are given: the group, and what to divide by before and after the sum.

    One state serves all units and both axes of HSDP: before each call of a hook the engine sets
    ``process_group`` to the group of that call. Subclasses may keep what they like (errors of earlier
    rounds, say).

    Args:
        where: a process group, several, or a mesh, whose axes may occur; registering the hook on a unit
            that reduces over other ranks is an error. None: any.
        gradient_predivide_factor: what is divided by before each sum instead of the default, a power of two
            near the root of the number of ranks.

    Raises:
        Parallel3dError: no group or mesh, or a factor that is no positive number.
    """

    def __init__(
        self,
        where: ProcessGroup | Sequence[ProcessGroup] | DeviceMesh | None = None,
        *,
        gradient_predivide_factor: float | None = None,
    ) -> None:
        self.groups = _groups(where)
        factor = gradient_predivide_factor
        if factor is not None and not is_positive(factor):
            raise Parallel3dError(
                f"gradient_predivide_factor is {factor!r}; it must be a positive number, or None for a power "
                "of two near the root of the number of ranks"
            )
        self._factor = factor
        self._group = self.groups[0] if len(self.groups) == 1 else None

    @property
    def process_group(self) -> ProcessGroup:
        """The group of the call under way; outside of one the group given, if it is one."""
        if self._group is None:
            raise StateError(
                "process_group is known within a hook, where the engine sets it; elsewhere give "
                "CommHookState one process group"
            )
        return self._group

    @process_group.setter
    def process_group(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    def world_size(self) -> int:
        """Ranks of ``process_group``."""
        return self.process_group.size()

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed over ``process_group``."""
        if self._factor is not None:
            return self._factor
        return divisor_before_sum(self.world_size, torch.float16)

    @property
    def gradient_postdivide_factor(self) -> float:
        """What their sum is divided by: together with the other, the number of ranks."""
        return self.world_size / self.gradient_predivide_factor


class HookWork:
    """A hook's collective under way. ``wait`` puts the result where the caller of the hook wants it."""

    def __init__(
        self, result: Callable[[], torch.Tensor], target: torch.Tensor, divisor: float
    ) -> None:
        self._result: Callable[[], torch.Tensor] | None = result
        self._target = target
        self._divisor = divisor

    def wait(self) -> None:
        """Waits (on an accelerator: lets the current stream wait), and divides in the result's dtype."""
        result, self._result = self._result, None
        if result is None:
            return
        summed = result()
        if summed is not self._target:
            self._target.copy_(summed)
        if self._divisor != 1:
            self._target.div_(self._divisor)


def reduce_scatter_hook(
    state: CommHookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> HookWork:
    """The mean over ranks, in the dtype of ``grad``.

    Args:
        grad: (n * S,), which is overwritten; the result where ``output`` is not given.
        output: (S,), for this rank's part of the result.
    """
    return _reduce(state, grad, output, None)


def allreduce_hook(state: CommHookState, grad: torch.Tensor) -> HookWork:
    """The mean over ranks, in place. For units that shard nothing; ``reduce_scatter_hook`` does both."""
    return _reduce(state, grad, None, None)


def bf16_compress_hook(
    state: CommHookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> HookWork:
    """The mean over ranks, sent and summed in bfloat16. Arguments: see ``reduce_scatter_hook``.

    It is half the bytes of float32, at 8 bits of precision; the result has the dtype of ``grad``.
    """
    return _reduce(state, grad, output, torch.bfloat16)


def fp16_compress_hook(
    state: CommHookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> HookWork:
    """As ``bf16_compress_hook`` in float16: 11 bits of precision, of a narrow range."""
    return _reduce(state, grad, output, torch.float16)


def _reduce(
    state: CommHookState,
    grad: torch.Tensor,
    output: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> HookWork:
    group = state.process_group
    before, after = state.gradient_predivide_factor, state.gradient_postdivide_factor
    if before != 1:  # before the cast: what float16 can't hold may fit once it is divided
        grad.div_(before)
    if dtype is None or not grad.is_floating_point():
        dtype = grad.dtype
    sent = grad.to(dtype)
    if output is not None:
        scatter = reduce_scatter(sent, group, unit=issuing.unit, device_type=sent.device.type)
        return HookWork(lambda: scatter.wait(output.dtype), output, after)
    work = all_reduce(sent, group, unit=issuing.unit)

    def summed() -> torch.Tensor:
        if work is not None:
            work.wait()
        return sent

    return HookWork(summed, grad, after)


def _groups(where: Any) -> tuple[ProcessGroup, ...]:
    if where is None:
        return ()
    if isinstance(where, DeviceMesh):
        return tuple(where.get_group(axis) for axis in range(where.ndim))
    several = tuple(where) if isinstance(where, (list, tuple)) else (where,)
    for group in several:
        if not isinstance(group, dist.ProcessGroup):
            raise Parallel3dError(
                f"CommHookState was given {where!r}; it takes a process group, several, a DeviceMesh, or "
                "None for the groups of whatever unit the hook is registered on"
            )
    return several
