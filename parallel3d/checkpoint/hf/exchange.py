"""The exchange of an export: every rank sends what others write, and assembles what it writes itself.

A rank assembles one tensor at a time, from messages of a few megabytes, each sent by one of the ranks that
hold it. All ranks enumerate all messages in one order and process their own, with a bounded number in flight.
The first message that is not complete is being processed by both its ranks, so there is no deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, zip_longest
from math import prod

import torch
from torch import Tensor
from torch import distributed as dist

from parallel3d.checkpoint.hf.export import Export, OutFile, OutTensor
from parallel3d.checkpoint.hf.layout import Patch, in_source, within_source
from parallel3d.checkpoint.pieces import pieces_of
from parallel3d.checkpoint.ranks import Ranks

_MESSAGE = 4 << 20  # bytes of a message
_IN_FLIGHT = 8 << 20  # bytes of the messages that a rank has started and not completed
_TAGS = 1 << 30

Write = Callable[[OutFile, OutTensor, Tensor], None]


@dataclass(frozen=True)
class _Message:
    """A part of a tensor of the export, from a rank that holds it to the tensor's owner."""

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

    ``values`` are contiguous, and overwritten afterwards. An error on this rank is raised at the end; until
    then it continues to send, because others depend on it.
    """
    own = _owned(export, ranks.rank)
    # Agreed on, because a rank without memory for its tensor would leave the others waiting.
    work = ranks.on_each(lambda: _Work(export, ranks, own))
    for turn, messages in enumerate(_turns(export, ranks.size)):
        current = own[turn] if turn < len(own) else None
        if current is not None:
            work.begin(current[1])
        for message in messages:
            if ranks.rank in (message.sender, message.owner):
                work.process(message)
        if current is not None:
            work.finish_receiving()
            work.guarded(partial(write, *current, work.values))
    work.finish()


def _owned(export: Export, rank: int) -> list[tuple[OutFile, OutTensor]]:
    return [(file, t) for file in export.files if file.owner == rank for t in file.tensors]


def _turns(export: Export, size: int) -> Iterator[Iterator[_Message]]:
    """Yields the messages of each owner's first tensor, then those of each one's second, and so on."""
    tags, spread = count(), count()
    by_owner = [_owned(export, rank) for rank in range(size)]
    for turn in range(max(map(len, by_owner))):
        parts = [
            list(_parts(export, own[turn][1], owner, spread))
            for owner, own in enumerate(by_owner)
            if turn < len(own)
        ]
        together = chain.from_iterable(zip_longest(*parts))
        yield (_Message(next(tags) % _TAGS, *part) for part in together if part is not None)


def _parts(
    export: Export, tensor: OutTensor, owner: int, spread: Iterator[int]
) -> Iterator[tuple[OutTensor, Patch, int, int]]:
    """Yields (tensor, patch, sender, owner) of the messages of one tensor."""
    for patch in tensor.layout.patches:
        shape = tuple(export.tensors[patch.source].shape)
        for (offsets, sizes), holders in export.boxes[patch.source].items():
            sender = owner if owner in holders else holders[next(spread) % len(holders)]
            for part in within_source(patch, shape, offsets, sizes):
                for piece in _bounded(part, _MESSAGE // tensor.dtype.itemsize):
                    yield tensor, piece, sender, owner


def _bounded(patch: Patch, limit: int) -> Iterator[Patch]:
    """Divides ``patch`` into parts of at most ``limit`` elements."""
    if prod(patch.counts) <= limit:
        yield patch
        return
    dim = next(d for d, size in enumerate(patch.counts) if size > 1)
    size = patch.counts[dim]
    at_once = max(1, limit // (prod(patch.counts) // size))
    for first in range(0, size, at_once):
        yield from _bounded(patch.part(dim, first, min(at_once, size - first)), limit)


class _Work:
    """What one rank sends and receives, in order.

    Attributes:
        values: the tensor that is being assembled.
    """

    values: Tensor

    def __init__(self, export: Export, ranks: Ranks, own: list[tuple[OutFile, OutTensor]]) -> None:
        self._ranks = ranks
        largest = max((tensor.nbytes for _, tensor in own), default=0)
        self._memory = torch.empty(largest, dtype=torch.uint8)
        self._pieces = {name: pieces_of(tensor) for name, tensor in export.tensors.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in export.tensors.items()}
        # (work, bytes, whether it receives, what to do when it is complete)
        self._in_flight: deque[tuple[dist.Work, int, bool, Callable[[], object]]] = deque()
        self._bytes = 0
        self._problem: Exception | None = None

    def begin(self, tensor: OutTensor) -> None:
        """Starts to assemble ``tensor``."""
        memory = self._memory[: tensor.nbytes]
        self.values = memory.view(tensor.dtype).view(tensor.layout.shape)

    def process(self, message: _Message) -> None:
        """Starts this rank's part of a message, after completing earlier ones if too much is in flight."""
        if message.sender == message.owner:
            self.guarded(lambda: self._copy_out(message, self._target(message)))
            return
        while self._in_flight and self._bytes + message.nbytes > _IN_FLIGHT:
            self._complete_first()
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
        self._in_flight.append((work, message.nbytes, False, lambda: None))

    def _receive(self, message: _Message) -> None:
        target = self._target(message)
        direct = target.is_contiguous()
        staged = target if direct else torch.empty(target.shape, dtype=target.dtype)
        flat = staged.view(-1).view(torch.uint8)
        sender = self._ranks.ranks[message.sender]
        work = dist.irecv(flat, sender, group=self._ranks.group, tag=message.tag)
        assert work is not None
        then = (lambda: None) if direct else partial(target.copy_, staged)
        self._in_flight.append((work, message.nbytes, True, then))

    def _target(self, message: _Message) -> Tensor:
        return self.values[message.patch.slices()]

    @torch.no_grad()
    def _copy_out(self, message: _Message, out: Tensor) -> None:
        """Copies the message's values, which this rank holds, to ``out``, and casts them."""
        source = message.patch.source
        for patch, alongs in in_source(message.patch, self._shapes[source]):
            first = [along.start for along in alongs]
            piece = next(
                piece
                for piece in self._pieces[source]
                if all(
                    o <= i < o + n
                    for i, o, n in zip(first, piece.offsets, piece.sizes, strict=True)
                )
            )
            index: list[int | slice] = []
            for (start, step, dim), offset in zip(alongs, piece.offsets, strict=True):
                begin = start - offset
                if dim is None:
                    index.append(begin)
                else:
                    index.append(slice(begin, begin + (patch.runs[dim].size - 1) * step + 1, step))
            dims = [along.dim for along in alongs if along.dim is not None]
            order = sorted(range(len(dims)), key=lambda i: dims[i])
            values = piece.local[tuple(index)].permute(order).reshape(patch.counts)
            starts = [
                (run.start - whole.start) // whole.step
                for run, whole in zip(patch.runs, message.patch.runs, strict=True)
            ]
            box = tuple(slice(s, s + n) for s, n in zip(starts, patch.counts, strict=True))
            out[box].copy_(values)

    def guarded(self, action: Callable[[], object]) -> None:
        """Calls ``action`` and keeps its error for the end; after an error only messages are processed."""
        if self._problem is None:
            try:
                action()
            except Exception as error:
                self._problem = error

    def _complete_first(self) -> None:
        work, size, _, then = self._in_flight.popleft()
        work.wait()
        self._bytes -= size
        self.guarded(then)

    def finish_receiving(self) -> None:
        """Waits for all messages that this rank receives, so that its tensor is complete."""
        while any(receives for _, _, receives, _ in self._in_flight):
            self._complete_first()

    def finish(self) -> None:
        """Waits for the rest, and raises the error that was kept."""
        while self._in_flight:
            self._complete_first()
        if self._problem is not None:
            raise self._problem
