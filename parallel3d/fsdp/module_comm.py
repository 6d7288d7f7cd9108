"""CommMethods: the methods of a unit that are about communication, as torch's ``FSDPModule`` has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup
from typing_extensions import deprecated

from parallel3d._arguments import as_bool, as_count, is_positive
from parallel3d._compat import backend_name
from parallel3d._compat_memory import has_group_memory
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.comm import limit_inputs
from parallel3d.fsdp.comms.custom_comm import (
    GroupAllGather,
    GroupReduceScatter,
    OwnMemory,
    SymmetricAllGather,
    SymmetricReduceScatter,
    check_comm,
)
from parallel3d.fsdp.comms.hooked_reduce import HookedReduce, check_hook, check_removal
from parallel3d.fsdp.placing.mesh_cache import kept_with
from parallel3d.fsdp.running.members import the_unit, units_of
from parallel3d.fsdp.state import Unit

__all__ = ["CommMethods"]


class CommMethods:
    """Mixed into ``FSDPModule``. Methods without ``recurse`` set their own unit only."""

    # -- the user's collectives ----------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers parameters by ``comm``, in buffers it allocates.

        Args:
            comm: an ``AllGather`` of ``torch.distributed.fsdp``, or any object with ``allocate(size, *,
                dtype, device)``, which must return memory that nobody uses, and ``__call__(output_tensor,
                input_tensor, group, async_op)``, which may return a work. The input is a part of the
                output. None: the default.

        Raises:
            Parallel3dError: no such object, or the unit has parameters on several meshes.
            StateError: the buffers come from another allocator already.
        """
        _set_comm(the_unit(self), "set_custom_all_gather", "gather_comm", comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces gradients by ``comm``, in buffers it allocates; see ``set_custom_all_gather``.

        It is called with ``op`` too, which is always a sum: the division follows.
        """
        _set_comm(the_unit(self), "set_custom_reduce_scatter", "scatter_comm", comm)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None
    ) -> None:
        """Calls ``hook`` with each reduced and divided flat gradient, to be changed in place.

        That is the result of the reduce-scatter, or with native HSDP of the all-reduce, in the backwards that
        do one.

        Args:
            hook: None removes it.
            stream: where an accelerator runs it; not with native HSDP, whose all-reduce has one.

        Raises:
            Parallel3dError: not callable, ``stream`` with HSDP, parameters on several meshes.
        """
        unit = the_unit(self)
        _check_one_mesh(unit, "set_all_reduce_hook")
        if hook is not None and not callable(hook):
            raise Parallel3dError(
                f"set_all_reduce_hook was given {hook!r}; it takes a function of one tensor, or None"
            )
        if stream is not None and any(_is_hybrid(bucket) for bucket in unit.group.buckets):
            raise Parallel3dError(
                "set_all_reduce_hook was given a stream, but the mesh has a replicate axis: the hook runs "
                "on the stream of its all-reduce; leave stream out"
            )
        for bucket in unit.group.buckets:
            bucket.all_reduce_hook = hook
            bucket.all_reduce_hook_stream = stream

    def register_comm_hook(self, state: Any, hook: Callable[..., Any] | None) -> None:
        """Reduces gradients by ``hook`` instead of our collectives, in this unit and all below, as in FSDP1.

        ``hook(state, grad, output)`` is called for the reduce-scatter over shard, with a flat ``grad`` of n
        parts, (n * S,), and ``output``, (S,), for this rank's. ``hook(state, grad)``, which works in place,
        is called for each all-reduce: with HSDP that over replicate, of the former's result; where parameters
        are whole on the shard axis (scalars, or a replicate axis alone) of their gradients. Both have the
        reduce dtype. A hook may return an object with ``wait()``, and finish its result there.

        A hook divides by itself: the engine doesn't. It should average over the ranks of each call: a
        reduced gradient that a later backward without sync adds to is reduced once more.

        Args:
            state: given to the hook. A ``CommHookState`` knows the group of each call.
            hook: such as ``bf16_compress_hook``; None removes it.

        Raises:
            Parallel3dError: no such function, or the state is for other ranks.
            StateError: a unit has a hook already, a divide factor or a custom reduce-scatter; a sum waits
                for its all-reduce.
        """
        buckets = list(_buckets(self, True))
        for bucket in buckets:
            if hook is None:
                check_removal(bucket)
            else:
                check_hook(bucket, state, hook)
        hooked = None if hook is None else HookedReduce(state, hook)
        for bucket in buckets:
            bucket.comm_hook = hooked

    # -- the sum -------------------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divides the sum of the ranks' gradients by ``factor`` instead of their number.

        Sums that wait for their reduction are divided by the factor of the backward that reduces them over
        shard. None: the default. Works on every backend.

        Raises:
            Parallel3dError: not a positive number.
            StateError: a gradient that was divided already is part of a sum that waits, or the unit has a
                communication hook, which divides by itself.
        """
        if factor is not None and not is_positive(factor):
            raise Parallel3dError(
                f"factor is {factor!r}; it must be a positive number, or None for the number of ranks"
            )
        unit = the_unit(self)
        for bucket in unit.group.buckets:
            if factor is not None:
                _check_not_hooked("set_gradient_divide_factor", bucket)
            if bucket.divide_factor != factor and bucket.grads.holds_reduced:
                raise StateError(
                    f"unit {unit.label}: .grad holds a sum that waits for its reduction, and in it gradients "
                    f"that were divided by {bucket.divisor} already; set the factor before the first "
                    "backward, or after zero_grad()"
                )
        for bucket in unit.group.buckets:
            bucket.divide_factor = factor

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted as torch has it: collectives here are sums in any case.

        With True ``set_symm_mem_for_comm`` gives the reduce-scatter symmetric memory too.
        """
        enable = as_bool("enable", enable)
        for bucket in the_unit(self).group.buckets:
            bucket.force_sum = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduces zeros for parameters without a gradient, so that ranks may use different ones.

        ``.grad`` is then set on every rank, and reductions keep the model's order.
        """
        reduce_scatter_unused_params = as_bool(
            "reduce_scatter_unused_params", reduce_scatter_unused_params
        )
        for bucket in _buckets(self, recurse):
            bucket.reduce_unused = reduce_scatter_unused_params

    # -- the reduce-scatter's memory and group -------------------------------------------------------

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many inputs of reduce-scatters may be in flight; 1 at first.

        With more, backward goes on while a slow reduce-scatter still reads its input. The largest number
        among the units of a model counts.
        """
        max_input_buffers = as_count("max_input_buffers", max_input_buffers, 1)
        units = list(units_of(self, recurse))
        buckets = [bucket for unit in units for bucket in unit.group.buckets]
        for bucket in buckets:
            _check_symmetric_inputs(bucket.scatter_comm, max_input_buffers)
        for bucket in buckets:
            bucket.max_inputs = max_input_buffers
        for context in {id(u.context): u.context for u in units if u.context is not None}.values():
            limit_inputs(context.comm, (b for u in context.units for b in u.group.buckets))

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Gives reduce-scatters a process group beside the all-gathers', so that neither waits for the other.

        One for all buckets that shard over the same ranks. All ranks must call it alike.
        """
        enable = as_bool("enable", enable)
        for bucket in _buckets(self, recurse):
            group = bucket.shard_group
            if group is None:
                continue
            bucket.scatter_group = _separate_group(bucket, group) if enable else group
            if isinstance(bucket.scatter_comm, OwnMemory):
                bucket.scatter_comm = type(bucket.scatter_comm)(bucket.scatter_group)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Takes the buffers of collectives from the process group's allocator.

        Raises:
            Parallel3dError: the backend has none.
            StateError: the unit has custom collectives.
        """
        enable = as_bool("enable", enable)
        method = "set_allocate_memory_from_process_group_for_comm"
        buckets = [b for b in the_unit(self).group.buckets if b.shard_group is not None]
        for bucket in buckets:
            _check_not_custom(method, bucket, (GroupAllGather, GroupReduceScatter))
            device_type = bucket.axes.mesh.device_type
            for group in {bucket.shard_group, bucket.scatter_group} if enable else ():
                assert group is not None
                if not has_group_memory(group, torch.device(device_type)):
                    raise Parallel3dError(
                        f"{method}: the backend {backend_name(group, device_type)!r} has no allocator for "
                        f"{device_type}; NCCL has one, for CUDA"
                    )
        for bucket in buckets:
            assert bucket.shard_group is not None and bucket.scatter_group is not None
            bucket.gather_comm = GroupAllGather(bucket.shard_group) if enable else None
            bucket.scatter_comm = GroupReduceScatter(bucket.scatter_group) if enable else None

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Gathers into symmetric memory; reduces in it too after ``set_force_sum_reduction_for_comms(True)``.

        ``set_custom_all_gather(None)`` and ``set_custom_reduce_scatter(None)`` undo it.

        Raises:
            Parallel3dError: another backend, or groups without NCCL.
            StateError: the unit has custom collectives.
        """
        if backend != "NCCL":
            raise Parallel3dError(f"backend is {backend!r}; symmetric memory is had of 'NCCL' only")
        buckets = [b for b in the_unit(self).group.buckets if b.shard_group is not None]
        for bucket in buckets:
            _check_not_custom(
                "set_symm_mem_for_comm", bucket, (SymmetricAllGather, SymmetricReduceScatter)
            )
            _check_symmetric(bucket)
            if bucket.force_sum:
                _check_symmetric_inputs(SymmetricReduceScatter, bucket.max_inputs)
        for bucket in buckets:
            assert bucket.shard_group is not None and bucket.scatter_group is not None
            bucket.gather_comm = SymmetricAllGather(bucket.shard_group)
            if bucket.force_sum:
                bucket.scatter_comm = SymmetricReduceScatter(bucket.scatter_group)


def _buckets(module: Any, recurse: bool) -> Iterable[Bucket]:
    return (bucket for unit in units_of(module, recurse) for bucket in unit.group.buckets)


def _set_comm(unit: Unit, method: str, attribute: str, comm: Any) -> None:
    _check_one_mesh(unit, method)
    check_comm(method, comm)
    for bucket in unit.group.buckets:
        if comm is not None and attribute == "scatter_comm":
            _check_not_hooked(method, bucket)
        if comm is not None and isinstance(getattr(bucket, attribute), OwnMemory):
            raise StateError(
                f"{method}: the unit's buffers come from the process group's allocator or from symmetric "
                f"memory, which a custom collective would not use; call {method}(None) first"
            )
    for bucket in unit.group.buckets:
        setattr(bucket, attribute, comm)


def _check_not_hooked(method: str, bucket: Bucket) -> None:
    if bucket.comm_hook is not None:
        raise StateError(
            f"{method}: unit {bucket.unit} has a communication hook, which reduces and divides its gradients "
            "by itself; remove it first with register_comm_hook(None, None)"
        )


def _check_not_custom(method: str, bucket: Bucket, ours: tuple[type, ...]) -> None:
    _check_not_hooked(method, bucket)
    for comm in (bucket.gather_comm, bucket.scatter_comm):
        if comm is not None and not isinstance(comm, ours):
            raise StateError(
                f"{method}: the unit already has the collective {type(comm).__name__}, which allocates its "
                "own buffers; restore the default first with set_custom_all_gather(None) and "
                "set_custom_reduce_scatter(None)"
            )


def _check_one_mesh(unit: Unit, method: str) -> None:
    buckets = unit.group.buckets
    if any(bucket.axes != buckets[0].axes for bucket in buckets):
        raise Parallel3dError(
            f"{method}: unit {unit.label} has parameters on several meshes, and it would be unclear which of "
            "their groups is meant; make those of the other mesh a unit of their own"
        )


def _check_symmetric(bucket: Bucket) -> None:
    assert bucket.shard_group is not None
    device_type = bucket.axes.mesh.device_type
    carrier = backend_name(bucket.shard_group, device_type)
    if device_type != "cuda" or carrier != "nccl":
        raise Parallel3dError(
            "set_symm_mem_for_comm: symmetric memory needs NCCL on CUDA devices; this mesh's groups are "
            f"{carrier!r} on {device_type!r}"
        )


def _check_symmetric_inputs(comm: Any, max_inputs: int) -> None:
    symmetric = comm is SymmetricReduceScatter or isinstance(comm, SymmetricReduceScatter)
    if symmetric and max_inputs > 1:
        raise StateError(
            f"max_input_buffers is {max_inputs}, but the reduce-scatter works in symmetric memory, which is "
            "scarce: keep max_input_buffers=1, or the default reduce-scatter"
        )


def _is_hybrid(bucket: Bucket) -> bool:
    return bucket.axes.size(bucket.axes.replicate) > 1


def _separate_group(bucket: Bucket, group: ProcessGroup) -> ProcessGroup:
    ranks = tuple(dist.get_process_group_ranks(group))
    return kept_with(
        bucket.axes.mesh,
        ("reduce_scatter", ranks),
        # Only the group's own ranks meet: other slices of the mesh make theirs by themselves.
        lambda: dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc="parallel3d_reduce_scatter"
        ),
    )
