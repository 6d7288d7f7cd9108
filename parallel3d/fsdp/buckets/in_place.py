"""Which parameters of a bucket travel in place, and what a collective then sends and receives.

A parameter that is cut evenly along dim 0 lies in its unsharded region rank by rank, as an all-gather writes
and a reduce-scatter reads. So it can be gathered into its place, and its gradient be reduced from where
autograd has put it: no copy, and no buffer beside. Each such tensor is a member more of the bucket's call,
which costs time of its own, so small parameters are packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Replicate

from parallel3d import _dry_run
from parallel3d.fsdp.param import ShardedParam

__all__ = ["count_in_place", "is_small", "packs_as_chunks", "pieces", "put_first"]

# From how many unsharded bytes on. gloo runs a member as a call of its own, which takes about as long as
# copying 1 MiB there and back.
CPU_BYTES = 2**20
# NCCL groups members into one launch, but lays each out on the host: seven take 260 us where one takes 44.
ACCELERATOR_BYTES = 16 * 2**20


def put_first(params: Sequence[ShardedParam], device_type: str) -> list[ShardedParam]:
    """In the order of a bucket: in place, packed, and last those whose gradient is partial over tp.

    The sum of partial gradients over tp is then one collective on the buffer's tail. Among each, those that
    the same axes cut are neighbours, so that a norm is taken of a few runs, whatever order modules have.
    """

    def place(param: ShardedParam) -> tuple[object, ...]:
        large = _is_large(param, device_type)
        # Turned round among the packed ones, so that the last in place and the first packed may be alike.
        cut = [is_cut == large for is_cut in _cut_by(param)]
        return *_is_last(param), not large, cut

    return sorted(params, key=place)


def _cut_by(param: ShardedParam) -> list[bool]:
    """Whether each axis has ranks with other parts of it."""
    sizes = param.spec.mesh.shape
    return [
        size > 1 and not isinstance(placement, Replicate)
        for size, placement in zip(sizes, param.spec.placements, strict=True)
    ]


def _is_last(param: ShardedParam) -> tuple[bool, bool]:
    """Whether its gradient is partial over tp, always or maybe."""
    return param.layout.tp_grad == "partial", param.may_be_partial


def count_in_place(params: Sequence[ShardedParam], device_type: str) -> int:
    """How many of ``params``, which are in the order of a bucket, travel in place."""
    count = sum(_is_large(p, device_type) for p in params)
    # A lone one is no member more.
    return 1 if len(params) == 1 and _is_possible(params[0]) else count


def _is_possible(param: ShardedParam) -> bool:
    by_rank = param.parts > 1 and param.dim == 0 and param.even
    return by_rank and param.slot_numel > 0 and not any(_is_last(param))


def _is_large(param: ShardedParam, device_type: str) -> bool:
    return _is_possible(param) and not is_small(param, device_type)


def is_small(param: ShardedParam, device_type: str) -> bool:
    """Whether a copy of it is worth less than a call."""
    on_cpu = device_type == "cpu" and _dry_run.accelerator() is None
    least = CPU_BYTES if on_cpu else ACCELERATOR_BYTES
    return param.parts * param.slot_numel * param.dtype.itemsize < least


def packs_as_chunks(param: ShardedParam) -> bool:
    """Whether its gradient cut into chunks of dim 0, padded with zeros, is what its slots hold."""
    cut = param.dim == 0 or (param.parts == 1 and len(param.compute_shape) > 0)
    return cut and param.fills_slot and param.slot_numel > 0


def pieces(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """A bucket's buffer as members of a call: of each parameter in place, and the rest if there is one."""
    return [flat] if len(sizes) == 1 else list(flat.split(sizes))
