"""FSDPModule: the methods that ``fully_shard`` adds to a module."""

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

from parallel3d._torch.fully_shard import fully_shard_state
from parallel3d._util.arguments import as_bool, as_count, is_positive
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.copying import copy_module
from parallel3d.fsdp.group import Retain
from parallel3d.fsdp.interop import RefusesDdp, TorchState, unit_given
from parallel3d.fsdp.members import get_unit, parameters_at_rest, units_of
from parallel3d.fsdp.options import comm_hooks
from parallel3d.fsdp.options.checks import fill_from_meta, refuse_accumulation
from parallel3d.fsdp.options.finalization import (
    Finalization,
    finalization_of,
    set_manual_finalization,
)
from parallel3d.fsdp.options.memory import set_static_memory
from parallel3d.fsdp.reduction import DEFAULT_REDUCER
from parallel3d.fsdp.schedule import Prefetch, PrefetchSettings
from parallel3d.fsdp.state_dict.full_params import check_not_swapped
from parallel3d.fsdp.state_dict.state_dicts import state_dict_as_set
from parallel3d.fsdp.unit import Unit, UnitModule
from parallel3d.fsdp.watch import explain_load

_TorchHandle: type = getattr(torch_fsdp, "GradientReductionHandle", object)


class GradientReductionHandle(_TorchHandle):
    """What ``finalize_backward(async_op=True)`` returns."""

    def __init__(self, finalization: Finalization | None) -> None:
        self._finalization = finalization
        self._number = 0 if finalization is None else finalization.number

    def wait(self) -> None:
        """Waits until the reduced gradients are in ``.grad``. Further calls do nothing.

        Raises:
            StateError: ``reset_iter_state()`` has dropped the reductions.
        """
        finalization, self._finalization = self._finalization, None
        if finalization is not None:
            finalization.wait(self._number)


class UnshardHandle(TorchUnshardHandle):
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Waits until the unsharded parameters are registered in the module. Further calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is not None and not unit.group.is_sharded:  # not if resharded meanwhile
            unit.group.unshard(unit.ready_context().comm)
            unit.group.register_unsharded()


class FSDPModule(UnitModule, TorchFSDPModule):
    """Base class that ``fully_shard`` adds to the class of each module it is applied to.

    It derives from torch's ``FSDPModule`` so that ``isinstance`` checks pass, but overrides every method.
    Methods for the outermost unit affect all units inside, and raise a StateError on others. All ranks must
    call methods alike. ``recurse``, where a method has it, says whether units inside are changed too.

    The engine *notices* changes of the weights by optimizer steps and in-place operations on the sharded
    Parameters (also ``load_state_dict``). It does not notice changes of ``param.data``, nor by
    ``torch._foreach_*`` functions outside of an optimizer, as some EMA implementations make them, but for
    ``param.data = tensor``.
    """

    _ddp_params_and_buffers_to_ignore = RefusesDdp()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object of the original class, which is no unit: slicing a container module calls this."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    # -- unshard / reshard ---------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gathers this unit's parameters and registers them in the module until ``reshard()``.

        It does not recurse into other units. Forward and backward reshard the unit too, as
        ``reshard_after_forward`` and ``set_reshard_after_backward`` say. Until then forwards use the gathered
        values, or gather again if a change of the weights was noticed. Changes of the unsharded parameters
        would be lost when they are freed: these calls raise StateError then.

        Args:
            async_op: return a handle at once; call its ``wait()`` before the parameters are used.
        """
        unit = get_unit(self)
        context = unit.ready_context()
        for option in unit.options:
            option.unshard(unit)
        unit.issue_unshard(context)
        unit.group.retain = Retain.USER
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Registers this unit's sharded Parameters and frees the unsharded ones. It does not recurse.

        Raises:
            StateError: an unsharded parameter was changed, and the change is lost.
        """
        unit = get_unit(self)
        if unit.is_registered_by_root:  # until the root's forward or backward ends
            unit.group.retain = Retain.NO
            return
        unit.group.register_sharded()
        try:
            unit.group.check_unwritten()
        finally:
            unit.group.reshard(unit.ready_context().comm)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Sets whether resharding keeps the memory of the unsharded parameters, at the same address.

        This is for code that has recorded the address, such as a captured CUDA graph. Each unshard still
        gathers into the memory, and a backward must not read it while the unit is sharded. The default is
        False, which also frees memory that is kept now.
        """
        for unit in units_of(self, recurse):
            unit.group.keep_storage(as_bool("keep", keep))

    def set_static_memory(self, static: bool) -> None:
        """Sets whether this unit and all units inside allocate their buffers once, at fixed addresses.

        Call it before the first forward. Units that are resharded after forward share buffers in turn; see
        ``docs/engine.md``.

        Raises:
            Parallel3dError: a unit has parameters with an all-gather extension, or a custom collective.
            StateError: a unit has run already.
        """
        set_static_memory(units_of(self, recurse=True), as_bool("static", static))

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether forward frees the unsharded parameters, so that backward gathers them again.

        With False backward uses the values that forward has gathered. The next forward gathers again; see
        ``set_keep_between_forwards``.
        """
        for unit in units_of(self, recurse):
            unit.reshard_after_forward = as_bool("reshard_after_forward", reshard_after_forward)

    def set_keep_between_forwards(self, keep: bool, *, recurse: bool = True) -> None:
        """Sets whether forwards without a backward (evaluation, generation) reuse gathered parameters.

        It affects units with ``reshard_after_forward=False``, and HFSDP's copy of the weights, also in
        training. False, the default: each forward of the root gathers again, so it uses the current weights
        however they were changed. True saves these all-gathers unless a change of the weights is noticed: run
        one forward with False after other changes.
        """
        for unit in units_of(self, recurse):
            unit.keep_between_forwards = as_bool("keep", keep)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backward frees the unsharded parameters. False saves the next all-gather.

        The next forward gathers again only if a change of the weights was noticed: before a change that is
        not noticed, run a backward with True.
        """
        for unit in units_of(self, recurse):
            unit.reshard_after_backward = as_bool("reshard_after_backward", reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether backward gathers this unit; use False if it reads no parameters (an embedding)."""
        get_unit(self).unshard_in_backward = as_bool("unshard_in_backward", unshard_in_backward)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Does nothing: all-gathers here are asynchronous on every device. torch has this method."""
        as_bool("async_op", async_op)

    # -- prefetch ------------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """Sets the units to gather, in this order, when this unit's forward begins.

        An empty list restores the default, the unit that ran next in the previous iteration.
        """
        get_unit(self).forward_prefetch = _refs("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """Sets the units to gather, in this order, when this unit's backward begins.

        An empty list restores the default, the unit that ran before this one.
        """
        get_unit(self).backward_prefetch = _refs("backward", modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Sets an event that the next forward's first all-gather waits for, instead of the current stream.

        Record it after the optimizer step, and set a new one in each step: it is used once.
        """
        unit = get_unit(self)
        root = unit if unit.context is None else unit.context.root
        root.post_optim_event = event

    # -- accumulation --------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing: each backward here waits for its reductions, on an accelerator by events."""
        as_bool("is_last_backward", is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backward reduces gradients, over shard and replicate together.

        With False this rank's unreduced sum is accumulated in ``.grad`` (a DTensor with ``Partial()``
        placements) until the next backward with True; ``zero_grad()`` clears it.
        """
        requires_gradient_sync = as_bool("requires_gradient_sync", requires_gradient_sync)
        if not requires_gradient_sync:
            refuse_accumulation(units_of(self, recurse), "set_requires_gradient_sync(False)")
        for unit in units_of(self, recurse):
            unit.sync = unit.all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backward all-reduces gradients over the replicate axis (HSDP).

        With False gradients are reduce-scattered over shard and accumulated in ``.grad``, with ``Partial()``
        on replicate, until the next backward with True.
        """
        requires_all_reduce = as_bool("requires_all_reduce", requires_all_reduce)
        if not requires_all_reduce:
            refuse_accumulation(units_of(self, recurse), "set_requires_all_reduce(False)")
        for unit in units_of(self, recurse):
            unit.all_reduce = requires_all_reduce

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backwards reduce nothing, as with ``set_requires_gradient_sync(False)``.

        It affects this unit and those inside it, and may be nested. On exit, also by an exception, the
        previous settings are restored.
        """
        before = [(unit, unit.sync, unit.all_reduce) for unit in units_of(self, recurse=True)]
        for unit, _, _ in before:
            unit.sync = unit.all_reduce = False
        try:
            yield
        finally:
            for unit, sync, all_reduce in before:
                unit.sync, unit.all_reduce = sync, all_reduce

    # -- methods of nn.Module ------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Makes the model usable again after an exception in forward or backward; for the outermost unit.

        It waits for collectives in flight and reshards every unit. Accumulated sums that are not reduced yet
        are dropped; reduced gradients stay in ``.grad``, so call ``zero_grad()`` to restart the step.
        """
        _outermost(self, "reset_iter_state").ready_context().abandon(backward_only=False)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Like ``nn.Module.named_parameters``: the sharded Parameters, also after a failed backward."""
        get_unit(self).come_to_rest()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Like ``nn.Module.named_modules``.

        It also reshards units that a failed backward has left unsharded: ``named_parameters`` of a module
        around this one calls it before it reads this unit's parameters.
        """
        get_unit(self).come_to_rest()
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like ``nn.Module.zero_grad``, for the sharded Parameters.

        It also works after a failed backward, and while ``unshard()`` has registered other Parameters.
        """
        unit = get_unit(self)
        unit.come_to_rest()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        inside = unit.context.units if unit.context is not None else units_of(self, recurse=True)
        if not any(inner.group.is_registered for inner in inside):
            return
        seen = self.parameters()  # type: ignore[attr-defined]
        for param in set(parameters_at_rest(self)).difference(seen):  # type: ignore[arg-type]
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``nn.Module.state_dict``: sharded Parameters under the plain model's names.

        ``fsdp.set_state_dict_type`` changes the type. Unless a forward is running, units unsharded by
        ``unshard()`` are resharded first.
        """
        unit = get_unit(self)
        unit.show_shards()
        save = functools.partial(super().state_dict, *args, **kwargs)  # type: ignore[misc]
        # A DTensor can't be detached in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if unit.form is None:
                return save()
            destination = kwargs.get("destination", args[0] if args else None)
            return state_dict_as_set(self, save, destination)  # type: ignore[arg-type]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``nn.Module.load_state_dict``. Parameters stay the same objects, also with ``assign=True``."""
        get_unit(self).come_to_rest()
        try:
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            given = args[0] if args else kwargs["state_dict"]
            message = explain_load(self, given, error)  # type: ignore[arg-type]
            if message is None:
                raise
            raise StateError(message) from error

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Registers the sharded Parameters first; loading a module around this one calls only this."""
        get_unit(self).show_shards()
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns a copy with units of its own, with the same weights and on the same mesh."""
        return copy_module(self, memo)  # type: ignore[arg-type]

    def _get_fsdp_state(self) -> TorchState:  # type: ignore[override]
        """Returns the ``TorchState``, on which torch's own functions for FSDP modules work."""
        return fully_shard_state(self)  # type: ignore[arg-type]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Implements ``to``, ``double``, ``to_empty`` and the like; copies new values into the buckets."""
        unit = get_unit(self)
        check_not_swapped(unit, "a conversion of the module")
        registered = unit.is_registered_by_root
        unit.group.register_sharded()
        unit.group.reshard(unit.ready_context().comm)
        convert = functools.partial(super(TorchFSDPModule, self)._apply, fn, recurse)  # type: ignore[misc]
        with torch.inference_mode(False), torch.no_grad():  # they could not be trained later
            result = fill_from_meta(unit, convert)
        # Several modules of one unit are converted one after another.
        unit.group.adopt(partly=len(unit.modules) > 1)
        if registered:
            unit.group.note_changes()
            unit.group.register_unsharded()
        return result

    # -- the user's collectives and hooks ------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Sets the collective that all-gathers parameters, in buffers that it allocates.

        Args:
            comm: an ``AllGather`` of ``torch.distributed.fsdp``, or any object with ``allocate(size, *,
                dtype, device)``, which must return memory that is not in use, and ``__call__(output_tensor,
                input_tensor, group, async_op)``, which may return a work. The input is a part of the
                output. None: the default.

        Raises:
            Parallel3dError: ``comm`` lacks these methods, or the unit has parameters on several meshes.
            StateError: the buffers already come from another allocator.
        """
        unit = get_unit(self)
        present = attrgetter("settings.gather_comm")
        comm_hooks.check_custom(unit, "set_custom_all_gather", comm, present)
        for bucket in unit.group.buckets:
            bucket.change(gather_comm=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Sets the collective that reduce-scatters gradients; see ``set_custom_all_gather``.

        It is also called with ``op``, which is always a sum: the engine divides afterwards.
        """
        unit = get_unit(self)
        present = comm_hooks.custom_reduce_scatter
        comm_hooks.check_custom(unit, "set_custom_reduce_scatter", comm, present)
        for bucket in unit.group.buckets:
            if comm is not None or present(bucket) is not None:
                comm_hooks.set_reduce_scatter(bucket, comm)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None
    ) -> None:
        """Sets a function that is called with each reduced and divided flat gradient, to change it in place.

        That is the result of the reduce-scatter, or with HSDP of the all-reduce, in each backward that runs
        this collective.

        Args:
            hook: the function; None removes it.
            stream: the accelerator stream to run it on. With HSDP it must be None: the hook then runs on the
                stream of the all-reduce.

        Raises:
            Parallel3dError: ``hook`` is not callable, ``stream`` was given with HSDP, or the unit has
                parameters on several meshes.
        """
        unit = get_unit(self)
        comm_hooks.check_one_mesh(unit, "set_all_reduce_hook")
        if hook is not None and not callable(hook):
            raise Parallel3dError(
                f"set_all_reduce_hook was given {hook!r}; it takes a function of one tensor, or None"
            )
        buckets = unit.group.buckets
        if stream is not None and any(b.axes.size(b.axes.replicate) > 1 for b in buckets):
            raise Parallel3dError(
                "set_all_reduce_hook was given a stream, but the mesh has a replicate axis: the hook runs on "
                "the stream of its all-reduce"
            )
        for bucket in buckets:
            on_result = () if hook is None else (comm_hooks.AllReduceHook(hook, stream),)
            bucket.change(on_result=on_result)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any] | None) -> None:
        """Reduces gradients by ``hook``, in this unit and all units inside, as in FSDP1.

        ``hook(state, grad, output)`` replaces the reduce-scatter over the n shard ranks: ``grad`` is flat,
        (n * S,), and ``output``, (S,), receives this rank's shard. ``hook(state, grad)``, in place, replaces
        each all-reduce: over replicate, of the reduce-scatter's result; over shard too, for parameters that
        are not sharded (scalars). Tensors have the reduce dtype. A hook may return an object with ``wait()``
        that completes its result.

        The hook must divide by itself and should average over the ranks of each call: a reduced gradient to
        which a later backward without sync adds is reduced again.

        Args:
            state: passed to the hook. A ``CommHookState`` knows the process group of each call.
            hook: such as ``bf16_compress_hook``; None removes it.

        Raises:
            Parallel3dError: ``hook`` can't be called so, or ``state`` is for other ranks.
            StateError: a unit already has a hook, a divide factor or a custom reduce-scatter, or a gradient
                waits for its all-reduce.
        """
        buckets = list(_buckets(self, True))
        for bucket in buckets:
            if hook is None:
                comm_hooks.check_removal(bucket)
            else:
                comm_hooks.check_hook(bucket, state, hook)
        reducer = DEFAULT_REDUCER if hook is None else comm_hooks.HookedReduce(state, hook)
        for bucket in buckets:
            if hook is not None or isinstance(bucket.settings.reducer, comm_hooks.HookedReduce):
                bucket.change(reducer=reducer)

    # -- gradient reduction --------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Sets the number that the sum of the ranks' gradients is divided by.

        Accumulated sums are divided by the factor of the backward that reduces them over shard. It works on
        every backend.

        Args:
            factor: the divisor. None, the default: the number of data ranks.

        Raises:
            Parallel3dError: ``factor`` is not a positive number.
            StateError: an accumulated sum contains gradients that were divided already, or the unit has a
                communication hook, which divides by itself.
        """
        if factor is not None and not is_positive(factor):
            raise Parallel3dError(
                f"factor is {factor!r}; it must be a positive number, or None for the number of ranks"
            )
        unit = get_unit(self)
        for bucket in unit.group.buckets:
            if factor is not None:
                comm_hooks.check_not_hooked("set_gradient_divide_factor", bucket)
            if bucket.settings.divide_factor != factor and bucket.grads.sums.holds_reduced:
                raise StateError(
                    f"unit {unit.label}: .grad holds an unreduced sum of gradients already divided by "
                    f"{bucket.divisor}; set the factor before the first backward, or after zero_grad()"
                )
        for bucket in unit.group.buckets:
            bucket.change(divide_factor=factor)

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated; see ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """With True the collectives of gradients are plain sums, and a separate kernel scales the gradients.
        With False NCCL's reduce-scatter scales while it sums, unless that would round more often.

        With True ``set_symm_mem_for_comm`` uses symmetric memory for the reduce-scatter too.
        """
        enable = as_bool("enable", enable)
        for bucket in get_unit(self).group.buckets:
            bucket.change(force_sum=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether parameters without a gradient are reduced as zeros.

        With True ranks may use different parameters: ``.grad`` is set on every rank, and reductions keep the
        model's order.
        """
        unused = as_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in units_of(self, recurse):
            unit.reduce_unused = unused and bool(unit.group.buckets)
            for bucket in unit.group.buckets:
                bucket.change(reduce_unused=unused)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Sets how many inputs of reduce-scatters may be in flight; the default is 1.

        With more, backward goes on while a slow reduce-scatter still reads its input. The largest number
        among a model's units applies to all.
        """
        max_input_buffers = as_count("max_input_buffers", max_input_buffers, 1)
        units = list(units_of(self, recurse))
        buckets = [bucket for unit in units for bucket in unit.group.buckets]
        for bucket in buckets:
            comm = comm_hooks.custom_reduce_scatter(bucket)
            symmetric = isinstance(comm, comm_hooks.EngineCollective) and comm.symmetric
            comm_hooks.check_symmetric_inputs(symmetric, max_input_buffers)
        for bucket in buckets:
            bucket.change(max_inputs=max_input_buffers)
        for context in dict.fromkeys(u.context for u in units if u.context is not None):
            context.limit_inputs()

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Sets whether reduce-scatters use another process group than all-gathers, to run beside them.

        All ranks must call it alike. Units that shard over the same ranks share the group.
        """
        enable = as_bool("enable", enable)
        for bucket in _buckets(self, recurse):
            group = bucket.shard_group
            if group is None:
                continue
            separate = comm_hooks.separate_group(bucket, group) if enable else None
            bucket.change(scatter_group=separate)
            comm = comm_hooks.custom_reduce_scatter(bucket)
            if isinstance(comm, comm_hooks.EngineCollective):
                comm = comm_hooks.EngineCollective(separate or group, symmetric=comm.symmetric)
                comm_hooks.set_reduce_scatter(bucket, comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Sets whether the buffers of this unit's collectives come from the process group's allocator.

        Raises:
            Parallel3dError: the backend has no allocator.
            StateError: the unit has custom collectives.
        """
        enable = as_bool("enable", enable)
        method = "set_allocate_memory_from_process_group_for_comm"
        buckets = comm_hooks.communicating(get_unit(self), method, symmetric=False)
        for bucket in buckets if enable else ():
            comm_hooks.check_group_memory(method, bucket)
        for bucket in buckets:
            if enable:
                comm_hooks.set_engine_collectives(bucket, symmetric=False, reduces=True)
            else:
                bucket.change(gather_comm=None)
                comm_hooks.set_reduce_scatter(bucket, None)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """All-gathers into symmetric memory.

        After ``set_force_sum_reduction_for_comms(True)`` reduce-scatters use it too.
        ``set_custom_all_gather(None)`` and ``set_custom_reduce_scatter(None)`` undo it.

        Raises:
            Parallel3dError: ``backend`` is not "NCCL", or the process groups don't use NCCL.
            StateError: the unit has custom collectives.
        """
        if backend != "NCCL":
            raise Parallel3dError(f"backend is {backend!r}; symmetric memory needs 'NCCL'")
        method = "set_symm_mem_for_comm"
        buckets = comm_hooks.communicating(get_unit(self), method, symmetric=True)
        for bucket in buckets:
            comm_hooks.check_symmetric(bucket)
            comm_hooks.check_symmetric_inputs(bucket.settings.force_sum, bucket.settings.max_inputs)
        for bucket in buckets:
            sums = bucket.settings.force_sum
            comm_hooks.set_engine_collectives(bucket, symmetric=True, reduces=sums)

    # -- prefetch settings of the outermost unit -----------------------------------------------------

    def set_backward_prefetch(self, prefetch: BackwardPrefetch | None) -> None:
        """Sets when a unit's backward gathers the unit before it.

        Args:
            prefetch: ``BACKWARD_PRE``, the default: before its own backward computes, so that the gather
                overlaps the computation; two units are unsharded at a time. ``BACKWARD_POST``: after it,
                when its own parameters are freed and before its gradients are reduced; one unit is
                unsharded at a time. None: no prefetch. Units given to ``set_modules_to_backward_prefetch``
                are gathered in any case, with None as with ``BACKWARD_PRE``.

        Raises:
            Parallel3dError: ``prefetch`` is none of these.
        """
        if prefetch is not None and not isinstance(prefetch, BackwardPrefetch):
            raise Parallel3dError(
                f"backward_prefetch is {prefetch!r}; it must be BackwardPrefetch.BACKWARD_PRE, "
                "BackwardPrefetch.BACKWARD_POST, or None for no prefetch"
            )
        when = Prefetch.NEVER if prefetch is None else Prefetch.BEFORE
        when = Prefetch.AFTER if prefetch is BackwardPrefetch.BACKWARD_POST else when
        _change_prefetch(self, "set_backward_prefetch", backward=when)

    def set_forward_prefetch(self, enable: bool) -> None:
        """Sets whether a unit's forward gathers the unit that ran next in the last iteration; default True.

        Units given to ``set_modules_to_forward_prefetch`` are gathered in any case.
        """
        _change_prefetch(self, "set_forward_prefetch", forward=as_bool("enable", enable))

    def set_limit_all_gathers(self, limit: int | None) -> None:
        """Sets how many units may be gathered ahead of their use.

        A further prefetch is deferred until one of these units is used; on an accelerator, however far the
        CPU runs ahead, it waits for the computation issued before it. Units that the user unshards don't
        count.

        Args:
            limit: at least 1. None, the default: no limit besides the number of units to prefetch.

        Raises:
            Parallel3dError: ``limit`` is no such number.
        """
        if limit is not None and (type(limit) is not int or limit < 1):
            raise Parallel3dError(
                f"limit is {limit!r}; it must be an integer, at least 1, or None for no limit; for no "
                "prefetch at all: set_forward_prefetch(False), set_backward_prefetch(None)"
            )
        _change_prefetch(self, "set_limit_all_gathers", limit=limit)

    # -- manual finalization of backwards, for the outermost unit ------------------------------------

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Sets whether gradients reach ``.grad`` only in ``finalize_backward()``.

        With True backwards issue their reductions and return without waiting for them, so that computation
        after a backward overlaps them. Call ``finalize_backward()`` before gradients are read: an optimizer
        step or ``clip_grad_norm_`` before it is an error, and ``zero_grad()`` before it clears only what is
        already in ``.grad``. With False, the default, each backward completes its own reductions.

        Raises:
            StateError: a backward is running or not finalized yet, or the parameters are updated in backward
                (``step_in_backward``).
        """
        enabled = as_bool("enabled", enabled)
        unit = _outermost(self, "set_manual_backward_finalization")
        if enabled is unit.manual_finalization:
            return
        if enabled:
            refuse_accumulation(units_of(self, True), "set_manual_backward_finalization(True)")
        set_manual_finalization(unit, enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Completes the reductions of all backwards since the last call.

        Sums accumulated with ``set_requires_gradient_sync(False)`` or ``set_requires_all_reduce(False)`` are
        reduced too, as the settings are now. Before the first forward it does nothing.

        Args:
            async_op: only issue the remaining reductions and return a handle; call its ``wait()`` before the
                gradients are used and before the next forward.

        Raises:
            StateError: ``set_manual_backward_finalization(True)`` was not called, a backward is running, or
                an earlier handle was not waited on.
        """
        async_op = as_bool("async_op", async_op)
        unit = _outermost(self, "finalize_backward")
        finalization = finalization_of(unit)
        if finalization is not None:
            unit.come_to_rest()
            finalization.begin()
        elif unit.context is not None:
            raise StateError(
                f"finalize_backward() was called on {unit.label!r}, whose backwards complete their own "
                "reductions; call set_manual_backward_finalization(True) before the backwards"
            )
        if async_op:
            return GradientReductionHandle(finalization)
        if finalization is not None:
            finalization.complete()
        return None


def _buckets(module: Any, recurse: bool) -> Iterable[Bucket]:
    return (bucket for unit in units_of(module, recurse) for bucket in unit.group.buckets)


def _outermost(module: object, method: str) -> Unit:
    unit = get_unit(module)
    if unit.context is not None and not unit.is_root:
        raise StateError(
            f"{method} was called on {unit.label!r}; call it on the outermost unit, "
            f"{unit.context.root.label!r}"
        )
    return unit


def _change_prefetch(module: Any, method: str, **settings: Any) -> None:
    unit = _outermost(module, method)
    changed = replace(unit.prefetch or PrefetchSettings(), **settings)
    unit.prefetch = None if changed == PrefetchSettings() else changed  # None: the defaults
    if unit.context is not None:
        unit.context.schedule.settings = changed


def _refs(direction: str, modules: Sequence[Any]) -> list | None:
    method = f"set_modules_to_{direction}_prefetch"
    if not isinstance(modules, Iterable):
        raise Parallel3dError(
            f"{method} was given {type(modules).__name__}; it takes a list of units, [] for the default"
        )
    return [unit_given(method, module).ref for module in modules] or None
