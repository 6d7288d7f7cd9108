"""The exchange of an export: every rank sends what others write, and assembles what it writes itself.

One tensor at a time is assembled on a rank, from pieces of a few megabytes, each sent by one of the ranks
that hold it. All ranks know all messages and take theirs in one order, with a bounded number under way: the
first that is not done always has both its ranks at it, so none waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from math import prod

import torch
from torch import Tensor
from torch import distributed as dist

from parallel3d.checkpoint.hf.export_plan import Export, OutFile, OutTensor
from parallel3d.checkpoint.hf.layout import Patch, in_source, within_source
from parallel3d.checkpoint.pieces import Piece, pieces_of
from parallel3d.checkpoint.ranks import Ranks

__all__ = ["exchange"]

_PIECE = 4 << 20  # bytes of a message
_UNDER_WAY = 8 << 20  # bytes of the messages that a rank has begun and not ended

Write = Callable[[OutFile, OutTensor, Tensor], None]


@dataclass(frozen=True)
class _Message:
    """A part of a tensor of the export, from a holder to the tensor's owner; ``tag`` is its number."""

    tag: int
    tensor: OutTensor
    patch: Patch
    sender: int
    owner: int

    @property
    def nbytes(self) -> int:
        return prod(self.patch.counts) * self.tensor.dtype.itemsize


def exchange(export: Export, ranks: Ranks, write: Write) -> None:
    """Calls ``write(file, tensor, values)`` for each tensor this rank owns, in the files' order. Collective.

    ``values`` are contiguous, and overwritten afterwards. What fails on this rank is raised at the end: until
    then it goes on sending, as others depend on it.
    """
    me = ranks.rank
    mine = _mine(export, me)
    made: list[_Work] = []
    # Agreed on, as a rank that has no memory for its tensor would leave the others waiting.
    ranks.all(lambda: made.append(_Work(export, ranks, mine)))
    work = made[0]
    for turn, messages in enumerate(_turns(export, ranks.size)):
        own = mine[turn] if turn < len(mine) else None
        work.begin(None if own is None else own[1])
        for message in messages:
            if me in (message.sender, message.owner):
                work.take(message)
        if own is not None:
            work.finish_receiving()
            work.guarded(partial(write, *own, work.values()))
    work.finish()


def _mine(export: Export, rank: int) -> list[tuple[OutFile, OutTensor]]:
    return [(file, t) for file in export.files if file.owner == rank for t in file.tensors]


def _turns(export: Export, size: int) -> Iterator[Iterator[_Message]]:
    """The messages of each owner's first tensor, then those of each one's second, and so on."""
    numbers = iter(range(1 << 62))
    spread = iter(range(1 << 62))
    by_owner = [_mine(export, rank) for rank in range(size)]
    for turn in range(max(map(len, by_owner))):
        now = [(o, own[turn][1]) for o, own in enumerate(by_owner) if turn < len(own)]
        parts = [list(_parts(export, tensor, owner, spread)) for owner, tensor in now]
        together = chain.from_iterable(zip_longest(*parts))
        yield (_Message(next(numbers) % (1 << 30), *part) for part in together if part is not None)


def _parts(
    export: Export, tensor: OutTensor, owner: int, spread: Iterator[int]
) -> Iterator[tuple[OutTensor, Patch, int, int]]:
    for patch in tensor.layout.patches:
        shape = tuple(export.tensors[patch.source].shape)
        for box in export.boxes[patch.source]:
            holders = box.ranks
            sender = owner if owner in holders else holders[next(spread) % len(holders)]
            for part in within_source(patch, shape, box.offsets, box.sizes):
                for piece in _bounded(part, _PIECE // tensor.dtype.itemsize):
                    yield tensor, piece, sender, owner


def _bounded(patch: Patch, most: int) -> Iterator[Patch]:
    """``patch`` in pieces of at most ``most`` elements."""
    if prod(patch.counts) <= most:
        yield patch
        return
    dim = next(d for d, count in enumerate(patch.counts) if count > 1)
    count = patch.counts[dim]
    at_once = max(1, most // (prod(patch.counts) // count))
    for first in range(0, count, at_once):
        yield from _bounded(patch.part(dim, first, min(at_once, count - first)), most)


class _Work:
    """One rank's part: what it sends and receives, in order."""

    def __init__(self, export: Export, ranks: Ranks, own: list[tuple[OutFile, OutTensor]]) -> None:
        self._ranks = ranks
        most = max((tensor.nbytes for _, tensor in own), default=0)
        self._room = torch.empty(most, dtype=torch.uint8)
        self._pieces = {name: pieces_of(tensor) for name, tensor in export.tensors.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in export.tensors.items()}
        self._values: Tensor | None = None
        self._under_way: deque[tuple[dist.Work, int, bool, Callable[[], None]]] = deque()
        self._bytes = 0
        self._problem: Exception | None = None

    def begin(self, tensor: OutTensor | None) -> None:
        """``tensor`` is the one that is assembled from now on."""
        if tensor is not None:
            room = self._room[: tensor.nbytes]
            self._values = room.view(tensor.dtype).view(tensor.layout.shape)

    def values(self) -> Tensor:
        assert self._values is not None
        return self._values

    def take(self, message: _Message) -> None:
        """Begins this rank's part of a message; waits for earlier ones if too much is under way."""
        if message.sender == message.owner:
            self.guarded(lambda: self._copy_out(message, self._target(message)))
            return
        while self._under_way and self._bytes + message.nbytes > _UNDER_WAY:
            self._end_first()
        if message.sender == self._ranks.rank:
            self._send(message)
        else:
            self._receive(message)
        self._bytes += message.nbytes

    def _send(self, message: _Message) -> None:
        staged = torch.zeros(message.patch.counts, dtype=message.tensor.dtype)
        self.guarded(lambda: self._copy_out(message, staged))
        flat = staged.view(-1).view(torch.uint8)
        to = self._ranks.ranks[message.owner]
        work = dist.isend(flat, to, group=self._ranks.group, tag=message.tag)
        assert work is not None
        self._under_way.append((work, message.nbytes, False, lambda: None))

    def _receive(self, message: _Message) -> None:
        target = self._target(message)
        direct = target.is_contiguous()
        staged = target if direct else torch.empty(target.shape, dtype=target.dtype)
        flat = staged.view(-1).view(torch.uint8)
        sender = self._ranks.ranks[message.sender]
        work = dist.irecv(flat, sender, group=self._ranks.group, tag=message.tag)
        assert work is not None

        def end() -> None:
            if not direct:
                target.copy_(staged)

        self._under_way.append((work, message.nbytes, True, end))

    def _target(self, message: _Message) -> Tensor:
        return self.values()[message.patch.slices()]

    @torch.no_grad()
    def _copy_out(self, message: _Message, out: Tensor) -> None:
        """What this rank holds of the message's values, cast, to ``out``."""
        source = message.patch.source
        for patch, alongs in in_source(message.patch, self._shapes[source]):
            piece = self._holding([along.start for along in alongs], source)
            index = tuple(
                along.start - offset
                if along.dim is None
                else slice(
                    along.start - offset,
                    along.start - offset + (patch.runs[along.dim].size - 1) * along.step + 1,
                    along.step,
                )
                for along, offset in zip(alongs, piece.offsets, strict=True)
            )
            dims = [along.dim for along in alongs if along.dim is not None]
            order = sorted(range(len(dims)), key=lambda i: dims[i])
            found = piece.local[index].permute(order).reshape(patch.counts)
            starts = [
                (run.start - first.start) // first.step
                for run, first in zip(patch.runs, message.patch.runs, strict=True)
            ]
            box = tuple(slice(s, s + n) for s, n in zip(starts, patch.counts, strict=True))
            out[box].copy_(found)

    def _holding(self, index: list[int], source: str) -> Piece:
        return next(
            piece
            for piece in self._pieces[source]
            if all(
                o <= i < o + n for i, o, n in zip(index, piece.offsets, piece.sizes, strict=True)
            )
        )

    def guarded(self, action: Callable[[], None]) -> None:
        """Keeps what goes wrong for the end; after that only what others wait for is done."""
        if self._problem is None:
            try:
                action()
            except Exception as error:
                self._problem = error

    def _end_first(self) -> None:
        work, size, _, end = self._under_way.popleft()
        work.wait()
        self._bytes -= size
        self.guarded(end)

    def finish_receiving(self) -> None:
        """Waits for all that this rank has begun to receive, so that its tensor is whole."""
        while any(receives for _, _, receives, _ in self._under_way):
            self._end_first()

    def finish(self) -> None:
        """Waits for the rest, and raises what went wrong."""
        while self._under_way:
            self._end_first()
        if self._problem is not None:
            raise self._problem
