"""Two of torch 2.13's classes for torch 2.11, which lacks them."""

from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import Shard

__all__ = ["DataParallelMeshDims", "ShardPlacementResult"]


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclass
class DataParallelMeshDims:
    """Which axes of a whole mesh ``fully_shard`` shards and replicates over.

    Attributes:
        shard, replicate: one name, or several whose axes count as one. At least one of the two.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims needs shard, replicate or both")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """``shard`` as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """``replicate`` as a tuple."""
        return _names(self.replicate)


@dataclass
class ShardPlacementResult:
    """One parameter's dim and mesh, as ``shard_placement_fn`` may return it.

    Attributes:
        placement: the dim to shard; None for the default.
        mesh_info: the mesh to shard over: a ``DeviceMesh``, or torch's ``FSDPMeshInfo``.
    """

    placement: Shard | None
    mesh_info: Any
