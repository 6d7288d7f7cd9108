"""Communication hooks (named as in torch's FSDP1), and collectives that replace the engine's.

How a hook is called: ``FSDPModule.register_comm_hook``. It divides by itself; the engine then doesn't. The
hooks here divide before and after the sum, each time by about the root of the number of ranks, as those of
``torch.distributed.algorithms._comm_hooks.default_hooks`` do: float16 overflows above 65504 and underflows
below 6e-8. They return an object to wait on, so that on a CPU the backward goes on meanwhile.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._torch.fully_shard import is_torch_hook_state
from parallel3d._torch.groups import (
    all_gather_single,
    backend_name,
    group_memory,
    has_group_memory,
    make_symmetric,
    reduce_scatter_single,
    symmetric_memory,
    use_symmetric_memory,
)
from parallel3d._util.arguments import is_positive
from parallel3d._util.trace import issuing
from parallel3d.errors import Parallel3dError, RefusedStateError, StateError
from parallel3d.fsdp.collectives import ScatterWork, all_reduce, has_streams, reduce_scatter
from parallel3d.fsdp.reduction import (
    DEFAULT_REDUCER,
    Lane,
    Reducer,
    Reduction,
    Stage,
    divisor_before_sum,
)
from parallel3d.mesh.joined import kept_with

if TYPE_CHECKING:
    from parallel3d.fsdp.bucket import Bucket
    from parallel3d.fsdp.unit import Unit


class CommHookState:
    """State of the hooks in this module: the process group, and the factors to divide by.

    One state serves all units and both axes of HSDP: before each call of a hook the engine sets
    ``process_group`` to the group of that call. Subclasses may keep state of their own, such as the
    compression errors of earlier steps.

    Args:
        where: the process group, the groups, or the mesh whose axes the state is for; registering it on a
            unit that reduces over other ranks is an error. None: any groups.
        gradient_predivide_factor: divisor applied before each sum. Default: a power of two near the root of
            the number of ranks.

    Raises:
        Parallel3dError: ``where`` is no group or mesh, or the factor is not a positive number.
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
                f"gradient_predivide_factor is {factor!r}; it must be a positive number, or None"
            )
        self._factor = factor
        self._group = self.groups[0] if len(self.groups) == 1 else None

    @property
    def process_group(self) -> ProcessGroup:
        """The group of the current call; outside of a hook the group given to the constructor, if one was."""
        if self._group is None:
            raise StateError(
                "process_group is known within a hook only, unless CommHookState is given one process group"
            )
        return self._group

    @process_group.setter
    def process_group(self, group: ProcessGroup) -> None:
        self._group = group

    @property
    def world_size(self) -> int:
        """The number of ranks of ``process_group``."""
        return self.process_group.size()

    @property
    def gradient_predivide_factor(self) -> float:
        """The divisor applied to gradients before they are summed over ``process_group``."""
        if self._factor is not None:
            return self._factor
        return divisor_before_sum(self.world_size, torch.float16)

    @property
    def gradient_postdivide_factor(self) -> float:
        """The divisor applied to the sum; times the other factor it is the number of ranks."""
        return self.world_size / self.gradient_predivide_factor


class HookWork:
    """An asynchronous collective of a hook. ``wait`` writes the mean over the ranks into ``target``."""

    def __init__(self, work: ScatterWork, target: torch.Tensor, divisor: float) -> None:
        work.dtype = target.dtype
        self._work: ScatterWork | None = work
        self._target = target
        self._divisor = divisor

    def wait(self) -> None:
        """Waits (on an accelerator: lets the current stream wait), and divides in the result's dtype."""
        work, self._work = self._work, None
        if work is None:
            return
        summed = work.wait()
        if summed is not self._target:
            self._target.copy_(summed)
        if self._divisor != 1:
            self._target.div_(self._divisor)


def reduce_scatter_hook(
    state: CommHookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> HookWork:
    """Averages gradients over the ranks in the dtype of ``grad``.

    Args:
        state: sets the process group and the divisors.
        grad: (n * S,), overwritten; it receives the result if ``output`` is None.
        output: (S,), receives this rank's shard of the mean.
    """
    return _reduce(state, grad, output, None)


def allreduce_hook(state: CommHookState, grad: torch.Tensor) -> HookWork:
    """Averages gradients over the ranks in place, for units that shard nothing.

    ``reduce_scatter_hook`` does this too when it gets no ``output``; ``state`` and ``grad`` are as there.
    """
    return _reduce(state, grad, None, None)


def bf16_compress_hook(
    state: CommHookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> HookWork:
    """Averages gradients over the ranks, sent and summed in bfloat16; see ``reduce_scatter_hook``.

    It sends half the bytes of float32, at 8 bits of precision. ``state``, ``grad`` and ``output`` are as
    there; the result has the dtype of ``grad``.
    """
    return _reduce(state, grad, output, torch.bfloat16)


def fp16_compress_hook(
    state: CommHookState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> HookWork:
    """Like ``bf16_compress_hook`` in float16: 11 bits of precision, but a narrow range.

    ``state``, ``grad`` and ``output`` are as for ``reduce_scatter_hook``.
    """
    return _reduce(state, grad, output, torch.float16)


def _reduce(
    state: CommHookState, grad: torch.Tensor, output: torch.Tensor | None, dtype: torch.dtype | None
) -> HookWork:
    group = state.process_group
    before, after = state.gradient_predivide_factor, state.gradient_postdivide_factor
    if before != 1:  # before the cast: values beyond float16's range may fit once divided
        grad.div_(before)
    if dtype is None or not grad.is_floating_point():
        dtype = grad.dtype
    sent = grad.to(dtype)
    if output is None:
        work = ScatterWork(all_reduce(sent, group, unit=issuing.unit), sent)
        return HookWork(work, grad, after)
    work = reduce_scatter([sent], group, unit=issuing.unit, device_type=sent.device.type)
    return HookWork(work, output, after)


def _groups(where: Any) -> tuple[ProcessGroup, ...]:
    if where is None:
        return ()
    if isinstance(where, DeviceMesh):
        return tuple(where.get_group(axis) for axis in range(where.ndim))
    several = tuple(where) if isinstance(where, (list, tuple)) else (where,)
    if not all(isinstance(group, dist.ProcessGroup) for group in several):
        raise Parallel3dError(
            f"CommHookState was given {where!r}; it takes a process group, several, a DeviceMesh, or None "
            "for the groups of any unit"
        )
    return several


class HookedReduce(Reducer):
    """Calls the user's communication hook in place of the collectives on gradients."""

    by_row = averages = True
    is_exact = False

    def __init__(self, state: Any, hook: Callable[..., Any]) -> None:
        self.state = state
        self.hook = hook

    def reduce_scatter(
        self, inputs: list[torch.Tensor], group: ProcessGroup, *, unit: str, scale: float = 1.0
    ) -> ScatterWork:
        whole = inputs[0]
        output = torch.empty(whole.numel() // group.size(), dtype=whole.dtype, device=whole.device)
        return ScatterWork(self._call(group, unit, whole, output), output)

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup, *, unit: str) -> Any:
        return self._call(group, unit, tensor)

    def _call(self, group: ProcessGroup, unit: str, *tensors: torch.Tensor) -> Any:
        if isinstance(self.state, CommHookState):
            self.state.process_group = group
        with issuing.as_unit(unit):
            work = self.hook(self.state, *tensors)
        return work if callable(getattr(work, "wait", None)) else None


class AllReduceHook(Stage):
    """The stage that calls the function of ``set_all_reduce_hook`` with the reduced gradient.

    Args:
        hook: changes the flat gradient in place.
        stream: the accelerator stream to run it on. None: that of the all-reduce.
    """

    lane = Lane.REPLICATE

    def __init__(self, hook: Callable[[torch.Tensor], None], stream: Any) -> None:
        self.hook = hook
        self.stream = stream

    def finish(self, job: Reduction, work: Any) -> None:
        self.hook(job.tensor)


def check_hook(bucket: Bucket, state: Any, hook: Any) -> None:
    """Raises Parallel3dError or StateError if ``register_comm_hook`` can't set ``hook`` on ``bucket``."""
    label = f"unit {bucket.unit}"
    if not callable(hook):
        raise Parallel3dError(
            f"register_comm_hook was given {hook!r}; it takes a function of (state, grad, output=None), such "
            "as parallel3d.fsdp.bf16_compress_hook; or None"
        )
    conflict = ""
    if isinstance(bucket.settings.reducer, HookedReduce):
        conflict = f"{label} has a hook already; call register_comm_hook(None, None) first"
    elif bucket.settings.divide_factor is not None:
        conflict = (
            f"the gradients of {label} are divided by {bucket.settings.divide_factor}, but a hook divides by "
            "itself; call set_gradient_divide_factor(None) first"
        )
    elif bucket.axes.mean_over is not None:
        conflict = (
            f"the gradients of {label}, which holds experts, are a sum over ep already, and are divided by "
            f"{bucket.divisor}; a hook would divide by its own number of ranks. Register it for other units"
        )
    elif custom_reduce_scatter(bucket) is not None:
        conflict = (
            f"{label} has a custom reduce-scatter; call set_custom_reduce_scatter(None) first"
        )
    if conflict:
        raise StateError(f"register_comm_hook: {conflict}")
    check_not_wired("register_comm_hook", bucket)
    check_removal(bucket)
    ready_made = (allreduce_hook, bf16_compress_hook, fp16_compress_hook, reduce_scatter_hook)
    if hook in ready_made and not (isinstance(state, CommHookState) or is_torch_hook_state(state)):
        raise Parallel3dError(
            f"register_comm_hook was given {hook.__name__} with the state {state!r}; it takes a "
            "parallel3d.fsdp.CommHookState()"
        )
    _check_calls(bucket, hook)
    _check_groups(bucket, state)


def check_removal(bucket: Bucket) -> None:
    """Raises StateError if a reduce-scattered gradient waits for its all-reduce, by the same hook."""
    if bucket.grads.sums.holds_scattered:
        raise StateError(
            f"register_comm_hook: .grad of unit {bucket.unit} holds a sum that is not all-reduced yet "
            "(set_requires_all_reduce(False)); register or remove hooks between steps, after zero_grad()"
        )


def _check_calls(bucket: Bucket, hook: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(hook)
    except ValueError:  # some builtin functions have none
        return
    calls: list[tuple[str, ...]] = []
    if bucket.gather_groups:
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
    allowed = state.groups if isinstance(state, CommHookState) else ()
    if is_torch_hook_state(state):  # which has one group for every collective
        allowed = (state.process_group,)
    known = [dist.get_process_group_ranks(group) for group in allowed]
    for group in (*bucket.gather_groups, *bucket.replicate_groups) if known else ():
        ranks = dist.get_process_group_ranks(group)
        if ranks not in known:
            raise Parallel3dError(
                f"register_comm_hook: gradients of unit {bucket.unit} are reduced over the ranks {ranks}, "
                f"but the state is for {', '.join(map(str, known))}; give a CommHookState() without groups"
            )


# Custom collectives: objects as ``torch.distributed.fsdp`` takes them, which allocate their own buffers and
# are called with them. Those defined here differ from the default only in their memory.


class CustomReduce(Reducer):
    """Reduce-scatters by ``comm``, given to ``set_custom_reduce_scatter``, which also allocates buffers."""

    by_row = True

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def reduce_scatter(
        self, inputs: list[torch.Tensor], group: ProcessGroup, *, unit: str, scale: float = 1.0
    ) -> ScatterWork:
        whole = inputs[0]
        output = self.allocate(whole.numel() // group.size(), whole.dtype, whole.device)
        tensors = {"output_tensor": output, "input_tensor": whole}
        with issuing.as_unit(unit):
            async_op = not has_streams(whole.device.type)
            work = self.comm(**tensors, group=group, op=dist.ReduceOp.SUM, async_op=async_op)
        return ScatterWork(work, output)

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.comm.allocate((size,), dtype=dtype, device=device)


def custom_reduce_scatter(bucket: Bucket) -> Any:
    reducer = bucket.settings.reducer
    return reducer.comm if isinstance(reducer, CustomReduce) else None


def set_reduce_scatter(bucket: Bucket, comm: Any) -> None:
    """Makes ``bucket`` reduce-scatter by ``comm``; None: by the engine's collective."""
    bucket.change(reducer=DEFAULT_REDUCER if comm is None else CustomReduce(comm))


class EngineCollective:
    """The engine's collectives in the form of a user's, with buffers from a special allocator.

    Args:
        group: the process group to communicate over.
        symmetric: whether buffers are symmetric memory, which NCCL reads and writes on other ranks' devices
            directly. Otherwise they come from the group's allocator, which NCCL registers for zero-copy.
    """

    def __init__(self, group: ProcessGroup, *, symmetric: bool) -> None:
        self.group = group
        self.symmetric = symmetric
        if symmetric:
            use_symmetric_memory("NCCL")
            # The communicator must exist when memory is registered with it.
            dist.barrier(group=group)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self.symmetric:
            return symmetric_memory(math.prod(size), dtype, device)
        return group_memory(self.group, math.prod(size), dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Issues a reduce-scatter if ``op`` is given, else an all-gather with the input inside the output."""
        if self.symmetric:
            for tensor in (output_tensor,) if op is None else (input_tensor, output_tensor):
                make_symmetric(tensor, group)
        if op is None:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


def set_engine_collectives(bucket: Bucket, *, symmetric: bool, reduces: bool) -> None:
    """Makes ``bucket`` gather, and if ``reduces`` also reduce-scatter, by ``EngineCollective``."""
    assert bucket.shard_group is not None and bucket.scatter_group is not None
    if reduces:
        check_not_wired("a reduce-scatter in the memory of its process group", bucket)
    bucket.change(gather_comm=EngineCollective(bucket.shard_group, symmetric=symmetric))
    if reduces:
        set_reduce_scatter(bucket, EngineCollective(bucket.scatter_group, symmetric=symmetric))


def check_custom(unit: Unit, method: str, comm: Any, present: Callable[[Bucket], Any]) -> None:
    """Raises unless ``method`` may set ``comm`` on ``unit``; ``present`` returns what a bucket has now."""
    check_one_mesh(unit, method)
    if comm is None:
        return
    if not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise Parallel3dError(
            f"{method} was given {comm!r}; it takes an object with allocate(size, *, dtype, device) and "
            "__call__(output_tensor, input_tensor, group, ...), or None for the default"
        )
    for bucket in unit.group.buckets:
        if present is custom_reduce_scatter:
            check_not_hooked(method, bucket)
            check_not_wired(method, bucket)
        if isinstance(present(bucket), EngineCollective):
            raise StateError(
                f"{method}: the unit's buffers come from the process group's allocator or are symmetric "
                f"memory; call {method}(None) first"
            )


def check_not_hooked(method: str, bucket: Bucket) -> None:
    if isinstance(bucket.settings.reducer, HookedReduce):
        raise StateError(
            f"{method}: unit {bucket.unit} has a communication hook, which reduces and divides its gradients "
            "by itself; remove it first with register_comm_hook(None, None)"
        )


def check_not_wired(method: str, bucket: Bucket) -> None:
    """Raises StateError if the policy of ``bucket`` has a ``wire_dtype``, which ``method`` excludes."""
    wire = bucket.given_policy.wire_dtype
    if wire is not None:
        raise StateError(
            f"{method}: unit {bucket.unit} has MixedPrecisionPolicy(wire_dtype={wire}): gradients are sent "
            "by all-to-alls and summed by each rank; leave wire_dtype out to reduce them by a collective"
        )


def communicating(unit: Unit, method: str, *, symmetric: bool) -> list[Bucket]:
    """Returns the sharded buckets of ``unit``, on which ``method`` may set an ``EngineCollective``.

    Raises:
        StateError: any bucket has a communication hook or another collective.
    """
    for bucket in unit.group.buckets:
        check_not_hooked(method, bucket)
        for comm in (bucket.settings.gather_comm, custom_reduce_scatter(bucket)):
            same_kind = isinstance(comm, EngineCollective) and comm.symmetric is symmetric
            if comm is not None and not same_kind:
                raise RefusedStateError(
                    f"{method}: the unit already has the collective {type(comm).__name__}; call "
                    "set_custom_all_gather(None) and set_custom_reduce_scatter(None) first"
                )
    return [bucket for bucket in unit.group.buckets if bucket.shard_group is not None]


def check_one_mesh(unit: Unit, method: str) -> None:
    buckets = unit.group.buckets
    if any(bucket.axes != buckets[0].axes for bucket in buckets):
        raise Parallel3dError(
            f"{method}: unit {unit.label} has parameters on several meshes; make those of the other mesh a "
            "unit of their own"
        )


def check_group_memory(method: str, bucket: Bucket) -> None:
    device_type = bucket.axes.mesh.device_type
    for group in {bucket.shard_group, bucket.scatter_group}:
        assert group is not None
        if not has_group_memory(group, torch.device(device_type)):
            raise Parallel3dError(
                f"{method}: the backend {backend_name(group, device_type)!r} has no allocator for "
                f"{device_type}; NCCL has one, for CUDA"
            )


def check_symmetric(bucket: Bucket) -> None:
    assert bucket.shard_group is not None
    device_type = bucket.axes.mesh.device_type
    backend = backend_name(bucket.shard_group, device_type)
    if device_type != "cuda" or backend != "nccl":
        raise Parallel3dError(
            "set_symm_mem_for_comm: symmetric memory needs NCCL on CUDA devices; this mesh's groups are "
            f"{backend!r} on {device_type!r}"
        )


def check_symmetric_inputs(symmetric: bool, max_inputs: int) -> None:
    if symmetric and max_inputs > 1:
        raise StateError(
            f"max_input_buffers is {max_inputs}, but symmetric memory is scarce: keep max_input_buffers=1, "
            "or the default reduce-scatter"
        )


def separate_group(bucket: Bucket, group: ProcessGroup) -> ProcessGroup:
    """Returns a second process group with the ranks of ``group``, for reduce-scatters; made once per mesh."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return kept_with(
        bucket.axes.mesh,
        ("reduce_scatter", ranks),
        # Only the group's own ranks synchronise; other slices of the mesh make theirs by themselves.
        lambda: dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc="parallel3d_reduce_scatter"
        ),
    )
