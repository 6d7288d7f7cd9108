"""Timeouts of collectives by phase: long for start-up and checkpoints, short for steps."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from parallel3d._torch.groups import all_groups, group_timeout, set_group_timeout
from parallel3d._util.trace import issuing
from parallel3d._util.users_code import is_users
from parallel3d.errors import Parallel3dError
from parallel3d.mesh.agreement import check_agreement
from parallel3d.mesh.store import others


class Position:
    """Where this rank is in its training: step, micro-batch and phase, as hooks count them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.step = 0  # optimizer steps so far; of several optimizers the largest number
        self.phase = "start"  # until the first step is over, or what ``guards.phase`` has set
        self.forwards = issuing.forwards  # after the last step
        self.usual = 0  # forwards with a gradient in the last step
        self._begun = issuing.forwards, issuing.runs
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    @property
    def micro_batch(self) -> int:
        """The current micro-batch's number, from 1: forwards with a gradient since the last step."""
        return issuing.forwards - self.forwards

    @property
    def runs(self) -> tuple[int, int]:
        """How many forwards models have begun, (with a gradient, without)."""
        forwards = issuing.forwards - self._begun[0]
        return forwards, issuing.runs - self._begun[1] - forwards

    def stepped(self, optimizer: Optimizer) -> None:
        self._steps[optimizer] = count = self._steps.get(optimizer, 0) + 1
        self.step = max(self.step, count)
        self.usual = self.micro_batch
        self.forwards = issuing.forwards

    def __str__(self) -> str:
        """Returns a text such as ``step 3, unit layers.1, phase step``; steps count from 1."""
        unit = f", unit {issuing.unit}" if issuing.unit else ""
        return f"step {self.step + 1}{unit}, phase {self.phase}"


here = Position()
"""The progress of this rank."""


def stack_of(thread: int) -> str:
    """Returns a text with the innermost three functions that ``thread`` (its id) runs, innermost first,
    without torch and Python's library."""
    innermost = sys._current_frames().get(thread)
    frames = [] if innermost is None else traceback.walk_stack(innermost)
    own = [
        f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
        for frame, line in frames
        if is_users(frame, ours=True)
        and not frame.f_globals.get("__name__", "").startswith(_GUARDS)
    ]
    return ", called by ".join(own[:3]) or "unknown"


_GUARDS = "parallel3d.guards."

# Functions around the one that the user calls; of modules, which are called, forward.
_AROUND = {"wrapper": "", "inner": "", "decorate_context": "", "told": ""}
_AROUND |= {"__call__": "forward", "_wrapped_call_impl": "forward"}


def users_frame(innermost: FrameType | None) -> tuple[FrameType | None, str]:
    """Returns the innermost frame of the user's program at or around ``innermost``, and the name of the
    function that it calls."""
    called = ""
    while innermost is not None and not is_users(innermost):
        name = innermost.f_code.co_name
        innermost = innermost.f_back
        called = _AROUND.get(name, name) or called
    return innermost, called


def check_duration(name: str, value: object, *, or_none: bool = False) -> None:
    """Raises Parallel3dError unless ``value`` is a positive timedelta, or None if that is allowed."""
    if value is None and or_none:
        return
    if not (isinstance(value, timedelta) and value > timedelta(0)):
        raise Parallel3dError(
            f"{name} is {value!r}; it must be a positive datetime.timedelta, such as "
            f"timedelta(seconds=100){', or None' if or_none else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long a collective may take in each phase of a job; None leaves the groups' timeouts.

    Attributes:
        start: limit until the first optimizer step is over, while compilers and caches are cold.
        step: limit after that.
        save: limit within ``phase("save")``, and always for the collectives of ``parallel3d.checkpoint``,
            which may run in the background of steps.

    Raises:
        Parallel3dError: a limit is not a positive ``datetime.timedelta``.
    """

    start: timedelta | None = None
    step: timedelta | None = None
    save: timedelta | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_duration(f"Timeouts: {name}", value, or_none=True)


class Schedule:
    """Sets the process groups' timeouts for one ``watch``, by phase."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._before: dict[ProcessGroup, timedelta] = {}

    def begin(self) -> None:
        """Sets the timeout of phase ``start``, once there are groups; keeps the earlier ones for ``end``."""
        if not self._before and others() is not None:
            self._before = {group: group_timeout(group) for group in all_groups()}
            _set_all(self.timeouts.start)
            for group in _for_saving:
                self.set_save(group)

    def set_save(self, group: ProcessGroup) -> None:
        """Sets the timeout of phase ``save`` for ``group``."""
        if self.timeouts.save is not None:
            set_group_timeout(group, self.timeouts.save)

    def change(self, name: str) -> None:
        """Sets the timeout of phase ``name``, which all ranks enter.

        Before a timeout gets shorter ranks wait for each other. Otherwise a rank could time out while it
        waits for one that is still in the phase with the longer timeout.
        """
        new = vars(self.timeouts).get(name)
        if new is None or others() is None:
            return
        now = max(group_timeout(group) for group in all_groups())
        if new < now:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            check_agreement("timeouts", {"phase": name}, timeout=now)
        _set_all(new)

    def end(self) -> None:
        """Restores the timeouts of the groups that existed before the watch."""
        alive = set(all_groups() if others() is not None else ())
        for group, timeout in self._before.items():
            if group in alive:
                set_group_timeout(group, timeout)


active: list[Schedule] = []  # innermost last
_for_saving: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def keep_for_saving(group: ProcessGroup) -> None:
    """Registers ``group`` as one that is only used for checkpoints, also in the background: it keeps the
    timeout ``save`` in all phases."""
    _for_saving.add(group)
    if active:
        active[-1].set_save(group)


def saving_limit() -> timedelta:
    """Returns how long ranks wait for each other before they save or load.

    It is the ``save`` of the innermost watch that has one, or the default group's present timeout.
    """
    limits = (schedule.timeouts.save for schedule in reversed(active))
    return next((limit for limit in limits if limit is not None), group_timeout())


def _set_all(timeout: timedelta | None) -> None:
    if timeout is not None:
        for group in all_groups():
            if group not in _for_saving:
                set_group_timeout(group, timeout)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Makes the body phase ``name``, with its timeout in ``guards.watch(timeouts=)``, on all ranks.

    Args:
        name: ``"start"``, ``"step"``, ``"save"``, or any other name, which guards report and which has no
            timeout.

    Raises:
        Parallel3dError: ``name`` is no string, or empty.
        AgreementError: before a timeout gets shorter, other ranks did not come within the longer one.
    """
    if not isinstance(name, str) or not name:
        raise Parallel3dError(f"phase: {name!r} is not a name; it must be a string, such as 'save'")
    before, here.phase = here.phase, name
    try:
        if active:
            active[-1].change(name)
        yield
        if active:
            active[-1].change(before)
    finally:
        here.phase = before
