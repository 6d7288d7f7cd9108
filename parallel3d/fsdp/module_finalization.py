"""FinalizationMethods: ``finalize_backward`` and the switch for it; torch has them since 2.15."""

from __future__ import annotations

from torch.distributed import fsdp as torch_fsdp

from parallel3d._arguments import as_bool
from parallel3d.errors import StateError
from parallel3d.fsdp.running.finalization import Finalization
from parallel3d.fsdp.running.members import the_unit, units_of
from parallel3d.fsdp.running.step_guard import refuse_accumulation
from parallel3d.fsdp.state import Unit

__all__ = ["FinalizationMethods", "GradientReductionHandle"]

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


class FinalizationMethods:
    """Mixed into ``FSDPModule``. For the outermost unit; they hold for all units below. All ranks must call
    them alike."""

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
        if unit.context is not None:
            unit.context.set_manual_finalization(enabled)
        unit.manual_finalization = enabled

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
        finalization = None if unit.context is None else unit.context.finalization
        if finalization is not None:
            unit.come_to_rest()
            finalization.begin()
        if async_op:
            return GradientReductionHandle(finalization)
        if finalization is not None:
            finalization.complete()
        return None


def _outermost(module: object, method: str) -> Unit:
    unit = the_unit(module)
    if unit.context is not None and not unit.is_root:
        raise StateError(
            f"{method} was called on {unit.label!r}; call it on the outermost unit, "
            f"{unit.context.root.label!r}"
        )
    return unit
