"""load_hf: a Hugging Face safetensors model, straight into a parallel one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from parallel3d._util.arguments import as_bool
from parallel3d.checkpoint.format.safetensors_file import DTYPES, Stored, bytes_of
from parallel3d.checkpoint.hf.conversion import (
    Converted,
    Layout,
    Patch,
    from_file,
    ignored,
    is_transformers,
    whole_of,
)
from parallel3d.checkpoint.hf.folder import (
    Entry,
    Names,
    bring_to_rest,
    entries_of,
    file_names,
    listed,
    mark_changed,
    memory_for,
    path_in,
    stored_tensors,
    without_values,
)
from parallel3d.checkpoint.pieces import pieces_of, shares_memory_within
from parallel3d.checkpoint.ranks import Ranks, ranks_of
from parallel3d.errors import CheckpointError, CorruptCheckpointError

# Reader: brings parts of stored tensors into tensors of the model, a bounded piece at a time.

_PIECE = 4 << 20  # bytes read at once, and then copied to where they belong
_GAP = 4096  # bytes not wanted that are read along: a page, which the disk brings in any case


class Reader:
    """Opens a folder's files as they are needed.

    Attributes:
        bytes_read: so far.
    """

    def __init__(self, folder: Path, stored: Mapping[str, Stored]) -> None:
        self.folder, self.stored = folder, stored
        self.bytes_read = 0
        self._files: dict[str, int] = {}
        self._scratch: Tensor | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        files, self._files = self._files, {}
        for opened in files.values():
            os.close(opened)

    def check_there(self, names: Sequence[str]) -> None:
        """Raises CorruptCheckpointError unless the files of ``names`` are there and long enough."""
        ends: dict[str, int] = {}
        for name in names:
            stored = self.stored[name]
            ends[stored.file] = max(ends.get(stored.file, 0), stored.end)
        for file, end in ends.items():
            size = os.fstat(self._opened(file)).st_size
            if size < end:
                raise CorruptCheckpointError(
                    f"{self.folder / file} has {size} bytes on this rank, and should have {end} at least"
                )

    def read(self, patch: Patch, out: Tensor) -> None:
        """What ``patch`` says of its source, into ``out``, of its counts and any dtype and device."""
        stored = self.stored[patch.source]
        self._read(stored, DTYPES[stored.dtype], patch.offset, patch.strides, out)

    def same(self, one: Patch, two: Patch) -> bool:
        """Whether two patches of equal counts have the same values, bit for bit."""
        rows = one.counts[0] if one.counts else 1
        at_once = max(1, _PIECE * rows // max(1, 16 * prod(one.counts)))
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            parts = [each.part(0, first, count) if each.counts else each for each in (one, two)]
            a, b = (torch.empty(p.counts, dtype=self.dtype_of(p)) for p in parts)
            self.read(parts[0], a)
            self.read(parts[1], b)
            if a.dtype != b.dtype or bytes_of(a) != bytes_of(b):
                return False
        return True

    def dtype_of(self, patch: Patch) -> torch.dtype:
        return DTYPES[self.stored[patch.source].dtype]

    def _read(
        self,
        stored: Stored,
        dtype: torch.dtype,
        offset: int,
        strides: Sequence[int],
        out: Tensor,
    ) -> None:
        dims = sorted((d for d in range(out.dim()) if out.shape[d] > 1), key=lambda d: strides[d])
        span, dense = (
            1,
            True,
        )  # of what is inside the outermost dim, in elements; no large gaps in it
        for dim in dims[:-1]:
            dense &= (strides[dim] - span) * dtype.itemsize <= _GAP
            span += (out.shape[dim] - 1) * strides[dim]
        outer = dims[-1] if dims else None
        stride, count = (1, 1) if outer is None else (strides[outer], out.shape[outer])
        whole = span + (count - 1) * stride
        if _is_image(out, strides, whole, dtype):
            self._fill(stored, offset * dtype.itemsize, bytes_of(out))
            return
        at_once = 1
        if dense and (stride - span) * dtype.itemsize <= _GAP:
            at_once = max(1, _PIECE // (stride * dtype.itemsize))
        if outer is None or (at_once >= count and dense):
            self._read_block(stored, dtype, offset, whole, strides, out)
            return
        for first in range(0, count, at_once):
            part = out.narrow(outer, first, min(at_once, count - first))
            self._read(stored, dtype, offset + first * stride, strides, part)

    def _read_block(
        self,
        stored: Stored,
        dtype: torch.dtype,
        offset: int,
        span: int,
        strides: Sequence[int],
        out: Tensor,
    ) -> None:
        """``span`` elements from ``offset`` on in one go, of which ``out`` gets those at ``strides``."""
        size = span * dtype.itemsize
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(max(size, min(_PIECE, 1 << 16)), dtype=torch.uint8)
        scratch = self._scratch[:size]
        self._fill(stored, offset * dtype.itemsize, bytes_of(scratch))
        out.copy_(scratch.view(dtype).as_strided(out.shape, strides))

    def _fill(self, stored: Stored, offset: int, view: memoryview) -> None:
        opened, at = self._opened(stored.file), stored.start + offset
        while view:
            n = os.preadv(opened, [view[: 1 << 30]], at)
            if not n:
                raise CorruptCheckpointError(f"{self.folder / stored.file} ends at byte {at}")
            self.bytes_read += n
            at, view = at + n, view[n:]

    def _opened(self, file: str) -> int:
        if file not in self._files:
            self._files[file] = os.open(path_in(self.folder, file), os.O_RDONLY)
        return self._files[file]


def _is_image(out: Tensor, strides: Sequence[int], span: int, dtype: torch.dtype) -> bool:
    """Whether ``out``'s memory is to become just what is in the file."""
    return (
        out.dtype == dtype
        and out.device.type == "cpu"
        and not out.is_conj()
        and not out.is_neg()
        and out.numel() == span
        and all(out.stride(d) == strides[d] for d in range(out.dim()) if out.shape[d] > 1)
    )


T = TypeVar("T")


class LoadedNames(NamedTuple):
    """What ``load_hf(strict=False)`` left alone.

    Attributes:
        missing: names of the model's that the file doesn't have.
        unexpected: names in the file that the model has no place for.
    """

    missing: list[str]
    unexpected: list[str]


def load_hf(
    folder: str | os.PathLike[str], model: nn.Module, *, names: Names = None, strict: bool = True
) -> LoadedNames:
    """Loads a Hugging Face safetensors model into ``model``, in place; every rank must call it.

    Each rank reads only what it holds, a few megabytes at a time: nothing is communicated but what the
    files are and whether all ranks succeed. Values are cast to the dtypes that the model has. A model on meta
    gets its memory here; buffers that are in no file are initialised as ``materialize`` does.

    Args:
        folder: a local one with ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
        model: plain or parallel, at rest. A transformers model is converted as its ``from_pretrained``
            does: names, stacked experts, merged projections, base-model prefixes, tied weights.
        names: for other models: its name -> the file's, as a mapping (names not in it stay) or a function.
        strict: raise if names are missing or unexpected, other than those that transformers passes over.

    Returns:
        Missing and unexpected names; both are empty with ``strict``.

    Raises:
        CheckpointError: on every rank: the folder holds no such model, names, shapes or dtypes don't
            fit. The model is unchanged then; but if a file fails while it is read, some of it may be loaded.
        CorruptCheckpointError: a file is cut short, or can't be what it says.
        StateError: within a forward, backward or ``full_params``; as CheckpointError on several ranks.
    """
    strict = as_bool("strict", strict)
    path = Path(folder)
    ranks = ranks_of(model, "load_hf")
    ranks.all(lambda: bring_to_rest(model, "load_hf"))
    stored = ranks.first(lambda: stored_tensors(path))
    with Reader(path, stored) as reader:
        plan = _on_each(ranks, lambda: _plan(model, reader, names, strict))
        ranks.all(lambda: memory_for(model, plan.initialised))
        ranks.all(lambda: _read(model, plan, reader))
    if plan.conversions is not None:
        # As from_pretrained does, for the export.
        model._weight_conversions = plan.conversions  # type: ignore[assignment]
    return LoadedNames(plan.missing, plan.unexpected)


def _on_each(ranks: Ranks, function: Callable[[], T]) -> T:
    """What ``function`` returns on this rank; raises on all if it does on one."""
    found: list[T] = []
    ranks.all(lambda: found.append(function()))
    return found[0]


@dataclass
class _Plan:
    """What is to be read into the model.

    Attributes:
        layouts: of which of the files' tensors those of the model are made, by its names.
        missing, unexpected: as in LoadedNames.
        initialised: modules with something on meta that is in no file.
        conversions: transformers' that the names went through; None without it.
    """

    layouts: dict[str, Layout]
    missing: list[str]
    unexpected: list[str]
    initialised: list[tuple[str, nn.Module]]
    conversions: list[Any] | None


def _plan(model: nn.Module, reader: Reader, names: Names, strict: bool) -> _Plan:
    """Raises CheckpointError for all that can be wrong before the first value is written."""
    entries, stored = entries_of(model), reader.stored
    converted = _converted(model, entries, stored, names)
    by_name = converted.layouts
    missing = [e for e in entries if not any(name in by_name for name in e.names)]
    unexpected, gone = converted.unexpected, [entry.name for entry in missing]
    if names is None and is_transformers(model):
        pass_missing, pass_unexpected = ignored(model, "missing"), ignored(model, "unexpected")
        gone = [name for name in gone if not pass_missing(name)]
        unexpected = [name for name in unexpected if not pass_unexpected(name)]
    found = {e.name: [by_name[n] for n in e.names if n in by_name] for e in entries}
    problems = _misfits(entries, found, stored)
    if strict and gone:
        given = None if names is None else file_names(entries, names)
        sought = [given[name] if given else name for name in gone]
        problems.append(f"not in the files: {listed(sought, unexpected)}")
    if strict and unexpected:
        problems.append(f"in the files, but not in the model: {listed(unexpected, gone)}")
    if problems:
        raise CheckpointError("\n".join([f"{reader.folder} doesn't fit the model:", *problems]))
    absent = {id(entry.tensor) for entry in missing}
    loaded = {id(entry.tensor) for entry in entries} - absent
    initialised = without_values(model, loaded)
    layouts = {name: each[0] for name, each in found.items() if each}
    _check_files(entries, layouts, reader)
    _check_ties(entries, found, reader)
    return _Plan(layouts, gone, unexpected, initialised, converted.used)


def _converted(
    model: nn.Module, entries: list[Entry], stored: Mapping[str, Stored], names: Names
) -> Converted:
    strange = {name: s.dtype for name, s in stored.items() if s.dtype not in DTYPES}
    if strange:
        name, dtype = next(iter(strange.items()))
        raise CheckpointError(f"{name!r} is stored as {dtype}, which torch has no dtype for")
    if names is None and is_transformers(model):
        return from_file(model, entries, {n: (s.shape, DTYPES[s.dtype]) for n, s in stored.items()})
    own = [name for entry in entries for name in entry.names]
    given = {name: name for name in own} if names is None else file_names(entries, names)
    layouts = {n: whole_of(f, stored[f].shape) for n, f in given.items() if f in stored}
    taken = {given[name] for name in layouts}
    return Converted(layouts, [name for name in stored if name not in taken], None)


def _misfits(
    entries: list[Entry], found: Mapping[str, list[Layout]], stored: Mapping[str, Stored]
) -> list[str]:
    """What is wrong with shapes and dtypes, a line each."""
    problems = []
    for entry in entries:
        if found[entry.name] and shares_memory_within(entry.tensor):
            problems.append(f"elements of {entry.name!r} share memory, as after expand()")
        for layout in found[entry.name]:
            shape = tuple(entry.tensor.shape)
            if layout.shape != shape:
                problems.append(
                    f"{entry.name!r} is {shape} in the model and {layout.shape} in the files"
                )
                continue
            kinds = {DTYPES[stored[patch.source].dtype] for patch in layout.patches}
            wrong = [kind for kind in kinds if not _casts(kind, entry.tensor.dtype)]
            if wrong:
                problems.append(
                    f"{entry.name!r} is {entry.tensor.dtype} in the model and {wrong[0]} in the files, which "
                    "can't be cast"
                )
    return problems[:20]


def _casts(stored: torch.dtype, own: torch.dtype) -> bool:
    """Between floating dtypes; not from eight bits, which need the scales that they were stored with."""
    both = stored.is_floating_point and own.is_floating_point
    return stored == own or (both and stored.itemsize > 1)


def _check_files(entries: list[Entry], layouts: Mapping[str, Layout], reader: Reader) -> None:
    """This rank can open what it will read, and finds it as long as the first rank did."""
    needed = {
        patch.source
        for entry in entries
        if entry.name in layouts
        for patch, _ in _needed(layouts[entry.name], entry.tensor)
    }
    reader.check_there(sorted(needed))


def _needed(layout: Layout, tensor: Tensor) -> Iterator[tuple[Patch, Tensor]]:
    """What this rank holds of ``tensor``: where it comes from, and the view that it goes to."""
    for piece in pieces_of(tensor):
        for patch in layout.patches:
            part = patch.within(piece.offsets, piece.sizes)
            if part is not None:
                yield part, piece.local[part.slices(piece.offsets)]


def _check_ties(entries: list[Entry], found: Mapping[str, list[Layout]], reader: Reader) -> None:
    """A file that has several names of one tensor has the same values under each."""
    for entry in entries:
        layouts = found[entry.name]
        for other in layouts[1:]:
            pairs = [_needed(each, entry.tensor) for each in (layouts[0], other)]
            for (one, _), (two, _) in zip(*pairs, strict=True):
                if not reader.same(one, two):
                    raise CheckpointError(
                        f"{one.source!r} and {two.source!r} differ in {reader.folder}, but are one tensor "
                        "in the model, whose weights are tied"
                    )


@torch.no_grad()
def _read(model: nn.Module, plan: _Plan, reader: Reader) -> None:
    for entry in entries_of(model):
        layout = plan.layouts.get(entry.name)
        if layout is None:
            continue
        for patch, target in _needed(layout, entry.tensor):
            reader.read(patch, target)
        for piece in pieces_of(entry.tensor):
            mark_changed(piece.local)
