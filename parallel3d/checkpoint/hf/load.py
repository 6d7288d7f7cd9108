"""load_hf: a Hugging Face safetensors model, straight into a parallel one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from parallel3d._arguments import as_bool
from parallel3d.checkpoint.format.dtypes import DTYPES
from parallel3d.checkpoint.format.safetensors_file import Stored
from parallel3d.checkpoint.hf.conversion import Converted, from_file, ignored, is_transformers
from parallel3d.checkpoint.hf.entries import Entry, Names, entries_of, file_names, listed
from parallel3d.checkpoint.hf.folder import stored_tensors
from parallel3d.checkpoint.hf.layout import Layout, Patch, whole_of
from parallel3d.checkpoint.hf.reader import Reader
from parallel3d.checkpoint.hf.storage import (
    bring_to_rest,
    mark_changed,
    memory_for,
    without_values,
)
from parallel3d.checkpoint.pieces import pieces_of, shares_memory_within
from parallel3d.checkpoint.ranks import Ranks, ranks_of
from parallel3d.errors import CheckpointError

__all__ = ["LoadedNames", "load_hf"]

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
