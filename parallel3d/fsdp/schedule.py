"""GatherSchedule: which unit is gathered when. Its input are forwards and backwards, its output are units.

This file imports no torch and reads no clock: equal events give equal gathers, so that all ranks issue theirs
in one order. The engine runs it, and so do the planner and the pictures of the documentation.

By default each unit's forward gathers the unit that came after it in the last iteration, and each backward
the unit whose forward came before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

Unit = Hashable
"""What the caller knows a unit by."""


class Prefetch(Enum):
    """When a unit's backward gathers the unit before it."""

    BEFORE = auto()  # before its own backward computes, so that the two overlap
    AFTER = auto()  # after it, when its own parameters are freed
    NEVER = auto()


@dataclass
class PrefetchSettings:
    """The user's prefetch settings for a root."""

    forward: bool = True  # whether forwards ask for the next unit in order
    backward: Prefetch = Prefetch.BEFORE
    limit: int | None = None  # of units that may be gathered ahead of their use; None: no limit


class ScheduledUnits(Protocol):
    """Questions about units that the schedule asks the engine, or whoever runs it."""

    def is_gathering(self, unit: Unit) -> bool:
        """Whether the unit's all-gather is issued and not finished."""

    def may_be_next(self, unit: Unit) -> bool:
        """Whether the unit has parameters and its backward has not begun."""

    def has_room(self, unit: Unit) -> bool:
        """Whether there is memory to gather the unit into, without freeing another one."""

    def is_read_in_backward(self, unit: Unit) -> bool:
        """Whether the unit's backward reads its parameters."""

    def named_in_forward(self, unit: Unit) -> Sequence[Unit] | None:
        """The units that ``set_modules_to_forward_prefetch`` has set for this one; None: the default."""

    def named_in_backward(self, unit: Unit) -> Sequence[Unit] | None:
        """The units that ``set_modules_to_backward_prefetch`` has set for this one; None: the default."""


class GatherSchedule:
    """Decides which unit under one root is prefetched next. The caller reports each event below, and then
    gathers the units that ``next`` returns, until it returns None."""

    def __init__(self, units: ScheduledUnits, settings: PrefetchSettings) -> None:
        self.units, self.settings = units, settings
        self.order: list[Unit] = []  # of their forwards, this iteration
        self.last_order: list[Unit] = []  # the same of the iteration before
        # Of the backwards whose gathers were put off, each within the one before: (unit, position).
        self.deferred: list[tuple[Unit, int]] = []
        self._positions: dict[Unit, int] = {}  # of the forwards whose backwards were begun last
        self._wanted: deque[Unit] = deque()
        self._ahead: list[Unit] = []

    # -- events --------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """Event: a forward of the root begins."""
        self._wanted.clear()
        if self.order:
            self.last_order, self.order = self.order, []

    def begin_forward(self, unit: Unit) -> int:
        """Event: a forward of ``unit`` begins, gathered. Returns its index in the order of forwards."""
        position = len(self.order)
        self.order.append(unit)
        self._use(unit)
        named = self.units.named_in_forward(unit)
        if named is not None:
            self._ask_for(named)
        elif self.settings.forward:
            last = self.last_order
            if position + 1 < len(last) and last[position] == unit:
                self._ask_for(last[position + 1 : position + 2])
        return position

    def begin_backwards(self) -> None:
        """Event: the root's backward begins. Prefetches that forwards have asked for are dropped."""
        self._wanted.clear()

    def begin_backward(self, unit: Unit, position: int, *, defer: bool = False) -> None:
        """Event: ``unit``, which is gathered, begins the backward of the forward with index ``position``.
        With ``defer`` its prefetch is put off until ``issue_deferred``."""
        # What another would have asked for begins by itself, unless that is around this one.
        self.deferred = [each for each in self.deferred if each[1] < position]
        self._use(unit)
        if defer:
            self.deferred.append((unit, position))
            return
        self.issue_deferred()
        if self.settings.backward is not Prefetch.AFTER:
            self._ask_in_backward(unit, position)
        else:
            self._positions[unit] = position

    def issue_deferred(self) -> None:
        """Event: the prefetches that ``begin_backward(defer=True)`` has put off may be issued."""
        deferred, self.deferred = self.deferred, []
        for each in deferred:
            self._ask_in_backward(*each)

    def end_backward(self, unit: Unit) -> None:
        """Event: the backward of ``unit`` is over and its parameters are freed; its reduction comes next."""
        if self.settings.backward is Prefetch.AFTER:
            self._ask_in_backward(unit, self._positions.get(unit, 0))

    def end_backwards(self) -> None:
        """Event: the root's backward is over, or has failed."""
        self.deferred = []

    def abandon(self) -> None:
        """Event: an exception has ended the iteration. Its order of forwards is forgotten."""
        self.order.clear()
        self.deferred = []

    # -- gathers -------------------------------------------------------------------------------------

    def next(self) -> Unit | None:
        """Returns the next unit to gather; None if there is none, or no memory, or the limit is reached."""
        if not self._wanted or not self.units.has_room(self._wanted[0]):
            return None
        if self.settings.limit is not None:
            self._ahead = [unit for unit in self._ahead if self.units.is_gathering(unit)]
            if len(self._ahead) >= self.settings.limit:
                return None
            self._ahead.append(self._wanted[0])
        return self._wanted.popleft()

    def _ask_in_backward(self, unit: Unit, position: int) -> None:
        named = self.units.named_in_backward(unit)
        if named is not None:
            self._ask_for([each for each in named if self.units.is_read_in_backward(each)])
        elif self.settings.backward is not Prefetch.NEVER:
            for before in reversed(self.order[:position]):
                # A unit within the one before was asked for when the unit around this one began.
                if self.units.may_be_next(before) and not self._is_ahead(before):
                    if self.units.is_read_in_backward(before):
                        self._ask_for((before,))
                    return

    def _ask_for(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if not self._is_ahead(unit):
                self._wanted.append(unit)

    def _is_ahead(self, unit: Unit) -> bool:
        return unit in self._wanted or self.units.is_gathering(unit)

    def _use(self, unit: Unit) -> None:
        """Removes ``unit``, which is used now, from the units to prefetch."""
        if unit in self._wanted:
            self._wanted.remove(unit)
