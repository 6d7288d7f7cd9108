"""The ``cp`` axis of the mesh, as attention sees it."""

from typing import Any, Literal

from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d.cp.sequence import Sequence

Kind = Literal["ulysses", "gather", "ring"]
"""How attention sees the keys of the other ranks."""


class CpAxis:
    """The ``cp`` mesh axis, this rank's place on it, and the sequences whose forward runs.

    Attributes:
        mesh: the one-axis DeviceMesh.
        size: the number of ranks.
        rank: this rank's coordinate; under simulated ranks a ``SymInt`` that differs by rank.
        group: its process group.
        kind: which kind of attention; ``"auto"``: ``choose`` picks one for each call.
        sequence: of the batch whose forward is running or ran last; None before the first.
    """

    def __init__(self, mesh: DeviceMesh, kind: Kind | Literal["auto"] = "auto") -> None:
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group: ProcessGroup = mesh.get_group()
        self.kind = kind
        self.sequence: Sequence | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CpAxis":
        return self  # a copied model runs on the same ranks; process groups can't be copied
