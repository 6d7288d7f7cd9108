"""Parameters tied across units: the units become one, as if their modules had been given in one list.

Then the shared parameter is gathered when the first of them runs and freed when all have run, and its
gradient is reduced once, when all uses have contributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.slots import holder_of
from parallel3d.fsdp.state import Unit

__all__ = ["Tie", "check_ties", "join"]


@dataclass(frozen=True)
class Tie:
    """A parameter of a new unit that an older one has already.

    Attributes:
        name: its name in the new unit.
        owner: what the older unit has made of it.
        places: the modules and attributes of the new unit that hold it.
    """

    name: str
    owner: ShardedParam
    places: list[tuple[nn.Module, str]]

    @property
    def unit(self) -> Unit:
        """The older unit."""
        unit = self.owner.unit() if self.owner.unit is not None else None
        assert unit is not None
        return unit


def check_ties(ties: Sequence[Tie], policy: MixedPrecisionPolicy) -> None:
    """Raises if the units can't become one."""
    for tie in ties:
        unit = tie.unit
        if unit.policy != policy:
            raise Parallel3dError(
                f"parameter {tie.name} is tied to {tie.owner.name} of unit {unit.label}, so the two units "
                f"become one; but their policies differ ({policy} and {unit.policy}): give both the same"
            )
        if unit.guard is not None:
            raise StateError(
                f"parameter {tie.name} is tied to {tie.owner.name} of unit {unit.label}, which is updated in "
                "backward already; apply fully_shard to both before optim.step_in_backward"
            )
        if unit.context is not None:
            raise StateError(
                f"parameter {tie.name} is tied to {tie.owner.name} of unit {unit.label}, which has run "
                "already; apply fully_shard to both before the first forward"
            )


def join(unit: Unit, ties: Sequence[Tie]) -> None:
    """Makes the older units part of ``unit``, the new one."""
    for tie in ties:
        for module, name in tie.places:
            if module._parameters[name] is not tie.owner.sharded:  # else the module stands in both
                holder = holder_of(module)
                tie.owner.put_at([(holder, name)])
                holder[name] = tie.owner.sharded
    olders: list[Unit] = []
    for tie in ties:
        if tie.unit is not unit and all(tie.unit is not older for older in olders):
            olders.append(tie.unit)
    for older in olders:
        _absorb(unit, older)


def _absorb(unit: Unit, older: Unit) -> None:
    for module in older.members.detach():
        unit.members.attach(module, unit)
    unit.group.extend(older.group)
    for bucket in unit.group.buckets:
        for param in bucket.params:
            param.unit = unit.ref
    mine, others = unit.reshard_after_forward, older.reshard_after_forward
    if mine != others:
        unit.reshard_after_forward = None if None in (mine, others) else False
