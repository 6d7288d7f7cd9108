"""GatherBuffers: what a bucket's all-gather sends and receives, and how that becomes unsharded parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from parallel3d._compat import foreach_copy_
from parallel3d.fsdp.buckets.in_place import pieces
from parallel3d.fsdp.buckets.small_world import SmallWorld
from parallel3d.fsdp.param import ShardedParam
from parallel3d.fsdp.placing.axes import DataAxes
from parallel3d.fsdp.storage import allocate, release

__all__ = ["GatherBuffers"]


class GatherBuffers:
    """Base of a bucket; see there for the buffers.

    Attributes:
        slot_sizes, numel: slots of each parameter, and S, of all. ``member_sizes``: of each member
        gather_outputs: what the call writes to: of each parameter in place its region, and ``gathered``.
        region_views, gathered_views: where the others belong, and where they are gathered.
        custom_gathered: ``gathered`` of a custom all-gather.
        small: the fewer ranks that keep ``part`` between them.
    """

    params: list[ShardedParam]
    parts: int
    axes: DataAxes
    device: torch.device
    compute_dtype: torch.dtype
    offloaded: bool
    pin: bool
    in_place: int
    packed: int
    numel: int
    slot_sizes: list[int]
    member_sizes: list[int]
    has_own_unsharded: bool
    keep_storage: bool
    flat: torch.Tensor
    unsharded: torch.Tensor
    gathered: torch.Tensor
    gather_outputs: list[torch.Tensor]
    region_views: list[torch.Tensor]
    gathered_views: list[torch.Tensor]
    custom_gathered: torch.Tensor | None
    part: torch.Tensor | None
    small: SmallWorld | None
    shard_group: ProcessGroup | None
    gather_group: Any
    gather_comm: Any

    # -- layouts -------------------------------------------------------------------------------------

    def copy_pairs(
        self, rows: torch.Tensor, first: int = 0, *, since: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(part of ``unsharded``, the same in ``rows``): shard ranks' rows, from rank ``first`` on.

        Args:
            rows: (ranks, slots): of the parameters from index ``since`` on.
        """
        with torch.inference_mode(False), torch.no_grad():  # no views of ours in inference mode
            columns = rows.split(self.slot_sizes[since:], dim=1)
            regions = self.unsharded.split([self.parts * size for size in self.slot_sizes])
            return [
                pair
                for param, region, column in zip(
                    self.params[since:], regions[since:], columns, strict=True
                )
                for pair in param.copy_pairs(region, column, first)
            ]

    def members(self, part: torch.Tensor) -> list[torch.Tensor]:
        """What a rank brings to the all-gather, (rows * S,), as the call takes it: of each parameter in
        place its rows, and the rows of the others, packed."""
        rows = part.numel() // self.numel if self.numel else 1
        return pieces(part, [rows * size for size in self.member_sizes])

    def member_pairs(
        self, members: list[torch.Tensor], first: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As ``copy_pairs``, of ``members`` of some ranks."""
        k, pairs = self.in_place, []
        regions = self.unsharded.split([self.parts * size for size in self.slot_sizes])
        for param, region, member in zip(self.params[:k], regions, members, strict=False):
            pairs += param.copy_pairs(region, member.view(-1, param.slot_numel), first)
        for packed in members[k:]:
            pairs += self.copy_pairs(packed.view(-1, self.packed), first, since=k)
        return pairs

    # -- unshard -------------------------------------------------------------------------------------

    def gather_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Allocates and returns the outputs and inputs of the all-gather; the inputs are in compute dtype."""
        in_rows = self.gather_comm is not None
        if self.part is not None and self.small is not None:
            in_rows = self.small.in_rows
        if in_rows and self.shard_group is not None:
            return self._row_buffers()
        self.custom_gathered = None
        if self.in_place:
            allocate(self.unsharded)
        allocate(self.gathered)
        return self.gather_outputs, self.members(self.gather_input())

    def gather_input(self) -> torch.Tensor:
        """What this rank brings to the all-gather."""
        if self.part is not None:
            return self.part
        flat = self.flat
        if self.offloaded:  # cast over there: half the bytes would be cast by the CPU otherwise
            flat = flat.to(self.device, non_blocking=self.pin)
        return flat if flat.dtype is self.compute_dtype else flat.to(self.compute_dtype)

    def _row_buffers(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """For a custom all-gather, of one row of S per rank: its memory, and the input in its place there."""
        source = self.gather_input()
        make = torch.empty if self.gather_comm is None else self.gather_comm.allocate
        size = (self.parts * self.numel,)
        output = make(size, dtype=self.compute_dtype, device=self.device)
        rank = self.axes.coordinate(self.axes.shard)
        if self.part is not None and self.small is not None:
            rank = self.small.rank
        part = output.narrow(0, rank * source.numel(), source.numel())
        part.copy_(source)
        self.custom_gathered = output
        return [output], [part]

    def copy_out(self) -> None:
        """After the all-gather: the gathered rows into the parameters' places."""
        if self.custom_gathered is not None:
            allocate(self.unsharded)
            pairs = self.copy_pairs(self.custom_gathered.view(self.parts, -1))
            foreach_copy_([region for region, _ in pairs], [held for _, held in pairs])
            self.custom_gathered = None
        elif self.region_views and self.gathered is not self.unsharded:
            if not self.in_place:
                allocate(self.unsharded)
            foreach_copy_(self.region_views, self.gathered_views)

    def cast_whole(self) -> None:
        """Unshard without a shard axis: the cast copy, or nothing."""
        if self.has_own_unsharded:
            allocate(self.unsharded)
            self.unsharded.copy_(self.flat)

    def free_gathered(self) -> None:
        """After ``copy_out`` has run on the device."""
        if self.gathered is not self.unsharded:
            release(self.gathered)

    def free_unsharded(self) -> None:
        """Frees what the unsharded parameters live in, unless the user keeps it."""
        if self.has_own_unsharded and not self.keep_storage:
            release(self.unsharded)

    def keep_part(self, ranks: int) -> None:
        """Before ``free_unsharded``: keeps what the next all-gather, over ``ranks`` ranks only, needs."""
        if self.shard_group is None or ranks >= self.shard_group.size():
            return
        in_rows = self.gather_comm is not None
        if self.small is None or (self.small.ranks, self.small.in_rows) != (ranks, in_rows):
            self.small = SmallWorld(self, ranks, in_rows=in_rows)
        self.part = self.small.keep()
        self.gather_group = self.small.group

    def drop_part(self) -> None:
        """Lets the next all-gather be of the shards again."""
        if self.part is not None and self.small is not None:
            self.small.drop()
            self.part = None
            self.gather_group = self.shard_group
