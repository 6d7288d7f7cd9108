"""What checkpoint.json says of a run beside its values: mesh, plan, versions."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

__all__ = ["axes_of", "describe", "mesh_of"]


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh with the most axes that a parameter of ``model`` lies on; None for a plain model."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def describe(parameters: Mapping[str, nn.Parameter]) -> Callable[[], dict[str, Any]]:
    """Looks at a model's parameters at rest, by name; what is returned says it, when asked, as it was then.

    JSON values: ``mesh`` (axes and sizes), ``plan`` (parameter -> placements), ``versions``.
    """
    # Between the two a forward may show other parameters; and strings by the hundred take their time.
    sharded = [(name, p) for name, p in parameters.items() if isinstance(p, DTensor)]
    mesh = max((p.device_mesh for _, p in sharded), key=lambda mesh: mesh.ndim, default=None)
    return partial(_described, axes_of(mesh), [(name, p.placements) for name, p in sharded])


def _described(
    axes: dict[str, int] | None, placed: list[tuple[str, tuple[Placement, ...]]]
) -> dict[str, Any]:
    import parallel3d

    return {
        "mesh": axes,
        "plan": {name: str(list(map(str, placements))) for name, placements in placed},
        "versions": {
            "parallel3d": parallel3d.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def axes_of(mesh: DeviceMesh | None) -> dict[str, int] | None:
    """Axis -> size; None for no mesh."""
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or [f"axis {number}" for number in range(mesh.ndim)]
    return dict(zip(names, mesh.shape, strict=True))
