"""The first collective on every axis, made in one order on all ranks.

NCCL makes a group's communicator with its first collective. Made lazily, communicators come about in the
order in which a program happens to use them, under memory pressure, and in the middle of a step: what then
goes wrong is a hang far from its cause.
"""

import torch
from torch import distributed as dist
from torch.distributed import DeviceMesh

from parallel3d.errors import MeshError, PeerFailureError
from parallel3d.mesh.naming import name_ranks
from parallel3d.mesh.store import others

__all__ = ["warm_up"]


def warm_up(mesh: DeviceMesh) -> None:
    """Sums one number over each axis of ``mesh``, outermost first; not over those of one rank.

    Nothing happens where no other process takes part: fake and emulated groups, simulated ranks.

    Raises:
        MeshError: it failed, or its result is wrong; names the axis and its ranks.
    """
    if others() is None:
        return
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        if group.size() == 1:
            continue
        ranks = dist.get_process_group_ranks(group)
        what = f"the first collective on axis {axis!r} ({name_ranks(ranks)}, {mesh.device_type})"
        one = torch.ones(1, device=mesh.device_type)
        try:
            dist.all_reduce(one, group=group)
            total = int(one.item())
        except PeerFailureError:
            raise
        except RuntimeError as error:
            raise MeshError(
                f"{what} failed: {error}. One of them has ended, or they can't reach each other: look at "
                "their output first, then at their network (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, "
                "GLOO_SOCKET_IFNAME)."
            ) from error
        if total != group.size():
            raise MeshError(f"{what} gave {total} for the number of its ranks, {group.size()}.")
