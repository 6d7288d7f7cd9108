"""The ``cp`` axis of the mesh, and how the sequences of a batch lie on its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d._layout.param_layout import local_chunk
from parallel3d.errors import Parallel3dError, WrongTypeError
from parallel3d.mesh.joined import MeshAxis

Kind = Literal["ulysses", "gather", "ring"]
"""How attention sees the keys of the other ranks."""


class Part(NamedTuple):
    """A run of rows in a rank's tensor that are consecutive positions of the sequence.

    Attributes:
        row: index of the first row in the tensor.
        at: its position in the sequence.
        rows: how many rows.
    """

    row: int
    at: int
    rows: int


@dataclass(frozen=True, eq=False)
class Sequence:
    """How the sequences of one batch, all of one length, lie on the ranks of ``cp``.

    The padded length is cut into ``cp`` equal chunks, one for each rank, or, ``balanced``, into twice as
    many, of which rank r has the r-th and the r-th from the end: under a causal mask all ranks then have the
    same work.

    Attributes:
        length: positions of the sequence.
        size: ranks of ``cp``.
        balanced: whether each rank has a chunk from the head and one from the tail.
        documents: (batch, padded) integers, the same on all ranks of ``cp``: which document of a packed
            sequence a position is of. Tokens attend to their own document only. Padding has a number of its
            own. None: one document.

    Raises:
        Parallel3dError: ``length`` or ``size`` is no positive integer, or ``documents`` are not integers of
            that shape.
    """

    length: int
    size: int
    balanced: bool = False
    documents: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("length", "size"):
            value = getattr(self, name)
            if not isinstance(value, int | torch.SymInt) or isinstance(value, bool) or value < 1:
                raise WrongTypeError(f"Sequence: {name}={value!r}: must be a positive integer")
        numbers = self.documents
        if numbers is not None and (
            numbers.dim() != 2 or numbers.shape[1] != self.padded or numbers.is_floating_point()
        ):
            raise Parallel3dError(
                f"Sequence: documents of shape {tuple(numbers.shape)} and {numbers.dtype}: must be integers, "
                f"(batch, {self.padded}), for length {self.length} on cp={self.size}: the whole padded "
                "sequence, also on a rank that holds a part of it"
            )

    @property
    def chunks(self) -> int:
        """The number of equal chunks that the padded sequence is cut into."""
        return 2 * self.size if self.balanced else self.size

    @property
    def padded(self) -> int:
        """The padded length: the next multiple of ``chunks``."""
        return -(-self.length // self.chunks) * self.chunks

    @property
    def rows(self) -> int:
        """The number of positions that each rank holds, padding included."""
        return self.padded // self.size

    def parts(self, rank: int) -> tuple[Part, ...]:
        """Returns where the rows of rank ``rank`` lie in the sequence, in the order of its tensors."""
        rows = self.padded // self.chunks
        if not self.balanced:
            return (Part(0, rank * rows, rows),)
        return Part(0, rank * rows, rows), Part(rows, (self.chunks - 1 - rank) * rows, rows)

    def whole(self) -> tuple[Part, ...]:
        """Returns the parts of a tensor that has the whole padded sequence: one."""
        return (Part(0, 0, self.padded),)

    def pad(self, x: Tensor, dim: int, fill: Any = 0) -> Tensor:
        """Returns ``x``, of ``length`` or ``padded`` along ``dim``, padded with ``fill`` to ``padded``."""
        missing = self.padded - x.shape[dim]
        if x.shape[dim] not in (self.length, self.padded):
            raise Parallel3dError(
                f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} positions along dim {dim}; the "
                f"sequence has {self.length}, padded {self.padded}"
            )
        if not missing:
            return x
        shape = list(x.shape)
        shape[dim] = missing
        return torch.cat([x, x.new_full(shape, fill)], dim)

    def cut(self, x: Tensor, dim: int, axis: CpAxis, fill: Any = 0) -> Tensor:
        """Returns this rank's rows of ``x``, a whole sequence along ``dim``; padding is ``fill``."""
        x = self.pad(x, dim, fill)
        if not self.balanced:
            return local_chunk(x, dim, self.size, axis.rank)
        last = self.chunks - 1 - axis.rank
        ends = [local_chunk(x, dim, self.chunks, at) for at in (axis.rank, last)]
        return torch.cat(ends, dim)

    def positions(self, axis: CpAxis, device: torch.device | str | None = None) -> Tensor:
        """Returns (rows,) int64: the positions in the sequence of this rank's rows."""
        return self.cut(torch.arange(self.padded, device=device), 0, axis)

    def order(self, device: torch.device | str | None = None) -> Tensor:
        """Returns (padded,) int64: the position of each row, for all ranks' rows concatenated."""
        held = (part for rank in range(self.size) for part in self.parts(rank))
        return torch.cat([torch.arange(at, at + n, device=device) for _, at, n in held])

    def inverse(self, device: torch.device | str | None = None) -> Tensor:
        """Returns (padded,) int64: the index of each position in all ranks' rows concatenated."""
        return self.order(device).argsort()


class CpAxis(MeshAxis):
    """The ``cp`` mesh axis.

    Attributes:
        mesh, size, rank, group: see ``MeshAxis``.
        kind: which kind of attention; ``"auto"``: ``choose`` picks one for each call.
        sequence: the ``Sequence`` of the batch whose forward is running or ran last; None before the first.
    """

    def __init__(self, mesh: DeviceMesh, kind: Kind | Literal["auto"] = "auto") -> None:
        super().__init__(mesh)
        self.kind = kind
        self.sequence: Sequence | None = None
