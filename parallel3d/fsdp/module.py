"""FSDPModule: the methods a module gains from ``fully_shard``.

Those about communication: ``module_comm``; about gathers ahead of their use: ``module_schedule``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from parallel3d._arguments import as_bool
from parallel3d._compat import no_frame_of_its_own
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.copying import copy_module
from parallel3d.fsdp.group import GroupState
from parallel3d.fsdp.module_comm import CommMethods
from parallel3d.fsdp.module_finalization import FinalizationMethods
from parallel3d.fsdp.module_schedule import ScheduleMethods
from parallel3d.fsdp.running.members import (
    UNIT_ATTRIBUTE,
    parameters_at_rest,
    the_unit,
    unit_of,
    units_of,
)
from parallel3d.fsdp.running.step_guard import refuse_accumulation
from parallel3d.fsdp.state import Unit
from parallel3d.fsdp.state_dict import saved_in_form
from parallel3d.fsdp.torch_state import TorchState, state_of
from parallel3d.fsdp.whole.other_form import check_not_shown

__all__ = ["FSDPModule", "UnshardHandle"]


class UnshardHandle(TorchUnshardHandle):
    """An ``unshard(async_op=True)`` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Waits until the unsharded parameters are in the module. Further calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.group.state is not GroupState.SHARDED:  # resharded meanwhile
            unit.group.unshard(unit.ready_context().comm)
            unit.group.show()


class FSDPModule(CommMethods, ScheduleMethods, FinalizationMethods, TorchFSDPModule):
    """Mixed into the class of every module that ``fully_shard`` was applied to.

    An instance of torch's class too, which its pipelining and others ask for; every method is our own.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the original class: what slicing a container module asks for is no unit."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    @no_frame_of_its_own
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A forward of the module. However it ends, its unit is at rest afterwards or waits for its backward:
        hooks of ``nn.Module`` see an ``Exception``, but no ``KeyboardInterrupt`` or ``SystemExit``.
        """
        unit = vars(self)[UNIT_ATTRIBUTE]
        depth = unit.depth
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            unit.leave_failed_forward(depth)
            raise

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
        unit = the_unit(self)
        context = unit.ready_context()
        if unit.order_check is not None:
            unit.order_check.at("unshard()", unit)
        unit.issue_unshard(context)
        unit.group.keep()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Puts this unit's sharded Parameters back and frees the unsharded ones. Not recursive."""
        unit = the_unit(self)
        if unit.is_shown_by_root:  # until the root's forward or backward ends
            unit.group.kept = False
            return
        unit.group.hide()
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
        the_unit(self).unshard_in_backward = unshard_in_backward

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted as torch has it; our gathers are asynchronous on every device in any case."""
        as_bool("async_op", async_op)

    # -- prefetch ------------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """The units to gather when this one's forward begins, instead of the next in last step's order.

        An empty list restores the default.
        """
        the_unit(self).forward_prefetch = _refs("forward", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """The units to gather when this one's backward begins, instead of the one before it.

        An empty list restores the default.
        """
        the_unit(self).backward_prefetch = _refs("backward", modules)

    def set_post_optim_event(self, event: Any) -> None:
        """An event recorded after the optimizer step, which the next forward's first gather waits for
        instead of all that the current stream has been given. Used once; set a new one each step.
        """
        unit = the_unit(self)
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
        unit = the_unit(self)
        if unit.context is not None and not unit.is_root:
            raise StateError(
                f"reset_iter_state was called on {unit.label!r}; call it on the outermost unit, "
                f"{unit.context.root.label!r}"
            )
        unit.ready_context().reset()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module.named_parameters``: the sharded ones, also after a backward that has failed."""
        the_unit(self).come_to_rest()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As ``nn.Module.named_modules``. Whatever reads parameters of a module around this one walks through
        here before it reads this one's.
        """
        the_unit(self).come_to_rest()
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, also after a backward that an exception ended, and while ``unshard()``
        shows other parameters than those that have the gradients.
        """
        unit = the_unit(self)
        unit.come_to_rest()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        inside = unit.context.units if unit.context is not None else units_of(self, recurse=True)
        if not any(each.group.shown for each in inside):
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
        unit = the_unit(self)
        unit.show_shards()
        save = functools.partial(super().state_dict, *args, **kwargs)  # type: ignore[misc]
        if unit.form is None:
            return save()
        destination = kwargs.get("destination", args[0] if args else None)
        return saved_in_form(self, save, destination)  # type: ignore[arg-type]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.load_state_dict``; with ``assign=True`` too the Parameters stay the same objects."""
        the_unit(self).come_to_rest()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Also where a module around this one loads: it comes here before it goes to the modules inside."""
        the_unit(self).show_shards()
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A unit of its own with the same weights, on the same mesh. Units inside are copied with it."""
        return copy_module(self, memo)  # type: ignore[arg-type]

    def _get_fsdp_state(self) -> TorchState:  # type: ignore[override]
        """What torch's own functions ask for."""
        return state_of(self)  # type: ignore[arg-type]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """``to``, ``double``, ``to_empty`` and the like: the new values move into the buckets."""
        unit = the_unit(self)
        check_not_shown(unit, "a conversion of the module")
        shown = unit.is_shown_by_root
        unit.group.hide()
        unit.group.reshard(unit.ready_context().comm)
        result = super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        # Of several modules given as a list one is converted after the other.
        unit.group.adopt(partly=len(unit.modules) > 1)
        if shown:
            unit.group.show()
        return result


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
