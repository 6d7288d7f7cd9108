"""check_execution_order: which unit ranks are at, compared before anything is communicated for it.

Collectives are matched by their order alone. A rank that runs its units in another order than the rest
gathers other parameters than it thinks, or waits for ever. With the check on, ranks tell each other where
they are, through the c10d store: it works although their collectives do not match any more.
"""

from __future__ import annotations

import warnings
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import distributed as dist
from torch import nn

from parallel3d._arguments import as_bool
from parallel3d.errors import AgreementError, Parallel3dError
from parallel3d.fsdp.running.digest import ranks_of
from parallel3d.fsdp.running.members import units_of
from parallel3d.mesh.agreement import DEFAULT_TIMEOUT, check_agreement

if TYPE_CHECKING:
    from parallel3d.fsdp.state import Unit

__all__ = ["OrderCheck", "check_execution_order"]

_TOPIC = "execution order"


def check_execution_order(
    model: nn.Module, enabled: bool = True, *, timeout: timedelta = DEFAULT_TIMEOUT
) -> None:
    """For debugging: says when ranks run the units of ``model`` in different orders, or an iteration in
    another than the one before, and which unit it was.

    Before each unit's gathers and reductions all ranks of the parameters' meshes compare where they are: a
    round trip to the store each, so not for production. Under simulated ranks, which run in step, only
    iterations are compared. A change between iterations is a warning: it is allowed, but what was gathered
    ahead by the old order was gathered for nothing.

    Args:
        model: a model with units; the check is on for all of them.
        enabled: False ends it. All ranks must call it alike.
        timeout: how long a rank waits for the others to get where it is.

    Raises:
        Parallel3dError: the model has no unit, or a wrong argument. Later, in forward and backward,
            AgreementError on every rank, naming units and ranks.
    """
    enabled = as_bool("enabled", enabled)
    if not isinstance(timeout, timedelta):
        raise Parallel3dError(
            f"check_execution_order: timeout is {timeout!r}; it must be a datetime.timedelta, such as "
            "timedelta(seconds=30)"
        )
    units = list(units_of(model, recurse=True)) if isinstance(model, nn.Module) else []
    if not units:
        raise Parallel3dError(
            f"check_execution_order: {type(model).__name__} has no unit; apply fully_shard or "
            "parallelize first"
        )
    check = OrderCheck(ranks_of(units), timeout) if enabled else None
    for unit in units:
        unit.order_check = check


class OrderCheck:
    """Where this rank is, told to the others and compared with the iteration before.

    Attributes:
        ranks: those that compare.
        order: units in the order of their forwards, this iteration. Not those that the user runs alone.
        last: the same of the iteration before.
        changed: whether this iteration was found to differ.
    """

    def __init__(self, ranks: list[int], timeout: timedelta) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self.order: list[weakref.ref[Unit]] = []
        self.last: list[weakref.ref[Unit]] = []
        self.changed = False

    def at(self, what: str, unit: Unit) -> None:
        """This rank is about to do ``what`` (forward, backward, ...) of ``unit``."""
        here = f"{what} of {unit.label}"
        try:
            check_agreement(_TOPIC, {"where": here}, timeout=self.timeout, ranks=self.ranks)
        except AgreementError as error:
            raise AgreementError(
                f"{error}\nRank {dist.get_rank()} was at the {here}. Units must run in one order on every "
                "rank: look for branches that depend on the rank or its data"
            ) from error

    def forward(self, unit: Unit, *, begins: bool, within: bool, recomputes: bool) -> None:
        """A forward of ``unit`` begins: with ``begins`` the root's, ``within`` one of that, or alone."""
        self.at("recomputation" if recomputes else "forward", unit)
        if recomputes or not (begins or within):
            return
        if begins:
            self._begin_iteration()
        place = len(self.order)
        self.order.append(unit.ref)
        if self.changed or not self.last:
            return
        before = self.last[place] if place < len(self.last) else None
        if before is not unit.ref:
            was = "nothing more" if before is None else _label(before)
            self._warn(f"unit {unit.label} runs at place {place}, where {was} was before")

    def abandon(self) -> None:
        """After an exception: the iteration that broke off is not compared with."""
        self.order = []

    def _begin_iteration(self) -> None:
        missing = self.last[len(self.order) :] if self.order else []
        if missing and not self.changed:
            ran = _label(self.order[-1])
            self._warn(f"it ended after {ran}; unit {_label(missing[0])} did not run")
        if self.order:
            self.last, self.order = self.order, []
        self.changed = False

    def _warn(self, what: str) -> None:
        self.changed = True
        warnings.warn(
            f"the execution order of an iteration differs from the one before: {what}. What is gathered "
            "ahead follows the order before",
            stacklevel=2,
        )


def _label(ref: weakref.ref[Unit]) -> str:
    unit = ref()
    return "a deleted unit" if unit is None else unit.label
