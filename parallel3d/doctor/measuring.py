"""What collectives take on every axis, on this rank; each rank's part of a Measurement."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from parallel3d.doctor.measurement import SMALL
from parallel3d.doctor.meeting import Meeting
from parallel3d.errors import Parallel3dError
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.mesh.build import backend_string, default_device_type, set_device
from parallel3d.planner.calibrate import COLLECTIVES, collective_seconds

__all__ = ["measure"]

_BYTES = {"cuda": 2**28, "cpu": 2**22}


def measure(layout: MeshLayout, meeting: Meeting, megabytes: float | None) -> dict[str, Any]:
    """Makes a process group and the mesh, and measures. All ranks call it.

    Args:
        megabytes: of the whole tensor; 256 on CUDA, 4 on the CPU by default.

    Returns:
        ``{"seconds": [[axis, operation, bytes, seconds], ...], "error": ""}``, or the error alone: nothing
        is raised, so that the ranks go on to tell each other.
    """
    device = default_device_type()
    try:
        set_device(device, meeting.rank)
        dist.init_process_group(
            backend_string(device),
            store=dist.PrefixStore("group", meeting.store),
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timedelta(seconds=meeting.seconds),
        )
        nbytes = _BYTES.get(device, 2**28) if megabytes is None else int(megabytes * 1e6)
        return {"seconds": _on_axes(layout, device, max(nbytes, 2 * SMALL)), "error": ""}
    except (Parallel3dError, RuntimeError) as error:  # whatever a backend says
        return {"seconds": [], "error": " ".join(str(error).split())[:500]}
    finally:
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


def _on_axes(layout: MeshLayout, device: str, nbytes: int) -> list[list[Any]]:
    mesh = build_mesh(layout, device_type=device)
    torch.set_num_threads(1)
    found: list[list[Any]] = []
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        size = group.size()
        if size == 1:
            continue
        for name in COLLECTIVES:
            for count in (SMALL, nbytes):
                seconds = collective_seconds(name, count, size, group, device)
                found.append([axis, name, count, seconds])
    return found
