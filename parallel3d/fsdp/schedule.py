"""GatherSchedule: which unit is gathered when. Its input are forwards and backwards, its output are units.

This file imports no torch and reads no clock: equal events give equal gathers, so that all ranks issue theirs
in one order. The engine runs it, on streams and on asynchronous works; the planner's timeline and the
pictures of the documentation run it too.

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
    """When a unit's backward asks for the one before."""

    BEFORE = auto()  # before its own backward computes, so that the two overlap
    AFTER = auto()  # after it, when its own parameters are freed
    NEVER = auto()


@dataclass
class PrefetchSettings:
    """What the user has set for a root.

    Attributes:
        forward: whether forwards ask for the next unit in order.
        backward: see ``Prefetch``.
        limit: number of units that may be gathered ahead of their use; None: no limit.
    """

    forward: bool = True
    backward: Prefetch = Prefetch.BEFORE
    limit: int | None = None


class ScheduledUnits(Protocol):
    """What the schedule asks of the units."""

    def is_gathering(self, unit: Unit) -> bool:
        """Whether its all-gather is under way."""

    def may_be_next(self, unit: Unit) -> bool:
        """Whether it has parameters, and its backward has not begun."""

    def is_read_in_backward(self, unit: Unit) -> bool:
        """Whether its backward reads its parameters."""

    def named_in_forward(self, unit: Unit) -> Sequence[Unit] | None:
        """What the user has named to be gathered in its forward; None: the usual."""

    def named_in_backward(self, unit: Unit) -> Sequence[Unit] | None:
        """The same in its backward."""


class GatherSchedule:
    """Decides which units of one root are gathered next. After each event the caller gathers the unit that
    ``next`` returns, until ``next`` returns None.

    Attributes:
        order: units in the order of their forwards, this iteration.
        last_order: the same of the iteration before.
        deferred: (unit, position) of the backwards whose gathers were put off, each within the one before.
    """

    def __init__(self, units: ScheduledUnits, settings: PrefetchSettings) -> None:
        self.units = units
        self.settings = settings
        self.order: list[Unit] = []
        self.last_order: list[Unit] = []
        self.deferred: list[tuple[Unit, int]] = []
        self._positions: dict[Unit, int] = {}  # of the forwards whose backwards were begun last
        self._wanted: deque[Unit] = deque()
        self._ahead: list[Unit] = []

    # -- events --------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """A forward of the root begins."""
        self._wanted.clear()
        if self.order:
            self.last_order, self.order = self.order, []

    def begin_forward(self, unit: Unit) -> int:
        """``unit`` is gathered and begins a forward. Returns its position in the order of forwards."""
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
        """The first unit of a backward is reached: what forwards asked for, nobody wants any more."""
        self._wanted.clear()

    def begin_backward(self, unit: Unit, position: int, *, defer: bool = False) -> None:
        """``unit`` is gathered and begins the backward of the forward at ``position``.

        ``defer`` puts the gathers of the unit before off, until ``issue_deferred``.
        """
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
        """The gathers that were put off are wanted now."""
        deferred, self.deferred = self.deferred, []
        for each in deferred:
            self._ask_in_backward(*each)

    def end_backward(self, unit: Unit) -> None:
        """The backward of ``unit`` is over and its parameters are freed; its reduction comes next."""
        if self.settings.backward is Prefetch.AFTER:
            self._ask_in_backward(unit, self._positions.get(unit, 0))

    def end_backwards(self) -> None:
        """The backward is over, or has failed."""
        self.deferred = []

    def abandon(self) -> None:
        """After an exception: the iteration that broke off is not looked back at."""
        self.order.clear()
        self.deferred = []

    # -- gathers -------------------------------------------------------------------------------------

    def next(self) -> Unit | None:
        """The next unit to gather, in the order they were asked for, as long as there is room."""
        if not self._wanted:
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
        """``unit`` is no longer ahead of its use."""
        if unit in self._wanted:
            self._wanted.remove(unit)
