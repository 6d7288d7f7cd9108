"""Finalization: of the backwards of one root, where the user says when their gradients are to be complete.

Each backward issues its reductions, and ends without a wait for them. So their results are not in ``.grad``
until ``finalize_backward``, and whoever steps or clips before it would do so with what was there: that is an
error. At most one backward's reductions are left behind at a time: the next one completes them before it
begins, so that an exception in it ends its own only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from parallel3d.errors import StateError
from parallel3d.fsdp.running.members import units_of

if TYPE_CHECKING:
    from parallel3d.fsdp.running.context import RunContext
    from parallel3d.fsdp.state import Unit

__all__ = ["Finalization", "Stage", "check_inner_finalization", "refuse_unfinalized"]

_unfinished: weakref.WeakSet[Finalization] = weakref.WeakSet()
_watched = False


class Stage(Enum):
    """Where the reductions of the backwards so far are."""

    COMPLETE = auto()  # in ``.grad``, or waiting there as sums
    DUE = auto()  # a backward has ended, and was not finalized
    REDUCING = auto()  # finalized, and nobody has waited yet


class Finalization:
    """Of one context.

    Attributes:
        manual: whether the user finalizes backwards.
        stage: see ``Stage``.
        number: of the finalization that is under way or comes next.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = weakref.ref(context)
        self.manual = False
        self.stage = Stage.COMPLETE
        self.number = 0
        self._dropped = -1

    @property
    def context(self) -> RunContext:
        """The context whose backwards these are."""
        context = self._context()
        assert context is not None
        return context

    # -- backwards -----------------------------------------------------------------------------------

    def put_off(self) -> None:
        """At the end of a backward: leaves its reductions as they are."""
        comm = self.context.comm
        comm.settle_host()
        comm.left_by = self._context
        self._enter(Stage.DUE)

    def take_over(self) -> None:
        """Before a backward: what another one has left behind is completed."""
        if self.stage is Stage.REDUCING:
            self.complete()
        comm = self.context.comm
        if comm.left_by is not None:  # by this root, or by another one that shares the comm
            comm.finish()

    def check_waited(self) -> None:
        """Before a forward.

        Raises:
            StateError: an asynchronous finalization was not waited on.
        """
        if self.stage is Stage.REDUCING:
            raise _not_waited("a forward", self.context)

    def spare_others(self) -> None:
        """Before the reductions in flight are dropped: completes those that another root has left."""
        comm = self.context.comm
        if comm.left_by is not None and comm.left_by() is not self.context:
            comm.finish()

    def drop(self) -> None:
        """After an exception: the reductions are no more."""
        self._dropped = self.number
        self._end()

    # -- the user's calls ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Issues what is still to be issued."""
        context = self.context
        root = context.root.label
        if not self.manual:
            raise StateError(
                f"finalize_backward() of {root!r}: each backward completes its own reductions; call "
                "set_manual_backward_finalization(True) before the backwards"
            )
        if context.in_backward:
            raise StateError(f"finalize_backward() of {root!r} within a backward; call it after it")
        if self.stage is Stage.REDUCING:
            raise _not_waited("finalize_backward()", context)
        context.in_backward = True  # which ends here
        try:
            for unit in reversed(context.units):
                if unit.take_gradients_put_by_hand() or unit.put_off:
                    unit.reduce(context.comm)
                    unit.arrived, unit.reduced = 0, False
                    unit.note_put_off()
                if unit.reshard_after_backward:  # which it may not have been before
                    unit.leave_backward(context)
        finally:
            context.in_backward = False
        context.comm.left_by = self._context
        self._enter(Stage.REDUCING)

    def wait(self, number: int) -> None:
        """Completes the finalization of that number, if nothing else has.

        Raises:
            StateError: it was dropped.
        """
        if number == self._dropped:
            raise StateError(
                "this finalize_backward(async_op=True) was ended by reset_iter_state(), which has dropped "
                "the reductions; begin the step anew, with zero_grad()"
            )
        if number == self.number and self.stage is Stage.REDUCING:
            self.complete()

    def complete(self) -> None:
        """Waits for the reductions, and puts their results into ``.grad``."""
        self.context.comm.finish()
        self._end()
        self.context.compare_gradients_once()

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        _watch_steps()
        _unfinished.add(self)

    def _end(self) -> None:
        if self.stage is Stage.REDUCING:
            self.number += 1
        self.stage = Stage.COMPLETE
        _unfinished.discard(self)


def check_inner_finalization(root: Unit) -> None:
    """Raises StateError if a unit inside ``root`` was told to be finalized by itself."""
    for module in root.modules:
        for unit in units_of(module, recurse=True):
            if unit.manual_finalization and unit is not root:
                raise StateError(
                    f"set_manual_backward_finalization(True) was called on {unit.label!r}, which is inside "
                    f"{root.label!r}; call it on the outermost unit"
                )


def refuse_unfinalized(params: Iterable[torch.Tensor], what: str) -> None:
    """Raises StateError if gradients of one of ``params`` are still to come."""
    for finalization in list(_unfinished):
        context = finalization.context
        mine = {
            id(param.sharded): param.name
            for unit in context.units
            for bucket in unit.group.buckets
            for param in bucket.params
        }
        name = next((mine[id(each)] for each in params if id(each) in mine), None)
        if name is not None:
            remedy = (
                "call finalize_backward() of the outermost unit first"
                if finalization.stage is Stage.DUE
                else "wait() first on the handle that finalize_backward(async_op=True) returned"
            )
            raise StateError(
                f"{what}: the gradient of parameter {name} is not in .grad yet, as "
                f"{context.root.label!r} has set_manual_backward_finalization(True); {remedy}"
            )


def _watch_steps() -> None:
    global _watched
    if not _watched:
        _watched = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _unfinished:
        _check(optimizer)


@torch.compiler.disable
def _check(optimizer: Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    refuse_unfinalized(params, f"a step of {type(optimizer).__name__}")


def _not_waited(what: str, context: RunContext) -> StateError:
    return StateError(
        f"{what} of {context.root.label!r} after finalize_backward(async_op=True); wait() first on the "
        "handle that it returned"
    )
