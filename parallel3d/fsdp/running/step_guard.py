"""StepGuard: a unit whose parameters are updated within the backward, and what must hold for that.

An update is right only when nothing in this backward, nor in a later one of the same forward, reads the
parameters or adds to their gradients any more. Autograd sees to most of it: a gradient arrives when all uses
in its backward have contributed. The rest is checked here, and is an error rather than a wrong number:

- backwards inside a backward (reentrant checkpointing) bring gradients one region at a time;
- a graph that was made before an update computes with weights that are gone;
- a unit that runs again after its update (recomputation for a region that needs its values alone);
- a loss that uses the sharded Parameter itself, whose gradient comes apart from the unit's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import get_gradient_edge

from parallel3d._compat import backward_id, node_is_in_backward
from parallel3d.errors import StateError

if TYPE_CHECKING:
    from parallel3d.fsdp.buckets.bucket import Bucket
    from parallel3d.fsdp.running.call import Call
    from parallel3d.fsdp.state import Unit

__all__ = ["StepGuard", "refuse_accumulation"]

_NONE = -1  # what ``backward_id`` is outside a backward

Update = Callable[["Bucket"], None]
"""Updates the parameters of a bucket that have a gradient, and frees it."""


class StepGuard:
    """Of one unit; its buckets have it too.

    Attributes:
        updates: how many updates there have been.
        updated_in: the backward of the last one.
    """

    def __init__(self, unit: Unit, update: Update) -> None:
        self._unit = unit.ref
        self._update = update
        self.updates = 0
        self.updated_in = _NONE
        # Of each forward call: how many updates there were before, and the backward that it was made in.
        self._calls: weakref.WeakKeyDictionary[Call, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._nodes: dict[int, Any] = {}  # id of a sharded Parameter -> what adds to its ``.grad``

    @property
    def unit(self) -> Unit:
        """The unit."""
        unit = self._unit()
        assert unit is not None
        return unit

    # -- what the unit tells -------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Before each forward."""
        if backward_id() != _NONE and backward_id() == self.updated_in:
            raise self._error(
                "was updated in this backward and is now run again (activation checkpointing recomputes a "
                "region whose own result did not need the unit's gradient)",
                "keep the unit out of that checkpointed region",
            )

    def note(self, call: Call) -> None:
        """A forward call that a backward may follow."""
        self._calls[call] = (self.updates, backward_id())

    def begin_backward(self, call: Call) -> None:
        """A gradient has reached ``call``."""
        updates, made_in = self._calls.get(call, (0, _NONE))
        if updates != self.updates:
            raise self._error(
                "was updated since this forward, so its gradient can't be computed any more",
                "do one backward for each forward: sum the losses, and no retain_graph=True",
            )
        if made_in not in (_NONE, backward_id()):
            self._raise_reentrant()
        self._check_sync()

    def take_gradient(self) -> None:
        """A gradient has arrived."""
        unit = self.unit
        if unit.context is not None and unit.context.backward_id != backward_id():
            self._raise_reentrant()
        self._check_sync()

    def update(self, bucket: Bucket, used: Sequence[int]) -> None:
        """The reduced gradients of ``bucket`` are in ``.grad``."""
        if not used:
            return
        self._check_uses(bucket, used)
        self.updates += 1
        self.updated_in = backward_id()
        self._update(bucket)

    # -- checks --------------------------------------------------------------------------------------

    def _check_sync(self) -> None:
        unit = self.unit
        if not (unit.sync and unit.all_reduce):
            raise self._error("accumulates gradients", _ACCUMULATION_HINT)

    def _check_uses(self, bucket: Bucket, used: Sequence[int]) -> None:
        unit = self.unit
        around = unit if unit.context is None else unit.context.root
        if unit.depth or around.depth:
            raise self._error(
                "would be updated by a backward inside a forward that goes on",
                "call backward after the forward",
            )
        if backward_id() == _NONE:
            return
        for index in used:
            param = bucket.params[index]
            node = self._nodes.get(id(param.sharded))
            if node is None:
                node = get_gradient_edge(param.sharded).node
                self._nodes[id(param.sharded)] = node  # kept, it is the one that graphs use
            if node_is_in_backward(node):
                raise self._error(
                    f"has parameter {param.name}, which the loss uses outside the unit's forward too: that "
                    "gradient comes apart from the others",
                    "use it inside the unit's forward, or weight_decay for a penalty on weights",
                )

    def _raise_reentrant(self) -> None:
        raise self._error(
            "is in a backward inside a backward, as torch.utils.checkpoint makes with use_reentrant=True: "
            "whether another one will bring gradients can't be known",
            "use use_reentrant=False",
        )

    def _error(self, what: str, hint: str) -> StateError:
        return StateError(
            f"unit {self.unit.label}, whose parameters are updated in backward, {what}; {hint}, or use an "
            "ordinary optimizer"
        )


_ACCUMULATION_HINT = (
    "there is nothing to accumulate in, as each backward updates: make one backward a step"
)


def refuse_accumulation(units: Iterable[Unit], what: str) -> None:
    """Raises StateError if any of ``units`` is updated in backward."""
    for unit in units:
        if unit.guard is not None:
            raise StateError(
                f"{what}: the parameters of unit {unit.label} are updated in backward; "
                f"{_ACCUMULATION_HINT}, or use an ordinary optimizer"
            )
