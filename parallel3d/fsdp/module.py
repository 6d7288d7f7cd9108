"""FSDPModule: the methods a module gains from ``fully_shard``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from typing_extensions import deprecated

from parallel3d._torch.groups import backend_name
from parallel3d._torch.memory import has_group_memory
from parallel3d._util.arguments import as_bool, as_count, is_positive
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import limit_inputs
from parallel3d.fsdp.copying import copy_module
from parallel3d.fsdp.group import Retain
from parallel3d.fsdp.interop import TorchState, state_of
from parallel3d.fsdp.members import get_unit, parameters_at_rest, unit_of, units_of
from parallel3d.fsdp.options.checks import refuse_accumulation
from parallel3d.fsdp.options.comm_hooks import (
    AllReduceHook,
    GroupAllGather,
    GroupReduceScatter,
    HookedReduce,
    OwnMemory,
    SymmetricAllGather,
    SymmetricReduceScatter,
    check_custom,
    check_hook,
    check_not_custom,
    check_not_hooked,
    check_one_mesh,
    check_removal,
    check_symmetric,
    check_symmetric_inputs,
    custom_reduce_scatter,
    separate_group,
    set_reduce_scatter,
)
from parallel3d.fsdp.options.finalization import (
    Finalization,
    finalization_of,
    set_manual_finalization,
)
from parallel3d.fsdp.reduction import SUMS
from parallel3d.fsdp.schedule import Prefetch, PrefetchSettings
from parallel3d.fsdp.state_dict.full_params import check_not_shown
from parallel3d.fsdp.state_dict.model_state_dict import saved_in_form
from parallel3d.fsdp.unit import Unit, UnitModule

_TorchHandle: type = getattr(torch_fsdp, "GradientReductionHandle", object)


class GradientReductionHandle(_TorchHandle):
    """A ``finalize_backward(async_op=True)`` under way."""

    def __init__(self, finalization: Finalization | None) -> None:
        self._finalization = finalization
        self._number = 0 if finalization is None else finalization.number

    def wait(self) -> None:
        """Waits for the reductions; the gradients are in ``.grad`` then. Further calls do nothing.

        Raises:
            StateError: ``reset_iter_state()`` has dropped the reductions.
        """
        finalization, self._finalization = self._finalization, None
        if finalization is not None:
            finalization.wait(self._number)


class UnshardHandle(TorchUnshardHandle):
    """An ``unshard(async_op=True)`` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Waits until the unsharded parameters are in the module. Further calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is not None and not unit.group.is_sharded:  # resharded meanwhile
            unit.group.unshard(unit.ready_context().comm)
            unit.group.register_unsharded()


class FSDPModule(UnitModule, TorchFSDPModule):
    """Mixed into the class of every module that ``fully_shard`` was applied to.

    An instance of torch's class too, which its pipelining and others ask for; every method is our own.
    Methods for the outermost unit hold for all units below; all ranks must call them alike.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the original class: what slicing a container module asks for is no unit."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    # -- unshard / reshard ---------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gathers this unit's parameters and shows them in the module until ``reshard()``. Not recursive.

        Forwards and backwards reshard it too where they are told to (``reshard_after_forward``,
        ``set_reshard_after_backward``). Until then forwards compute with what was gathered, or gather again
        after an optimizer's step or an in-place change of the Parameters; changes of ``param.data`` and by
        ``torch._foreach_*`` functions outside of an optimizer they do not see. What is written to the
        unsharded parameters themselves is lost when they are freed.

        Args:
            async_op: return a handle at once; ``wait()`` on it before the parameters are used.
        """
        unit = get_unit(self)
        context = unit.ready_context()
        for observer in unit.observers:
            observer.unshard(unit)
        unit.issue_unshard(context)
        unit.group.retain = Retain.USER
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Puts this unit's sharded Parameters back and frees the unsharded ones. Not recursive."""
        unit = get_unit(self)
        if unit.is_registered_by_root:  # until the root's forward or backward ends
            unit.group.retain = Retain.NO
            return
        unit.group.register_sharded()
        unit.group.reshard(unit.ready_context().comm)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether resharding leaves the unsharded parameters their memory, at one address.

        For what has noted that address, such as a captured CUDA graph. Each unshard still gathers into it,
        and a backward may read it no more than if it were free. False, the default, frees it; also what is
        kept now, where the unit is sharded.
        """
        keep = as_bool("keep", keep)
        for unit in units_of(self, recurse):
            unit.group.keep_storage(keep)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward frees the parameters, and backward gathers them again.

        With False backward computes with what the forward has gathered. The next forward gathers anew; see
        ``set_keep_between_forwards``.
        """
        reshard_after_forward = as_bool("reshard_after_forward", reshard_after_forward)
        for unit in units_of(self, recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_keep_between_forwards(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether forwards without a backward (evaluation, generation) use what the one before has gathered.

        For units whose forward does not free the parameters (``reshard_after_forward=False``), and for
        HFSDP's copy of the weights, in training too. False, the default: each forward of the root gathers
        anew, so that it computes with the weights whatever has changed them. True saves those all-gathers. An
        optimizer's step and in-place changes of the Parameters (``load_state_dict`` too) are still seen. Not
        seen are changes of ``param.data``, ``torch._foreach_*`` functions on the Parameters outside of an
        optimizer, as some EMA implementations store and restore weights: after those run one forward with
        False.
        """
        keep = as_bool("keep", keep)
        for unit in units_of(self, recurse):
            unit.keep_between_forwards = keep

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward frees the parameters; False saves the gather of the next micro-batch.

        A forward after an optimizer's step or an in-place change of the Parameters gathers again. Changes of
        ``param.data`` and by ``torch._foreach_*`` functions outside of an optimizer it does not see: make
        those after a backward with True.
        """
        reshard_after_backward = as_bool("reshard_after_backward", reshard_after_backward)
        for unit in units_of(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this unit's parameters; False where it doesn't read them."""
        unshard_in_backward = as_bool("unshard_in_backward", unshard_in_backward)
        get_unit(self).unshard_in_backward = unshard_in_backward

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted as torch has it; our gathers are asynchronous on every device in any case."""
        as_bool("async_op", async_op)

    # -- prefetch ------------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """The units to gather when this one's forward begins, instead of the next in last step's order.

        An empty list restores the default.
        """
        get_unit(self).forward_prefetch = _refs("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """The units to gather when this one's backward begins, instead of the one before it.

        An empty list restores the default.
        """
        get_unit(self).backward_prefetch = _refs("backward", modules)

    def set_post_optim_event(self, event: Any) -> None:
        """An event recorded after the optimizer step, which the next forward's first gather waits for
        instead of all that the current stream has been given. Used once; set a new one each step.
        """
        unit = get_unit(self)
        root = unit if unit.context is None else unit.context.root
        root.post_optim_event = event

    # -- accumulation --------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the step's last. Accepted as torch has it; it changes nothing here.

        torch's other backwards end without a wait for their reductions. Ours wait in each: by events
        on an accelerator, which the CPU does not wait for. So ``.grad`` is complete after every backward, and
        what ``zero_grad()`` clears stays cleared.
        """
        as_bool("is_last_backward", is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients at all, over shard and replicate together.

        With False a rank's own sum waits in ``.grad`` (a DTensor with ``Partial()`` placements) for the next
        backward with True; ``zero_grad()`` clears it.
        """
        requires_gradient_sync = as_bool("requires_gradient_sync", requires_gradient_sync)
        if not requires_gradient_sync:
            refuse_accumulation(units_of(self, recurse), "set_requires_gradient_sync(False)")
        for unit in units_of(self, recurse):
            unit.sync = unit.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over the replicate axis (HSDP).

        With False gradients are reduce-scattered over shard, and wait in ``.grad`` with ``Partial()`` on
        replicate for the next backward with True.
        """
        requires_all_reduce = as_bool("requires_all_reduce", requires_all_reduce)
        if not requires_all_reduce:
            refuse_accumulation(units_of(self, recurse), "set_requires_all_reduce(False)")
        for unit in units_of(self, recurse):
            unit.all_reduce = requires_all_reduce

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backwards reduce nothing, as with ``set_requires_gradient_sync(False)``: sums wait in
        ``.grad`` for the next backward after it.

        For this unit and those inside it, whose switches are put back as they were, also after an
        exception. It may be nested.
        """
        before = [(unit, unit.sync, unit.all_reduce) for unit in units_of(self, recurse=True)]
        for unit, _, _ in before:
            unit.sync = unit.all_reduce = False
        try:
            yield
        finally:
            for unit, sync, all_reduce in before:
                unit.sync, unit.all_reduce = sync, all_reduce

    # -- rest ----------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Makes the model usable again after an exception in forward or backward. For the root.

        Waits for what is in flight and brings every unit to rest. Sums that wait for their reduction
        (``set_requires_gradient_sync(False)``, ``set_requires_all_reduce(False)``) are dropped; reduced
        gradients stay in ``.grad``: call ``zero_grad()`` for a step from the start.

        Raises:
            StateError: this module is not the root.
        """
        unit = get_unit(self)
        if unit.context is not None and not unit.is_root:
            raise StateError(
                f"reset_iter_state was called on {unit.label!r}; call it on the outermost unit, "
                f"{unit.context.root.label!r}"
            )
        unit.ready_context().abandon(backward_only=False)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``: the sharded ones, also after a backward that has failed."""
        get_unit(self).come_to_rest()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As ``nn.Module.named_modules``. Whatever reads parameters of a module around this one walks through
        here before it reads this one's.
        """
        get_unit(self).come_to_rest()
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, also after a backward that an exception ended, and while ``unshard()``
        shows other parameters than those that have the gradients.
        """
        unit = get_unit(self)
        unit.come_to_rest()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        inside = unit.context.units if unit.context is not None else units_of(self, recurse=True)
        if not any(each.group.is_registered for each in inside):
            return
        seen = self.parameters()  # type: ignore[attr-defined]
        for param in set(parameters_at_rest(self)).difference(seen):  # type: ignore[arg-type]
            if param.grad is not None and set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.state_dict``: the sharded parameters, under the plain model's names, or the form
        that ``fsdp.set_state_dict_type`` has set.

        Parameters that ``unshard()`` has shown are resharded first, unless a forward is under way.
        """
        unit = get_unit(self)
        unit.show_shards()
        save = functools.partial(super().state_dict, *args, **kwargs)  # type: ignore[misc]
        if unit.form is None:
            return save()
        destination = kwargs.get("destination", args[0] if args else None)
        return saved_in_form(self, save, destination)  # type: ignore[arg-type]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.load_state_dict``; with ``assign=True`` too the Parameters stay the same objects."""
        get_unit(self).come_to_rest()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Also where a module around this one loads: it comes here before it goes to the modules inside."""
        get_unit(self).show_shards()
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A unit of its own with the same weights, on the same mesh. Units inside are copied with it."""
        return copy_module(self, memo)  # type: ignore[arg-type]

    def _get_fsdp_state(self) -> TorchState:  # type: ignore[override]
        """What torch's own functions ask for."""
        return state_of(self)  # type: ignore[arg-type]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """``to``, ``double``, ``to_empty`` and the like: the new values move into the buckets."""
        unit = get_unit(self)
        check_not_shown(unit, "a conversion of the module")
        shown = unit.is_registered_by_root
        unit.group.register_sharded()
        unit.group.reshard(unit.ready_context().comm)
        result = super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        # Of several modules given as a list one is converted after the other.
        unit.group.adopt(partly=len(unit.modules) > 1)
        if shown:
            unit.group.register_unsharded()
        return result

    # -- communication ----------------------------------------------------------------------------------

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
        unit = get_unit(self)
        present = attrgetter("gather_comm")
        check_custom(unit, "set_custom_all_gather", comm, present, reduces=False)
        for bucket in unit.group.buckets:
            bucket.gather_comm = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces gradients by ``comm``, in buffers it allocates; see ``set_custom_all_gather``.

        It is called with ``op`` too, which is always a sum: the division follows.
        """
        unit = get_unit(self)
        present = custom_reduce_scatter
        check_custom(unit, "set_custom_reduce_scatter", comm, present, reduces=True)
        for bucket in unit.group.buckets:
            if comm is not None or present(bucket) is not None:
                set_reduce_scatter(bucket, comm)

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
        unit = get_unit(self)
        check_one_mesh(unit, "set_all_reduce_hook")
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
            bucket.on_result = [] if hook is None else [AllReduceHook(hook, stream)]

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
        reducer = SUMS if hook is None else HookedReduce(state, hook)
        for bucket in buckets:
            if hook is not None or isinstance(bucket.reducer, HookedReduce):
                bucket.reducer = reducer

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
        unit = get_unit(self)
        for bucket in unit.group.buckets:
            if factor is not None:
                check_not_hooked("set_gradient_divide_factor", bucket)
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
        for bucket in get_unit(self).group.buckets:
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
            check_symmetric_inputs(custom_reduce_scatter(bucket), max_input_buffers)
        for bucket in buckets:
            bucket.max_inputs = max_input_buffers
        for context in {id(u.context): u.context for u in units if u.context is not None}.values():
            limit_inputs(
                context.comm, (b.max_inputs for u in context.units for b in u.group.buckets)
            )

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
            bucket.scatter_group = separate_group(bucket, group) if enable else group
            comm = custom_reduce_scatter(bucket)
            if isinstance(comm, OwnMemory):
                set_reduce_scatter(bucket, type(comm)(bucket.scatter_group))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Takes the buffers of collectives from the process group's allocator.

        Raises:
            Parallel3dError: the backend has none.
            StateError: the unit has custom collectives.
        """
        enable = as_bool("enable", enable)
        method = "set_allocate_memory_from_process_group_for_comm"
        buckets = [b for b in get_unit(self).group.buckets if b.shard_group is not None]
        for bucket in buckets:
            check_not_custom(method, bucket, (GroupAllGather, GroupReduceScatter))
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
            set_reduce_scatter(bucket, GroupReduceScatter(bucket.scatter_group) if enable else None)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Gathers into symmetric memory; reduces in it too after ``set_force_sum_reduction_for_comms(True)``.

        ``set_custom_all_gather(None)`` and ``set_custom_reduce_scatter(None)`` undo it.

        Raises:
            Parallel3dError: another backend, or groups without NCCL.
            StateError: the unit has custom collectives.
        """
        if backend != "NCCL":
            raise Parallel3dError(f"backend is {backend!r}; symmetric memory is had of 'NCCL' only")
        buckets = [b for b in get_unit(self).group.buckets if b.shard_group is not None]
        for bucket in buckets:
            check_not_custom(
                "set_symm_mem_for_comm", bucket, (SymmetricAllGather, SymmetricReduceScatter)
            )
            check_symmetric(bucket)
            if bucket.force_sum:
                check_symmetric_inputs(SymmetricReduceScatter, bucket.max_inputs)
        for bucket in buckets:
            assert bucket.shard_group is not None and bucket.scatter_group is not None
            bucket.gather_comm = SymmetricAllGather(bucket.shard_group)
            if bucket.force_sum:
                set_reduce_scatter(bucket, SymmetricReduceScatter(bucket.scatter_group))

    # -- gathers ahead of their use: for the outermost unit ---------------------------------------------

    def set_backward_prefetch(self, prefetch: BackwardPrefetch | None) -> None:
        """When a unit's backward gathers the unit before it.

        Args:
            prefetch: ``BACKWARD_PRE``, the default: before its own backward computes, so that the gather
                overlaps it; two units are gathered at a time. ``BACKWARD_POST``: after it, when its own
                parameters are freed and before its gradients are reduced; one at a time. None: not at all.
                What ``set_modules_to_backward_prefetch`` names is gathered in any case, with None as with
                ``BACKWARD_PRE``.

        Raises:
            Parallel3dError: none of these.
            StateError: this is not the outermost unit.
        """
        if prefetch is not None and not isinstance(prefetch, BackwardPrefetch):
            raise Parallel3dError(
                f"backward_prefetch is {prefetch!r}; it must be BackwardPrefetch.BACKWARD_PRE, "
                "BackwardPrefetch.BACKWARD_POST (of parallel3d.fsdp or torch.distributed.fsdp), or None for "
                "no prefetch"
            )

        when = {
            BackwardPrefetch.BACKWARD_PRE: Prefetch.BEFORE,
            BackwardPrefetch.BACKWARD_POST: Prefetch.AFTER,
            None: Prefetch.NEVER,
        }
        _change(self, "set_backward_prefetch", backward=when[prefetch])

    def set_forward_prefetch(self, enable: bool) -> None:
        """Whether a unit's forward gathers the next unit in the last iteration's order; True at first.

        What ``set_modules_to_forward_prefetch`` names is gathered in any case.

        Raises:
            Parallel3dError: neither True nor False.
            StateError: this is not the outermost unit.
        """
        enable = as_bool("enable", enable)

        _change(self, "set_forward_prefetch", forward=enable)

    def set_limit_all_gathers(self, limit: int | None) -> None:
        """How many units may be gathered ahead of their use.

        A prefetch beyond is put off until one of those is used, on every rank alike. So of the parameters no
        more is gathered than what is in use and ``limit`` units, and not on an accelerator either, however
        far the CPU runs ahead: a gather waits for the computation that was issued before it. What the user
        unshards doesn't count.

        Args:
            limit: at least 1; None, the default: no limit but what is asked for, which is one unit unless
                ``set_modules_to_*_prefetch`` name more.

        Raises:
            Parallel3dError: no such number.
            StateError: this is not the outermost unit.
        """
        if limit is not None and (type(limit) is not int or limit < 1):
            raise Parallel3dError(
                f"limit is {limit!r}; it must be an integer, at least 1, or None for no limit. For no "
                "prefetch at all: set_forward_prefetch(False), set_backward_prefetch(None)"
            )

        _change(self, "set_limit_all_gathers", limit=limit)

    # -- ending backwards by hand: for the outermost unit -----------------------------------------------

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether ``.grad`` gets what backwards have brought in ``finalize_backward()`` only.

        Backwards then issue their reductions and return without a wait for them, so that what is computed
        after a backward overlaps them too. With False, the default, each backward completes its own.

        With True call ``finalize_backward()`` before gradients are read. A step of an optimizer before it is
        an error, as is ``clip_grad_norm_``. ``zero_grad()`` before it clears what is in ``.grad`` by then,
        and not what is still to come.

        Raises:
            StateError: this is not the outermost unit; a backward is under way or not finalized yet; or the
                parameters are updated in backward (``step_in_backward``).
        """
        enabled = as_bool("enabled", enabled)
        unit = _outermost(self, "set_manual_backward_finalization")
        if enabled is unit.manual_finalization:
            return
        if enabled:
            refuse_accumulation(units_of(self, True), "set_manual_backward_finalization(True)")
        set_manual_finalization(unit, enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Completes what backwards since the last call have begun, after all of them.

        Sums that wait for their reduction (``set_requires_gradient_sync(False)``,
        ``set_requires_all_reduce(False)``) are reduced too, as the settings are now: those backwards need
        none after them that reduces. Before the first forward there is nothing to do.

        Args:
            async_op: only issue what is still to be issued, and return a handle: ``wait()`` on it before the
                gradients are used and before the next forward.

        Raises:
            StateError: this is not the outermost unit; ``set_manual_backward_finalization(True)`` was not
                called; a backward is under way; or a handle was not waited on.
        """
        async_op = as_bool("async_op", async_op)
        unit = _outermost(self, "finalize_backward")
        finalization = finalization_of(unit)
        if finalization is not None:
            unit.come_to_rest()
            finalization.begin()
        elif unit.context is not None:
            raise StateError(
                f"finalize_backward() of {unit.label!r}: each backward completes its own reductions; call "
                "set_manual_backward_finalization(True) before the backwards"
            )
        if async_op:
            return GradientReductionHandle(finalization)
        if finalization is not None:
            finalization.complete()
        return None


def _buckets(module: Any, recurse: bool) -> Iterable[Bucket]:
    return (bucket for unit in units_of(module, recurse) for bucket in unit.group.buckets)


def _is_hybrid(bucket: Bucket) -> bool:
    return bucket.axes.size(bucket.axes.replicate) > 1


def _outermost(module: object, method: str) -> Unit:
    unit = get_unit(module)
    if unit.context is not None and not unit.is_root:
        raise StateError(
            f"{method} was called on {unit.label!r}; call it on the outermost unit, "
            f"{unit.context.root.label!r}"
        )
    return unit


def _change(module: Any, method: str, **settings: Any) -> None:
    """Changes the prefetch settings of the root ``module``; usual ones are None."""
    unit = get_unit(module)
    context = unit.context
    if context is not None and not unit.is_root:
        raise StateError(
            f"{method} was called on {unit.label!r}; call it on the outermost unit, {context.root.label!r}"
        )
    changed = replace(unit.prefetch or PrefetchSettings(), **settings)
    unit.prefetch = None if changed == PrefetchSettings() else changed
    if context is not None:
        context.schedule.settings = changed


def _refs(direction: str, modules: Sequence[Any]) -> list | None:
    refs = []
    if not isinstance(modules, Iterable):
        raise Parallel3dError(
            f"set_modules_to_{direction}_prefetch was given {type(modules).__name__}; it takes a list of "
            "units, [] for the default"
        )
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise Parallel3dError(
                f"set_modules_to_{direction}_prefetch was given {type(module).__name__}, which is no unit; "
                "give modules that fully_shard was applied to"
            )
        refs.append(unit.ref)
    return refs or None
