"""Finalization: the user says when the gradients of backwards are to be complete.

Each backward issues its reductions and ends without waiting for them, so their results are not in ``.grad``
until ``finalize_backward``: an optimizer step or a clip before it is an error. At most one backward's
reductions are in flight: the next one completes them first, so that an exception in it ends its own only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from parallel3d._torch.autograd import untraced
from parallel3d.errors import StateError
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.events import Option
from parallel3d.fsdp.members import params_of
from parallel3d.fsdp.unit import Unit


class ReductionProgress(Enum):
    """Whether the reductions of backwards are complete, for manual finalization."""

    COMPLETE = auto()  # in ``.grad``, or waiting there as sums
    DUE = auto()  # a backward has ended, and was not finalized
    REDUCING = auto()  # finalized, and nobody has waited yet


class Finalization(Option):
    """The option of a root with ``set_manual_backward_finalization(True)``.

    Attributes:
        progress: whether the backwards' reductions are complete.
        number: number of the present finalization: how many were completed before.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = weakref.ref(context)
        self.progress = ReductionProgress.COMPLETE
        self.number = 0
        self._dropped = -1

    @classmethod
    def of_root(cls, context: RunContext) -> Finalization | None:
        return cls(context) if context.root.manual_finalization else None

    @property
    def context(self) -> RunContext:
        context = self._context()
        assert context is not None
        return context

    def before_root_forward(self, context: RunContext) -> None:
        if self.progress is ReductionProgress.REDUCING:
            raise _not_waited("a forward", self.context)

    def before_root_backward(self, context: RunContext) -> None:
        """Completes an asynchronous finalization that was not waited on."""
        if self.progress is ReductionProgress.REDUCING:
            self.complete()

    def leaves_in_flight(self, context: RunContext) -> bool:
        context.comm.settle_host()
        self._enter(ReductionProgress.DUE)
        return True

    def abandon_root(self, context: RunContext) -> None:
        self._dropped = self.number
        self._end()

    # -- the user's calls ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Issues the reductions that backwards have left out, such as of sums accumulated in ``no_sync``."""
        context = self.context
        if context.backward is not None:
            raise StateError(
                f"finalize_backward() was called on {context.root.label!r} during a backward; call it after"
            )
        if self.progress is ReductionProgress.REDUCING:
            raise _not_waited("finalize_backward()", context)
        with context.reducing() as backward:
            for unit in reversed(context.units):
                if unit.take_gradients_put_by_hand() or unit.put_off:
                    unit.reduce(context.comm, backward.reduced)
                    unit.backward = None
                    unit.note_put_off()
                if unit.reshard_after_backward:  # which it may not have been before
                    unit.leave_backward(context)
        self._enter(ReductionProgress.REDUCING)

    def wait(self, number: int) -> None:
        """Completes finalization ``number`` if need be; StateError if ``reset_iter_state`` dropped it."""
        if number == self._dropped:
            raise StateError(
                "this finalize_backward(async_op=True) was ended by reset_iter_state(), which has dropped "
                "the reductions; begin the step anew, with zero_grad()"
            )
        if number == self.number and self.progress is ReductionProgress.REDUCING:
            self.complete()

    def complete(self) -> None:
        self.context.comm.finish()
        self._end()
        self.context.gradients_are_complete()

    def _enter(self, progress: ReductionProgress) -> None:
        self.progress = progress
        self.context.comm.left_by = self._context
        _watch_steps()
        _unfinished.add(self)

    def _end(self) -> None:
        if self.progress is ReductionProgress.REDUCING:
            self.number += 1
        self.progress = ReductionProgress.COMPLETE
        _unfinished.discard(self)


_unfinished: weakref.WeakSet[Finalization] = weakref.WeakSet()


def finalization_of(unit: Unit) -> Finalization | None:
    """Returns the ``Finalization`` of the root of ``unit``; None: it does not finalize manually."""
    options = () if unit.context is None else unit.context.options
    return next((each for each in options if isinstance(each, Finalization)), None)


def is_finalized(unit: Unit) -> bool:
    """Whether no reduction of ``unit``'s gradients waits for ``finalize_backward``."""
    option = finalization_of(unit)
    return option is None or option.progress is ReductionProgress.COMPLETE


def set_manual_finalization(unit: Unit, enabled: bool) -> None:
    context = unit.context
    if context is not None:
        unit.come_to_rest()
        if context.backward is not None or not is_finalized(unit):
            raise StateError(
                f"set_manual_backward_finalization({enabled}) was called on {context.root.label!r} during a "
                "backward, or before finalize_backward() has ended the last one; call it before a backward"
            )
        context.options = [each for each in context.options if not isinstance(each, Finalization)]
        if enabled:
            context.options.insert(0, Finalization(context))
    unit.manual_finalization = enabled


def refuse_unfinalized(params: Iterable[torch.Tensor], what: str) -> None:
    """Raises StateError, naming ``what``, if gradients of ``params`` wait for ``finalize_backward``."""
    for finalization in list(_unfinished):
        context = finalization.context
        names = {id(param.sharded): param.name for param in params_of(context.units)}
        name = next((names[id(param)] for param in params if id(param) in names), None)
        if name is not None:
            remedy = "call finalize_backward() of the outermost unit first"
            if finalization.progress is ReductionProgress.REDUCING:
                remedy = "wait() first on the handle that finalize_backward(async_op=True) returned"
            raise StateError(
                f"{what}: the gradient of parameter {name} is not in .grad yet, as "
                f"{context.root.label!r} has set_manual_backward_finalization(True); {remedy}"
            )


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


@untraced
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if _unfinished:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        refuse_unfinalized(params, f"a step of {type(optimizer).__name__}")


def _not_waited(what: str, context: RunContext) -> StateError:
    return StateError(
        f"{what} was called on {context.root.label!r} after finalize_backward(async_op=True); "
        "wait() first on the handle that it returned"
    )
