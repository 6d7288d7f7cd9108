"""What ranks tell each other of a step: a few numbers each, in one small all-gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d._compat import all_gather_single
from parallel3d._dry_run import active

__all__ = ["Gathering"]


class Gathering:
    """Brings the numbers of all ranks of ``mesh`` to each of them.

    One all-gather over the default group where the mesh is all its ranks, otherwise one for each axis.

    Attributes:
        ranks: global ranks in the mesh's order.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        whole = sorted(self.ranks) == list(range(dist.get_world_size()))
        self._groups = [dist.group.WORLD] if whole else []
        if not whole:  # innermost first: what comes out is in the mesh's order
            self._groups = [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]
        self._order = self.ranks if whole else range(len(self.ranks))

    def __call__(self, numbers: Sequence[float]) -> list[list[float]] | None:
        """Collective. Each rank's numbers, in the mesh's order; None in a dry run, where nobody knows."""
        table = torch.tensor(numbers, dtype=torch.float64, device=self.mesh.device_type)
        for group in self._groups:
            if group is None or group.size() == 1:
                continue
            whole = table.new_empty(group.size() * table.numel())
            all_gather_single(whole, table.flatten(), group=group)
            table = whole
        if active():
            return None
        rows = table.view(-1, len(numbers)).tolist()
        return [rows[at] for at in self._order]
