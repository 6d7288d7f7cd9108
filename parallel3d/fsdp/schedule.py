"""GatherSchedule: when units are gathered ahead of their use, where the user wants it otherwise than usual.

As usual each unit's forward issues the next unit's all-gather, in the last iteration's order, and each
backward that of the unit before. A schedule says whether, when, and of how many at a time. What it decides
depends on the order of forwards and backwards alone, never on time: ranks issue the same gathers in the
same order.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

from torch.distributed.fsdp import BackwardPrefetch

from parallel3d.errors import StateError
from parallel3d.fsdp.group import GroupState
from parallel3d.fsdp.members import units_of

if TYPE_CHECKING:
    from parallel3d.fsdp.context import RunContext
    from parallel3d.fsdp.unit import Unit

__all__ = ["BackwardPrefetch", "GatherSchedule", "check_inner_schedules"]


class GatherSchedule:
    """Of one root; a context without one does the usual.

    Attributes:
        forward: whether forwards gather the next unit in order.
        backward: when backwards gather the one before: ahead of their own computation, after it, or never.
        limit: how many units may be gathered ahead of their use; None: all that are asked for.
    """

    def __init__(self) -> None:
        self.forward = True
        self.backward: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
        self.limit: int | None = None
        self._ahead: list[weakref.ref[Unit]] = []
        self._put_off: deque[weakref.ref[Unit]] = deque()

    @property
    def is_usual(self) -> bool:
        """Whether it asks for nothing but the usual."""
        usual = self.backward is BackwardPrefetch.BACKWARD_PRE
        return self.forward and usual and self.limit is None

    def copy(self) -> GatherSchedule:
        """The same for another root."""
        new = GatherSchedule()
        new.forward, new.backward, new.limit = self.forward, self.backward, self.limit
        return new

    # -- what the engine tells -----------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A forward of the root begins, or a backward: what the last one has put off, nobody wants."""
        self._put_off.clear()

    def begin_forward(self, unit: Unit, context: RunContext) -> None:
        """``unit`` is gathered and begins its forward."""
        self._use(unit, context)
        if self.forward or unit.forward_prefetch is not None:
            for each in context.next_in_forward(unit):
                self._ask_for(each, context)

    def begin_backward(self, unit: Unit, position: int, context: RunContext) -> None:
        """``unit`` is gathered and begins the backward of the forward at ``position``."""
        unit.backward_position = position
        self._use(unit, context)
        if self.backward is not BackwardPrefetch.BACKWARD_POST:
            self._prefetch_in_backward(unit, context)

    def end_backward(self, unit: Unit, context: RunContext) -> None:
        """The backward of ``unit`` is over, its parameters are freed, its reduction is still to be issued."""
        # Where ranks may use different parameters, backwards end in another order on each.
        if self.backward is BackwardPrefetch.BACKWARD_POST and not unit.reduce_unused:
            self._prefetch_in_backward(unit, context)

    # -- prefetches ----------------------------------------------------------------------------------

    def _prefetch_in_backward(self, unit: Unit, context: RunContext) -> None:
        if self.backward is not None or unit.backward_prefetch is not None:
            for each in context.next_in_backward(unit, unit.backward_position):
                self._ask_for(each, context)

    def _ask_for(self, unit: Unit, context: RunContext) -> None:
        if unit.group.state is GroupState.GATHERING or unit.ref in self._put_off:
            return
        self._put_off.append(unit.ref)
        self._issue(context)

    def _use(self, unit: Unit, context: RunContext) -> None:
        """``unit`` is no longer ahead of its use, and makes room for another."""
        if unit.ref in self._put_off:
            self._put_off.remove(unit.ref)
        self._issue(context)

    def _issue(self, context: RunContext) -> None:
        """Issues what was put off, in the order it was asked for, as long as there is room."""
        while self._put_off and self._has_room():
            unit = self._put_off.popleft()()
            if unit is None:
                continue
            unit.issue_unshard(context)
            if unit.group.state is GroupState.GATHERING:
                self._ahead.append(unit.ref)

    def _has_room(self) -> bool:
        self._ahead = [
            ref
            for ref in self._ahead
            if (unit := ref()) is not None and unit.group.state is GroupState.GATHERING
        ]
        return self.limit is None or len(self._ahead) < self.limit


def check_inner_schedules(root: Unit) -> None:
    """Raises if a unit inside ``root`` was given a schedule, as if it were the outermost one."""
    for module in root.modules:
        for unit in units_of(module, recurse=True):
            if unit.schedule is not None and unit is not root:
                raise StateError(
                    f"{unit.label!r} was given a schedule of gathers (set_backward_prefetch, "
                    f"set_forward_prefetch or set_limit_all_gathers), but it is inside {root.label!r}; call "
                    "the methods on the outermost unit"
                )
