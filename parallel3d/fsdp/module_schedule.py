"""ScheduleMethods: the methods of the root about when units are gathered ahead of their use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallel3d._arguments import as_bool
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.running.members import the_unit
from parallel3d.fsdp.running.schedule import BackwardPrefetch, GatherSchedule

__all__ = ["ScheduleMethods"]


class ScheduleMethods:
    """Mixed into ``FSDPModule``. For the outermost unit; they hold for all units below. All ranks must call
    them alike."""

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

        def change(schedule: GatherSchedule) -> None:
            schedule.backward = prefetch

        _change(self, "set_backward_prefetch", change)

    def set_forward_prefetch(self, enable: bool) -> None:
        """Whether a unit's forward gathers the next unit in the last iteration's order; True at first.

        What ``set_modules_to_forward_prefetch`` names is gathered in any case.

        Raises:
            Parallel3dError: neither True nor False.
            StateError: this is not the outermost unit.
        """
        enable = as_bool("enable", enable)

        def change(schedule: GatherSchedule) -> None:
            schedule.forward = enable

        _change(self, "set_forward_prefetch", change)

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

        def change(schedule: GatherSchedule) -> None:
            schedule.limit = limit

        _change(self, "set_limit_all_gathers", change)


def _change(module: Any, method: str, change: Callable[[GatherSchedule], None]) -> None:
    """Changes the schedule of the root ``module``; one that asks for the usual is none."""
    unit = the_unit(module)
    context = unit.context
    if context is not None and not unit.is_root:
        raise StateError(
            f"{method} was called on {unit.label!r}; call it on the outermost unit, {context.root.label!r}"
        )
    schedule = unit.schedule or GatherSchedule()
    change(schedule)
    unit.schedule = None if schedule.is_usual else schedule
    if context is not None:
        context.schedule = unit.schedule
