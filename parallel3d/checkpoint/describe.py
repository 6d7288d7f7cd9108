"""What checkpoint.json says of a run beside its values: mesh, plan, versions."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d.checkpoint.model_state import plain_name

__all__ = ["describe", "mesh_of"]


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh with the most axes that a parameter of ``model`` lies on; None for a plain model."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def describe(model: nn.Module) -> dict[str, Any]:
    """JSON values: ``mesh`` (axes and sizes), ``plan`` (parameter -> placements), ``versions``."""
    import parallel3d

    mesh = mesh_of(model)
    return {
        "mesh": None if mesh is None else _axes(mesh),
        "plan": {
            plain_name(name): str(list(map(str, param.placements)))
            for name, param in model.named_parameters()
            if isinstance(param, DTensor)
        },
        "versions": {
            "parallel3d": parallel3d.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _axes(mesh: DeviceMesh) -> dict[str, int]:
    names = mesh.mesh_dim_names or [f"axis {number}" for number in range(mesh.ndim)]
    return dict(zip(names, mesh.shape, strict=True))
