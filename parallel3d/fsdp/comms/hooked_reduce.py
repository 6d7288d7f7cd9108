"""HookedReduce: the user's communication hook in place of a bucket's collectives on gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from parallel3d._compat import is_torch_hook_state
from parallel3d._trace import issuing
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.collectives import ScatterWork
from parallel3d.fsdp.comms import comm_hooks
from parallel3d.fsdp.comms.comm_hooks import CommHookState

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket

__all__ = ["HookedReduce", "check_hook", "check_removal"]

_READY_MADE = (
    comm_hooks.allreduce_hook,
    comm_hooks.bf16_compress_hook,
    comm_hooks.fp16_compress_hook,
    comm_hooks.reduce_scatter_hook,
)


class HookedReduce:
    """A hook and its state, with the two methods that ``collectives`` has as functions."""

    def __init__(self, state: Any, hook: Callable[..., Any]) -> None:
        self.state = state
        self.hook = hook

    def reduce_scatter(self, whole: torch.Tensor, group: ProcessGroup, *, unit: str) -> ScatterWork:
        """(n * S,) of every rank -> (S,) of what the hook makes of it."""
        size = whole.numel() // group.size()
        output = torch.empty(size, dtype=whole.dtype, device=whole.device)
        return ScatterWork(self._call(group, unit, whole, output), output)

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> Any:
        """In place; returns what there is to wait for, if anything."""
        return self._call(group, unit, tensor)

    def _call(self, group: ProcessGroup, unit: str, *tensors: torch.Tensor) -> Any:
        if isinstance(self.state, CommHookState):
            self.state.process_group = group
        before, issuing.unit = issuing.unit, unit
        try:
            work = self.hook(self.state, *tensors)
        finally:
            issuing.unit = before
        return work if callable(getattr(work, "wait", None)) else None


def check_hook(bucket: Bucket, state: Any, hook: Any) -> None:
    """Raises unless ``hook`` can be registered for ``bucket``.

    Raises:
        Parallel3dError: not callable as it will be called, a state that doesn't go with it, or with the
            bucket's groups.
        StateError: the bucket has a hook, a factor or a collective of the user's already, or a sum waits.
    """
    label = f"unit {bucket.unit}"
    if not callable(hook):
        raise Parallel3dError(
            f"register_comm_hook was given {hook!r}; it takes a function of (state, grad, output) and, for "
            "all-reduces, (state, grad), such as parallel3d.fsdp.bf16_compress_hook; or None"
        )
    if bucket.comm_hook is not None:
        raise StateError(
            f"register_comm_hook: {label} has a hook already; remove it first with "
            "register_comm_hook(None, None)"
        )
    if bucket.divide_factor is not None:
        raise StateError(
            f"register_comm_hook: the gradients of {label} are divided by {bucket.divide_factor} "
            "(set_gradient_divide_factor), but a hook divides by itself; restore the default first with "
            "set_gradient_divide_factor(None)"
        )
    if bucket.scatter_comm is not None:
        raise StateError(
            f"register_comm_hook: {label} has a custom reduce-scatter, whose place the hook would take; "
            "restore the default first with set_custom_reduce_scatter(None)"
        )
    check_removal(bucket)
    if hook in _READY_MADE and not (isinstance(state, CommHookState) or is_torch_hook_state(state)):
        raise Parallel3dError(
            f"register_comm_hook was given {hook.__name__} with the state {state!r}; it takes a "
            "parallel3d.fsdp.CommHookState()"
        )
    _check_calls(bucket, hook)
    _check_groups(bucket, state)


def check_removal(bucket: Bucket) -> None:
    """Raises if a sum waits for its all-reduce: what has divided it, and what will, go together."""
    if bucket.grads.holds_scattered:
        raise StateError(
            f"register_comm_hook: .grad of unit {bucket.unit} holds a sum that was reduce-scattered and "
            "waits for its all-reduce (set_requires_all_reduce(False)); register or remove hooks between "
            "steps, after zero_grad()"
        )


def _check_calls(bucket: Bucket, hook: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(hook)
    except ValueError:  # of some builtin functions nothing is known
        return
    calls: list[tuple[str, ...]] = []
    if bucket.shard_group is not None or bucket.second_group is not None:
        calls.append(("state", "grad", "output"))
    if bucket.replicate_groups:
        calls.append(("state", "grad"))
    for arguments in calls:
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise Parallel3dError(
                f"register_comm_hook: unit {bucket.unit} will call its hook as hook({', '.join(arguments)}), "
                f"but {getattr(hook, '__name__', hook)}{signature} takes other arguments ({error}); "
                "give the third one a default for both kinds of call: hook(state, grad, output=None)"
            ) from error


def _check_groups(bucket: Bucket, state: Any) -> None:
    """A state that is made for certain groups must be made for those of the bucket."""
    if isinstance(state, CommHookState):
        given = state.groups
    else:  # what torch's states know is one group, whatever the collective
        given = (state.process_group,) if is_torch_hook_state(state) else ()
    known = [dist.get_process_group_ranks(group) for group in given]
    groups = [bucket.shard_group, bucket.second_group, *bucket.replicate_groups]
    for group in groups if known else ():
        if group is None:
            continue
        ranks = dist.get_process_group_ranks(group)
        if ranks not in known:
            raise Parallel3dError(
                f"register_comm_hook: gradients of unit {bucket.unit} are reduced over the ranks {ranks}, "
                f"but the state is for {', '.join(map(str, known))}; give a parallel3d.fsdp.CommHookState() "
                "without groups, which serves all"
            )
