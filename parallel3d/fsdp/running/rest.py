"""Rest: a unit beside its own forward and backward: between steps, and while its root shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from parallel3d._compat import untraced
from parallel3d.fsdp.group import GroupState, ParamGroup
from parallel3d.fsdp.settings import Settings

if TYPE_CHECKING:
    from parallel3d.fsdp.running.call import Call
    from parallel3d.fsdp.running.context import RunContext

__all__ = ["Rest"]


class Rest(Settings):
    """Base of a unit, whose attributes these are; see there."""

    group: ParamGroup
    context: RunContext | None
    call: Call | None
    to_run: set[int]
    begun: set[int]
    depth: int
    arrived: int
    backward_begun: bool
    reached: bool
    ended: bool
    reduced: bool

    if TYPE_CHECKING:

        def ready_context(self) -> RunContext: ...

        @property
        def modules(self) -> list[nn.Module]: ...

    @property
    def is_shown_by_root(self) -> bool:
        """Whether there is nothing to do for the unit itself now; see ``Residents``."""
        group, context = self.group, self.context
        if not (group.gated and group.shown) or self.depth or self.to_run or context is None:
            return False
        if context.backward_has_failed:
            return False
        return context.residents.shown

    @property
    def is_untouched(self) -> bool:
        """Whether a backward has brought nothing but to the gates."""
        begun = self.backward_begun or self.begun or self.arrived or self.reduced
        if begun or not self.group.gated:
            return False
        return not any(
            bucket.grads.is_busy or bucket.reduce_unused for bucket in self.group.buckets
        )

    def reset(self) -> None:
        """After an exception, what ``reset_iter_state`` promises."""
        self.call = None
        if self.order_check is not None:
            self.order_check.abandon()
        self.to_run.clear()
        self.begun.clear()
        self.depth = self.arrived = 0
        self.backward_begun = self.reached = self.ended = self.reduced = False

    def show_shards(self) -> None:
        """The sharded parameters for whoever saves or loads, unless a forward is using the others."""
        self.come_to_rest()
        busy = self.depth or self.backward_begun or self.is_shown_by_root
        if self.group.shown and not busy:
            self.group.hide()
            self.group.reshard(self.ready_context().comm)

    def come_to_rest(self) -> None:
        """Shows the shards again where an exception has ended a backward half-way."""
        context = self.context
        if context is not None and context.backward_has_failed:
            context.leave_broken_backward()

    @untraced
    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Hook after ``load_state_dict``: ``assign=True`` has replaced the Parameters."""
        if not self.group.shown and self.group.state is not GroupState.WHOLE:
            self.group.adopt(partly=len(self.modules) > 1)
