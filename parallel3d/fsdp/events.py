"""What options are told, and what a root's context knows of a unit.

An option is told what happens in the units that have it in ``Unit.options``, and in the roots that have it in
``RunContext.options``. A plain step has none, and runs none of these functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.group import ParamGroup
from parallel3d.fsdp.reduction import Comm
from parallel3d.fsdp.schedule import PrefetchSettings


class Option:
    """Base class of the engine's options, with a method for each event.

    ``unit`` is a ``Unit``, ``call`` a ``Call`` of it, and ``context`` the ``RunContext`` of its root.
    """

    # -- a root ------------------------------------------------------------------------------------

    @classmethod
    def of_root(cls, context: Any) -> Option | None:
        """Called when a root's context was made. Returns the option for that root; None: it needs none."""
        return None

    def before_root_forward(self, context: Any) -> None:
        """Called when a forward of the root begins."""

    def before_root_backward(self, context: Any) -> None:
        """Called when a backward begins, before anything has communicated in it."""

    def begin_root_backward(self, context: Any) -> None:
        """Called right after ``before_root_backward``; now ``context.backward``, the state, exists."""

    def issue_reductions(self, context: Any) -> None:
        """Called when a backward has issued the units' reductions; issues the option's own."""

    def leaves_in_flight(self, context: Any) -> bool:
        """Returns True if the backward is not to wait for its reductions, as the option will do that."""
        return False

    def end_root_backward(self, context: Any) -> None:
        """Called at the end of a backward, after the reductions, and after an exception."""

    def after_reductions(self, context: Any) -> None:
        """Called when the gradients of a backward are in ``.grad``."""

    def abandon_root(self, context: Any) -> None:
        """Called after an exception in a pass, when accumulated sums and reductions were dropped."""

    # -- a unit ------------------------------------------------------------------------------------

    def prepare(self, unit: Any, context: Any) -> None:
        """Called before ``unit`` is gathered for a forward, and when the root's forward begins."""

    def begin_call(self, unit: Any) -> None:
        """Called before each forward of a module of ``unit``."""

    def note_call(self, call: Any) -> None:
        """Called with the ``Call`` of a forward, if a backward may follow it."""

    def begin_forward(self, unit: Any, *, begins: bool, within: bool, recomputes: bool) -> None:
        """Called when a forward of ``unit`` begins.

        Args:
            begins: whether ``unit`` is the root, and this is no recomputation.
            within: whether the root's forward is under way.
            recomputes: whether a backward recomputes it (activation checkpointing).
        """

    def unshard(self, unit: Any) -> None:
        """Called when the user calls ``unshard()``."""

    def gather_in_backward(self, unit: Any) -> None:
        """Called when the all-gather of ``unit`` is issued as a prefetch in backward."""

    def reach_call(self, call: Any, context: Any) -> None:
        """Called when a gradient has reached an output of ``call``."""

    def begin_backward(self, unit: Any) -> None:
        """Called when the first gradient of a backward has reached ``unit``."""

    def take_gradient(self, unit: Any) -> None:
        """Called when the gradient of a parameter of ``unit`` has arrived."""

    def begin_reduction(self, unit: Any) -> None:
        """Called before gradients of ``unit`` are reduced."""

    def end_backward(self, unit: Any) -> None:
        """Called when the root's backward is over, its reductions too."""

    def abandon(self, unit: Any) -> None:
        """Called after an exception in forward or backward, when ``unit`` is resharded."""


class Registrar(Protocol):
    """An option that registers units' unsharded parameters once for a whole forward or backward of the root,
    instead of each unit's hooks (``options.merged.RegisteredByRoot``)."""

    def has_registered(self, unit: Any) -> bool:
        """Whether the parameters are registered now, so that hooks call only the next two methods."""

    def before_unit(self, unit: Any) -> None:
        """Called before each forward of a module of ``unit``."""

    def after_unit(self, unit: Any, output: Any) -> None:
        """Called after each forward of a module of ``unit``, with its ``output``."""


class ContextUnit(Protocol):
    """The attributes of ``unit.Unit`` that ``context`` and options read, as these can't import the class."""

    ref: weakref.ref[Any]
    label: str
    context: Any
    group: ParamGroup
    policy: MixedPrecisionPolicy
    options: list[Option]
    registrar: Registrar | None
    device_type: str
    input_dtype: torch.dtype | None
    sync: bool
    tracked: bool
    all_reduce: bool
    reduce_unused: bool
    put_off: bool
    reshard_after_backward: bool
    is_new_to_tracker: bool
    shared_comm: Comm | None
    prefetch: PrefetchSettings | None
    keep_between_forwards: bool
    manual_finalization: bool
    post_optim_event: Any
    forward: Any
    backward: Any

    @property
    def modules(self) -> list[nn.Module]: ...
    @property
    def is_root(self) -> bool: ...
    @property
    def depth(self) -> int: ...
    @property
    def backward_prefetch(self) -> Sequence[weakref.ref[Any]] | None: ...
    def issue_unshard(self, context: Any, compute: Any = None) -> None: ...
    def forget_modules_to_run(self) -> None: ...
    def leave_evaluation(self, context: Any) -> None: ...
    def reshards(self) -> bool | int: ...
    def reduce(self, comm: Comm, reduced: set[int]) -> None: ...
    def take_gradients_put_by_hand(self) -> bool: ...
    def leave_backward(self, context: Any) -> None: ...
    def note_put_off(self) -> None: ...
    def end_backward(self) -> None: ...
    def abandon(self, comm: Comm) -> None: ...
