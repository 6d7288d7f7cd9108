"""The ``cp`` axis of the mesh, and how the sequences of a batch lie on its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from parallel3d._layout.param_layout import local_chunk
from parallel3d.errors import Parallel3dError, WrongTypeError

Kind = Literal["ulysses", "gather", "ring"]
"""How attention sees the keys of the other ranks."""


class Part(NamedTuple):
    """Rows of a tensor that are neighbours in the sequence.

    Attributes:
        row: the first of them in the tensor.
        at: its position in the sequence.
        rows: how many.
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
        """Equal parts that the padded sequence is cut into."""
        return 2 * self.size if self.balanced else self.size

    @property
    def padded(self) -> int:
        """``length`` with the padding at its end: the next multiple of ``chunks``."""
        return -(-self.length // self.chunks) * self.chunks

    @property
    def rows(self) -> int:
        """Positions that each rank holds."""
        return self.padded // self.size

    def parts(self, rank: int) -> tuple[Part, ...]:
        """Returns what rank ``rank`` holds, in the order in which it does."""
        rows = self.padded // self.chunks
        if not self.balanced:
            return (Part(0, rank * rows, rows),)
        return Part(0, rank * rows, rows), Part(rows, (self.chunks - 1 - rank) * rows, rows)

    def whole(self) -> tuple[Part, ...]:
        """Returns the padded sequence as one part, in its own order."""
        return (Part(0, 0, self.padded),)

    def pad(self, x: Tensor, dim: int, fill: Any = 0) -> Tensor:
        """Returns ``x``, of ``length`` or already of ``padded`` along ``dim``, with ``fill`` after it."""
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
        """Returns this rank's rows along ``dim`` of ``x``, the whole sequence; padding is ``fill``."""
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
        """Returns (padded,) int64: the position of each row, all ranks' rows one rank after another."""
        chunks = torch.arange(self.padded, device=device).unflatten(0, (self.chunks, -1))
        return chunks[self._chunk_order()].flatten()

    def inverse(self, device: torch.device | str | None = None) -> Tensor:
        """Returns (padded,) int64: where each position is in the ranks' rows, one rank after another."""
        chunks = torch.arange(self.padded, device=device).unflatten(0, (self.chunks, -1))
        order = self._chunk_order()
        return chunks[[order.index(chunk) for chunk in range(self.chunks)]].flatten()

    def _chunk_order(self) -> list[int]:
        """Returns the indices of the chunks in the order in which the ranks hold them, rank after rank."""
        if not self.balanced:
            return list(range(self.size))
        return [chunk for rank in range(self.size) for chunk in (rank, self.chunks - 1 - rank)]


class CpAxis:
    """The ``cp`` mesh axis, this rank's place on it, and the sequences whose forward runs.

    Attributes:
        mesh: the one-axis DeviceMesh.
        size: the number of ranks.
        rank: this rank's coordinate; under simulated ranks a ``SymInt`` that differs by rank.
        group: its process group.
        kind: which kind of attention; ``"auto"``: ``choose`` picks one for each call.
        sequence: the ``Sequence`` of the batch whose forward is running or ran last; None before the first.
    """

    def __init__(self, mesh: DeviceMesh, kind: Kind | Literal["auto"] = "auto") -> None:
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group: ProcessGroup = mesh.get_group()
        self.kind = kind
        self.sequence: Sequence | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CpAxis:
        return self  # a copied model runs on the same ranks; process groups can't be copied
