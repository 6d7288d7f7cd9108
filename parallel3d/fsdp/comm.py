"""When a bucket's collectives are issued and waited for: what a unit asks of either kind of communication.

``issue_gather`` / ``finish_gather`` stand around an all-gather, ``reduce`` issues a reduction, ``finish``
ends a backward. Every rank makes these calls in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from parallel3d import _dry_run
from parallel3d.fsdp.buckets.bucket import Bucket
from parallel3d.fsdp.buckets.hybrid_bucket import HybridBucket
from parallel3d.fsdp.buckets.joint_gather import JointGather
from parallel3d.fsdp.comms.cpu_comm import CpuComm
from parallel3d.fsdp.comms.stream_comm import StreamComm

if TYPE_CHECKING:
    from parallel3d.fsdp.running.context import RunContext

__all__ = ["Comm", "limit_inputs", "make_comm"]


class Comm(Protocol):
    """What a unit asks of the communication side.

    Attributes:
        max_inputs: how many inputs of reduce-scatters may be in flight.
        post_optim_event: an event for the next all-gather to wait for, instead of the current stream.
        left_by: the context whose last backward was not finalized; its reductions are in flight.
    """

    max_inputs: int
    post_optim_event: Any
    left_by: weakref.ref[RunContext] | None

    def issue_gather(self, bucket: Bucket | JointGather) -> None:
        """Starts the all-gather of ``bucket``."""

    def finish_gather(self, bucket: Bucket | JointGather) -> None:
        """Makes ``bucket``'s unsharded parameters ready for use."""

    def renew_copy(self, bucket: HybridBucket) -> None:
        """Starts the all-gather over replicate that ``bucket``'s copy is made by, if the weights changed."""

    def reduce(self, bucket: Bucket, *, all_reduce: bool) -> None:
        """Starts the reduction of the gradients ``bucket`` has collected."""

    @property
    def holds_inputs(self) -> bool:
        """Whether the input of a reduction is still held."""

    def free_inputs(self) -> None:
        """Frees the inputs of the reductions under way once they have been read."""

    def drain(self, bucket: Bucket) -> None:
        """Completes the reductions of ``bucket`` and puts the results into ``.grad``."""

    def finish(self) -> None:
        """Completes every reduction and puts the results into ``.grad``."""

    def abandon(self) -> None:
        """After an exception: waits for the reductions in flight and drops their results."""

    def settle_host(self) -> None:
        """Returns when nothing reads the shards in the CPU's memory any more (CPU offload)."""


def make_comm(device_type: str) -> Comm:
    """Streams where the device has them, asynchronous works otherwise."""
    played = _dry_run.accelerator()
    if played is None and device_type in ("cpu", "meta"):
        return CpuComm()
    return StreamComm(played or torch.get_device_module(device_type))


def limit_inputs(comm: Comm, buckets: Iterable[Bucket], *, at_least: int = 1) -> None:
    """Lets ``comm`` have as many reduce inputs in flight as any of ``buckets`` asks for.

    They share the limit: one that asks for fewer must not wait for those of the others.
    """
    comm.max_inputs = max((bucket.max_inputs for bucket in buckets), default=1)
    comm.max_inputs = max(comm.max_inputs, at_least)  # of other roots on the same comm
