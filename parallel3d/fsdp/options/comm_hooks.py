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

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._torch.fully_shard import is_torch_hook_state
from parallel3d._torch.groups import (
    all_gather_single,
    backend_name,
    reduce_scatter_single,
)
from parallel3d._torch.memory import (
    group_memory,
    make_symmetric,
    symmetric_memory,
    use_symmetric_memory,
)
from parallel3d._util.arguments import is_positive
from parallel3d._util.trace import issuing
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.collectives import ScatterWork, all_reduce, reduce_scatter
from parallel3d.fsdp.placement import kept_with
from parallel3d.fsdp.reduction import SUMS, Lane, Reducer, Reduction, Stage, divisor_before_sum

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket
    from parallel3d.fsdp.unit import Unit


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


# HookedReduce: the user's communication hook in place of a bucket's collectives on gradients.

_READY_MADE = (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)


class HookedReduce(Reducer):
    """Calls the user's hook with its state in place of each collective."""

    by_row = averages = True

    def __init__(self, state: Any, hook: Callable[..., Any]) -> None:
        self.state = state
        self.hook = hook

    def reduce_scatter(
        self, inputs: list[torch.Tensor], group: ProcessGroup, *, unit: str
    ) -> ScatterWork:
        """(n * S,) of every rank -> (S,) of what the hook makes of it."""
        whole = inputs[0]
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


class AllReduceHook(Stage):
    """Calls the user's hook with the final gradient.

    Args:
        hook: changes it in place.
        stream: where an accelerator runs it; None: where the all-reduce runs.
    """

    lane = Lane.REPLICATE

    def __init__(self, hook: Callable[[torch.Tensor], None], stream: Any) -> None:
        self.hook = hook
        self.stream = stream

    def finish(self, job: Reduction, work: Any) -> None:
        """Calls it."""
        self.hook(job.tensor)


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
    if isinstance(bucket.reducer, HookedReduce):
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
    if custom_reduce_scatter(bucket) is not None:
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
    if len(bucket.gather_groups) > 0:
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
    groups = [*bucket.gather_groups, *bucket.replicate_groups]
    for group in groups if known else ():
        ranks = dist.get_process_group_ranks(group)
        if ranks not in known:
            raise Parallel3dError(
                f"register_comm_hook: gradients of unit {bucket.unit} are reduced over the ranks {ranks}, "
                f"but the state is for {', '.join(map(str, known))}; give a parallel3d.fsdp.CommHookState() "
                "without groups, which serves all"
            )


# Collectives in place of the engine's: what they must have, and those the engine brings along.
#
# A custom collective is what ``torch.distributed.fsdp`` takes: an object that allocates its own
# buffers and is called with them. Ours differ from the default only in where the memory comes
# from.


def check_comm(method: str, comm: Any) -> None:
    """Raises unless ``comm`` is a collective as torch's ``AllGather`` and ``ReduceScatter`` are, or None."""
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise Parallel3dError(
            f"{method} was given {comm!r}; it takes an object with allocate(size, *, dtype, device) and "
            "__call__(output_tensor, input_tensor, group, ...), as torch.distributed.fsdp's, or None "
            "for the default"
        )


class CustomReduce(Reducer):
    """A reduce-scatter by ``comm``, which allocates its buffers."""

    by_row = True

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def reduce_scatter(
        self, inputs: list[torch.Tensor], group: ProcessGroup, *, unit: str
    ) -> ScatterWork:
        """(n * S,) of every rank -> (S,) of the sum."""
        whole = inputs[0]
        size = whole.numel() // group.size()
        output = self.comm.allocate((size,), dtype=whole.dtype, device=whole.device)
        with issuing.as_unit(unit):
            work = self.comm(
                output_tensor=output,
                input_tensor=whole,
                group=group,
                op=dist.ReduceOp.SUM,
                async_op=True,
            )
        return ScatterWork(work, output)

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See ``Reducer``."""
        return self.comm.allocate((size,), dtype=dtype, device=device)


def custom_reduce_scatter(bucket: Bucket) -> Any:
    """The collective that takes the place of the engine's reduce-scatter; None: none does."""
    return bucket.reducer.comm if isinstance(bucket.reducer, CustomReduce) else None


def set_reduce_scatter(bucket: Bucket, comm: Any) -> None:
    """Reduces the gradients of ``bucket`` by ``comm``; None: by the engine's collective."""
    bucket.reducer = SUMS if comm is None else CustomReduce(comm)


class OwnMemory(ABC):
    """A collective of the engine's whose buffers come from a special allocator.

    Attributes:
        group: whose allocator it is.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer of ``size``, one number."""


class _GroupMemory(OwnMemory):
    """Memory of the process group's own allocator, which NCCL registers for zero-copy transfers."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See ``OwnMemory``."""
        return group_memory(self.group, math.prod(size), dtype, device)


class GroupAllGather(_GroupMemory):
    """An all-gather between buffers of the group's allocator."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Issues it."""
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class GroupReduceScatter(_GroupMemory):
    """A reduce-scatter between buffers of the group's allocator."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Issues it."""
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


class _SymmetricMemory(OwnMemory):
    """Symmetric memory, which NCCL reads and writes on other ranks' devices directly."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        use_symmetric_memory("NCCL")
        dist.barrier(group=group)  # the communicator must be there when memory is made known to it

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """See ``OwnMemory``."""
        return symmetric_memory(math.prod(size), dtype, device)


class SymmetricAllGather(_SymmetricMemory):
    """An all-gather into symmetric memory; the input is a part of the output."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Issues it."""
        make_symmetric(output_tensor, group)
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class SymmetricReduceScatter(_SymmetricMemory):
    """A reduce-scatter between buffers of symmetric memory; NCCL has one for sums only."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Issues it."""
        make_symmetric(input_tensor, group)
        make_symmetric(output_tensor, group)
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


def check_custom(
    unit: Unit, method: str, comm: Any, present: Callable[[Bucket], Any], *, reduces: bool
) -> None:
    """Raises unless ``comm`` may take the place of ``present``, one of a bucket's collectives.

    Args:
        reduces: whether it is the reduce-scatter.
    """
    check_one_mesh(unit, method)
    check_comm(method, comm)
    for bucket in unit.group.buckets if comm is not None else ():
        if reduces:
            check_not_hooked(method, bucket)
        if isinstance(present(bucket), OwnMemory):
            raise StateError(
                f"{method}: the unit's buffers come from the process group's allocator or from symmetric "
                f"memory, which a custom collective would not use; call {method}(None) first"
            )


def check_not_hooked(method: str, bucket: Bucket) -> None:
    """Raises StateError if the gradients of ``bucket`` are reduced by a communication hook."""
    if isinstance(bucket.reducer, HookedReduce):
        raise StateError(
            f"{method}: unit {bucket.unit} has a communication hook, which reduces and divides its gradients "
            "by itself; remove it first with register_comm_hook(None, None)"
        )


def check_not_custom(method: str, bucket: Bucket, ours: tuple[type, ...]) -> None:
    """Raises StateError if ``bucket`` has a collective of the user's, or one that is none of ``ours``."""
    check_not_hooked(method, bucket)
    for comm in (bucket.gather_comm, custom_reduce_scatter(bucket)):
        if comm is not None and not isinstance(comm, ours):
            raise StateError(
                f"{method}: the unit already has the collective {type(comm).__name__}, which allocates its "
                "own buffers; restore the default first with set_custom_all_gather(None) and "
                "set_custom_reduce_scatter(None)"
            )


def check_one_mesh(unit: Unit, method: str) -> None:
    """Raises Parallel3dError if the parameters of ``unit`` lie on several meshes."""
    buckets = unit.group.buckets
    if any(bucket.axes != buckets[0].axes for bucket in buckets):
        raise Parallel3dError(
            f"{method}: unit {unit.label} has parameters on several meshes, and it would be unclear which of "
            "their groups is meant; make those of the other mesh a unit of their own"
        )


def check_symmetric(bucket: Bucket) -> None:
    """Raises Parallel3dError unless the groups of ``bucket`` have symmetric memory."""
    assert bucket.shard_group is not None
    device_type = bucket.axes.mesh.device_type
    carrier = backend_name(bucket.shard_group, device_type)
    if device_type != "cuda" or carrier != "nccl":
        raise Parallel3dError(
            "set_symm_mem_for_comm: symmetric memory needs NCCL on CUDA devices; this mesh's groups are "
            f"{carrier!r} on {device_type!r}"
        )


def check_symmetric_inputs(comm: Any, max_inputs: int) -> None:
    """Raises StateError if ``comm`` uses symmetric memory and more than one input is to be in flight."""
    symmetric = comm is SymmetricReduceScatter or isinstance(comm, SymmetricReduceScatter)
    if symmetric and max_inputs > 1:
        raise StateError(
            f"max_input_buffers is {max_inputs}, but the reduce-scatter works in symmetric memory, which is "
            "scarce: keep max_input_buffers=1, or the default reduce-scatter"
        )


def separate_group(bucket: Bucket, group: ProcessGroup) -> ProcessGroup:
    """A process group of the ranks of ``group`` for the reduce-scatters alone; made once for a mesh."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return kept_with(
        bucket.axes.mesh,
        ("reduce_scatter", ranks),
        # Only the group's own ranks meet: other slices of the mesh make theirs by themselves.
        lambda: dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc="parallel3d_reduce_scatter"
        ),
    )
