"""Settings: what FSDPModule's methods set on a unit."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel3d.fsdp.comm import Comm
    from parallel3d.fsdp.order_check import OrderCheck
    from parallel3d.fsdp.running.schedule import GatherSchedule
    from parallel3d.fsdp.state import Unit
    from parallel3d.fsdp.whole.state_dict_type import Form

__all__ = ["Settings"]


class Settings:
    """Base of a unit.

    Attributes:
        reshard_after_forward: True, False, None (True unless the unit is the root), or the number of ranks
            over which the parameters stay sharded between forward and backward.
        keep_between_forwards: whether the next forward uses what an evaluation has left gathered, and HFSDP's
            copy, as long as no change of the weights was seen.
        reshard_after_backward: False keeps the parameters gathered for the next micro-batch.
        unshard_in_backward: False where backward doesn't read the parameters (an embedding).
        forward_prefetch, backward_prefetch: units to gather ahead; None: the next in order.
        schedule: of the root: when units are gathered ahead of their use; None: as usual.
        sync, all_reduce: whether backward reduces over all data axes, and over replicate.
        post_optim_event: of the root: what the next forward's first gather waits for.
        shared_comm: the communication side shared with other roots.
        order_check: what ``check_execution_order`` has set.
        manual_finalization: of the root: whether the user ends backwards; see ``Finalization``.
        form: of its state dicts, see ``state_dict_type``; None: sharded.
    """

    def __init__(self, reshard_after_forward: bool | int | None) -> None:
        self.reshard_after_forward = reshard_after_forward
        self.keep_between_forwards = False
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[weakref.ref[Unit]] | None = None
        self.backward_prefetch: list[weakref.ref[Unit]] | None = None
        self.schedule: GatherSchedule | None = None
        self.sync = True
        self.all_reduce = True
        self.post_optim_event: Any = None
        self.shared_comm: Comm | None = None
        self.order_check: OrderCheck | None = None
        self.manual_finalization = False
        self.form: Form | None = None

    def take_settings(self, other: Settings) -> None:
        """Those of ``other``, of which this is a copy, but for what refers to units and streams."""
        if other.schedule is not None:
            self.schedule = other.schedule.copy()
        for name in (
            "keep_between_forwards",
            "reshard_after_backward",
            "unshard_in_backward",
            "sync",
            "all_reduce",
            "manual_finalization",
        ):
            setattr(self, name, getattr(other, name))
