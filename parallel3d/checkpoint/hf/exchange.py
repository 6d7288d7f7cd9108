"""The exchange of an export: every rank sends what others write, and assembles what it writes itself.

One tensor at a time is assembled on a rank, from pieces of a few megabytes, each sent by one of the ranks
that hold it. All ranks know all messages and take theirs in one order, with a bounded number under way: the
first that is not done always has both its ranks at it, so none waits for ever.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from parallel3d.checkpoint.format.safetensors_file import NAMES, header_of
from parallel3d.checkpoint.hf.conversion import (
    Layout,
    Patch,
    in_source,
    is_transformers,
    tied_away,
    to_file,
    whole_of,
    within_source,
)
from parallel3d.checkpoint.hf.folder import SINGLE, Names, entries_of, file_names
from parallel3d.checkpoint.pieces import HeldBox, Piece, held_boxes, pieces_of
from parallel3d.checkpoint.ranks import Ranks
from parallel3d.errors import CheckpointError

# What an export writes: which tensors, in which files, by which rank. Every rank makes the same
# plan.

_WORTH_A_FILE = 256 << 20  # bytes; less is not split to give more ranks a file to write


@dataclass(frozen=True)
class OutTensor:
    """A tensor of the export: made of the model's as ``layout`` says; ``at`` is its place in its file."""

    name: str
    layout: Layout
    dtype: torch.dtype
    at: int

    @property
    def nbytes(self) -> int:
        return prod(self.layout.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutFile:
    """A file of the export, written by the rank ``owner`` (its number among the Ranks)."""

    name: str
    header: bytes
    tensors: tuple[OutTensor, ...]
    owner: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Export:
    """A plan.

    Attributes:
        files: in the order of their names.
        tensors: the model's, by the names that the layouts give their sources.
        boxes: what of each lies where; ranks are numbers among the Ranks.
    """

    files: tuple[OutFile, ...]
    tensors: Mapping[str, Tensor]
    boxes: Mapping[str, Sequence[HeldBox]]

    def digest(self) -> str:
        """Equal on ranks with equal plans."""
        files = [(f.name, f.owner, f.header) for f in self.files]
        shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in self.tensors.items()]
        text = repr((files, shapes, sorted(self.boxes.items())))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def plan_export(
    model: nn.Module, ranks: Ranks, names: Names, dtype: torch.dtype | None, limit: int
) -> Export:
    """Collective: where tensors don't lie on all ranks, they tell each other what they hold.

    Raises:
        CheckpointError: on every rank: something has no values, a dtype the format lacks, names that clash,
            a conversion that can't be followed.
    """
    made: list[tuple[dict[str, Tensor], dict[str, tuple[Layout, torch.dtype]]]] = []
    ranks.all(lambda: made.append(_tensors(model, names)))
    tensors, layouts = made[0]
    made_boxes = _boxes(tensors, ranks)
    sizes = {
        name: (layout, dtype if dtype is not None and own.is_floating_point else own)
        for name, (layout, own) in layouts.items()
    }
    export = Export(tuple(_files(sizes, ranks.size, limit)), tensors, made_boxes)
    digests = ranks.all(export.digest)
    ranks.all(lambda: _check_same(digests, ranks.rank))
    return export


def _check_same(digests: Sequence[str], rank: int) -> None:
    if digests[rank] != digests[0]:
        raise CheckpointError(
            "this rank's model has other names, shapes, dtypes or placements than the first rank's"
        )


def _tensors(
    model: nn.Module, names: Names
) -> tuple[dict[str, Tensor], dict[str, tuple[Layout, torch.dtype]]]:
    """The model's tensors by name, and layout and dtype of the export's."""
    tensors: dict[str, Tensor] = {}
    entries = entries_of(model)
    with_transformers = names is None and is_transformers(model)
    left_out = tied_away(model) if with_transformers else set()
    never = (
        set(getattr(model, "_keys_to_ignore_on_save", None) or ()) if with_transformers else set()
    )
    given = None if names is None else file_names(entries, names)
    for entry in entries:
        kept = [name for name in entry.names if name not in left_out] or list(entry.names[:1])
        if not with_transformers:  # nobody but load_hf reads it, which knows what is tied
            kept = kept[:1]
        tensors |= {name: entry.tensor for name in kept if name not in never}
    _check_storable(tensors)
    facts = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if with_transformers:
        return tensors, to_file(model, facts)
    return tensors, {
        given[name] if given else name: (whole_of(name, shape), dtype)
        for name, (shape, dtype) in facts.items()
    }


def _check_storable(tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        raise CheckpointError("save_hf: the model has no parameters and no buffers")
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise CheckpointError(f"save_hf: {len(meta)} tensors are on meta, {meta[0]!r} for one")
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"save_hf: {name!r} is {tensor.dtype}, which safetensors don't have"
            )


def _boxes(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, list[HeldBox]]:
    """What of each tensor lies on which ranks; by name."""
    numbers = {rank: i for i, rank in enumerate(ranks.ranks)}
    found: dict[str, list[HeldBox]] = {}
    told: list[str] = []  # names of tensors on meshes that this rank alone can't speak for
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            whole = HeldBox((0,) * tensor.dim(), tuple(tensor.shape), tuple(range(ranks.size)))
            found[name] = [whole]
        elif tensor.device_mesh.size() < ranks.size:
            told.append(name)
        else:
            found[name] = [
                HeldBox(box.offsets, box.sizes, tuple(sorted(numbers[r] for r in box.ranks)))
                for box in held_boxes(tensor)
            ]
    mine = lambda: {n: [(p.offsets, p.sizes) for p in pieces_of(tensors[n])] for n in told}  # noqa: E731
    holders: dict[str, dict[Any, list[int]]] = {}
    for rank, theirs in enumerate(ranks.all(mine)):
        for name, boxes in theirs.items():
            for box in boxes:
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
    for name, by_box in holders.items():
        found[name] = [HeldBox(o, s, tuple(held)) for (o, s), held in by_box.items()]
    return found


# -- files ---------------------------------------------------------------------------------------------


def _files(
    tensors: Mapping[str, tuple[Layout, torch.dtype]], ranks: int, limit: int
) -> list[OutFile]:
    """``tensors`` in their order, in files of at most ``limit`` bytes, or of one tensor; and their owners.

    Large models get a file a rank at least.
    """
    sizes = {name: prod(lay.shape) * dtype.itemsize for name, (lay, dtype) in tensors.items()}
    limit = min(limit, max(-(-sum(sizes.values()) // ranks), _WORTH_A_FILE))
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    loads = [0] * ranks
    owners = [0] * len(groups)
    by_size = sorted(range(len(groups)), key=lambda i: -sum(sizes[name] for name in groups[i]))
    for index in by_size:
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sum(sizes[name] for name in groups[index])
    return [
        _file(_file_name(i, len(groups)), {name: tensors[name] for name in group}, owners[i])
        for i, group in enumerate(groups)
    ]


def _file_name(index: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _file(name: str, tensors: Mapping[str, tuple[Layout, torch.dtype]], owner: int) -> OutFile:
    header = header_of({key: (dtype, layout.shape) for key, (layout, dtype) in tensors.items()})
    placed: list[OutTensor] = []
    at = len(header)
    for key, (layout, dtype) in tensors.items():
        placed.append(OutTensor(key, layout, dtype, at))
        at += placed[-1].nbytes
    return OutFile(name, header, tuple(placed), owner)


def as_bytes(size: int | str) -> int:
    """``"5GB"``, ``"200MiB"`` or a number as a number of bytes.

    Raises:
        CheckpointError: it is none.
    """
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B\s*", str(size).upper())
    if not isinstance(size, str) or matched is None or matched[2] not in units:
        raise CheckpointError(f"max_shard_size is {size!r}; give bytes, or a text such as '5GB'")
    return max(1, int(float(matched[1]) * units[matched[2]]))


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
