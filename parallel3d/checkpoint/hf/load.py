"""load_hf: reads a Hugging Face safetensors model into a parallel one."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel3d._util import dry_run
from parallel3d._util.arguments import as_bool
from parallel3d._util.quantised import packed_kind
from parallel3d.checkpoint.format import files
from parallel3d.checkpoint.hf import conversion as hf
from parallel3d.checkpoint.hf.layout import Layout, Patch, whole_of
from parallel3d.checkpoint.pieces import pieces_of, shares_memory_within
from parallel3d.checkpoint.ranks import ranks_of
from parallel3d.checkpoint.state import bring_to_rest
from parallel3d.checkpoint.torch_formats.names import shown
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.materialize import check_can_initialise, give_memory

_COMPARED = 1 << 18  # elements compared at once


class TensorReader(ExitStack):
    """Reads parts of the tensors stored in a folder into local tensors of the model; closes files on exit."""

    def __init__(self, folder: Path, stored: Mapping[str, files.Stored]) -> None:
        super().__init__()
        self.folder, self.stored = folder, stored
        self.bytes_read = 0
        self._files: dict[str, int] = {}

    def check_files(self, names: Sequence[str]) -> None:
        """Raises CorruptCheckpointError unless the files of tensors ``names`` are long enough for them."""
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

    def dtype_of(self, patch: Patch) -> torch.dtype:
        return self.stored[patch.source].dtype

    def read(self, patch: Patch, out: Tensor) -> None:
        """Reads the values of ``patch`` into ``out``, a tensor of its shape and of any dtype and device."""
        stored = self.stored[patch.source]
        file, where = self._opened(stored.file), str(self.folder / stored.file)
        dtype, offset, strides = self.dtype_of(patch), patch.offset, patch.strides
        self.bytes_read += files.read_strided(
            file, stored.start, dtype, offset, strides, out, where
        )

    def same(self, one: Patch, two: Patch) -> bool:
        """Returns whether two patches of equal shape have the same stored values, bit for bit."""
        for parts in zip(one.bounded(_COMPARED), two.bounded(_COMPARED), strict=True):
            a, b = (torch.empty(part.counts, dtype=self.dtype_of(part)) for part in parts)
            for part, values in zip(parts, (a, b), strict=True):
                self.read(part, values)
            if a.dtype != b.dtype or files.bytes_of(a) != files.bytes_of(b):
                return False
        return True

    def _opened(self, file: str) -> int:
        if file not in self._files:
            self._files[file] = os.open(path_in(self.folder, file), os.O_RDONLY)
            self.callback(os.close, self._files[file])
        return self._files[file]


class LoadedNames(NamedTuple):
    """Names that ``load_hf(strict=False)`` ignored.

    Attributes:
        missing: the model's names that are not in the files.
        unexpected: names in the files that are not in the model.
    """

    missing: list[str]
    unexpected: list[str]


def load_hf(
    folder: str | os.PathLike[str], model: nn.Module, *, names: hf.Names = None, strict: bool = True
) -> LoadedNames:
    """Loads a Hugging Face safetensors model into ``model``, in place; every rank must call it.

    Each rank reads only what it holds, a few megabytes at a time; ranks communicate only the files' headers
    and whether all succeed. Values are cast to the model's dtypes. For a model on meta, memory is allocated
    here, and buffers that are in no file are initialised as ``materialize`` does.

    Args:
        folder: a local one with ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
        model: plain or parallel, at rest. A transformers model is converted as its ``from_pretrained`` does:
            names, stacked experts, merged projections, base-model prefixes, tied weights. Into a model of
            peft's the base model is loaded, also into the copies of ``modules_to_save``; its adapters are
            left as they are, or initialised if they are on meta.
        names: for other models: the model's name -> the file's, as a mapping (other names are unchanged) or a
            function.
        strict: raise if names are missing or unexpected, except for those that transformers ignores.

    Returns:
        Missing and unexpected names; both are empty with ``strict``.

    Raises:
        CheckpointError: on every rank, if the folder has no such model, or names, shapes or dtypes don't fit.
            The model is unchanged then; but if a file fails while it is read, a part may be loaded.
        CorruptCheckpointError: if a file is cut short or invalid.
        StateError: in a forward or backward pass or within ``full_params``; as CheckpointError on several
            ranks.
    """
    strict = as_bool("strict", strict)
    path = Path(folder)
    if dry_run.active():  # nothing is read, but memory is allocated
        give_memory(model, ())
        return LoadedNames([], [])
    ranks = ranks_of(model, "load_hf")
    ranks.all(lambda: bring_to_rest(model, "load_hf", meta_ok=True))
    stored = ranks.first(lambda: stored_tensors(path))
    with TensorReader(path, stored) as reader:
        plan = ranks.on_each(lambda: _plan(model, reader, names, strict))
        ranks.all(lambda: allocate(model, plan.initialised))
        # Entries again, as those on meta have been replaced.
        ranks.all(lambda: read_entries(_entries(model, names)[1], plan.layouts, reader))
    if plan.conversions is not None:
        # As from_pretrained does, for the export.
        plan.base._weight_conversions = plan.conversions  # type: ignore[assignment]
    return plan.names


@dataclass
class _Plan:
    """What ``load_hf`` will read into the model."""

    base: nn.Module  # whose checkpoint it is
    layouts: dict[str, Layout]  # by the first names of entries that are in the files
    names: LoadedNames
    initialised: list[tuple[str, nn.Module]]  # modules with tensors on meta that are in no file
    conversions: (
        list[Any] | None
    )  # transforms that were used, which the model stores for its export


def _plan(model: nn.Module, reader: TensorReader, names: hf.Names, strict: bool) -> _Plan:
    """Returns what to read; raises CheckpointError for all that can be wrong before values are written."""
    base, entries = _entries(model, names)
    stored = reader.stored
    in_files = {} if names is None else hf.file_names(entries, names)
    with_transformers = names is None and hf.is_transformers(base)
    if with_transformers:
        described = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
        by_name, unexpected, conversions = hf.from_file(base, entries, described)
    else:
        own = {name: in_files.get(name, name) for entry in entries for name in entry.names}
        by_name = {n: whole_of(f, stored[f].shape) for n, f in own.items() if f in stored}
        taken = {own[name] for name in by_name}
        unexpected, conversions = [name for name in stored if name not in taken], None
    layouts = {e.name: [by_name[n] for n in e.names if n in by_name] for e in entries}
    missing = [name for name in layouts if not layouts[name]]
    if with_transformers:
        missing = list(filterfalse(hf.ignored(base, "missing"), missing))
        unexpected = list(filterfalse(hf.ignored(base, "unexpected"), unexpected))
    sought = [in_files.get(name, name) for name in missing]
    wrong = (sought, unexpected) if strict else ()
    check_fits(f"{reader.folder} doesn't fit the model", entries, layouts, stored, *wrong)
    first = [(e, layouts[e.name][0]) for e in entries if layouts[e.name]]
    initialised = without_values(model, {id(entry.tensor) for entry, _ in first})
    needed = {p.source for entry, layout in first for p, _ in _needed(layout, entry.tensor)}
    reader.check_files(sorted(needed))
    _check_ties(entries, layouts, reader)
    chosen = {entry.name: layout for entry, layout in first}
    return _Plan(base, chosen, LoadedNames(missing, unexpected), initialised, conversions)


def _entries(model: nn.Module, names: hf.Names) -> tuple[nn.Module, list[hf.Entry]]:
    """Returns the model whose names the files have (a peft model's base without ``names``), its entries."""
    return hf.base_entries(model) if names is None else (model, hf.entries_of(model))


def check_fits(
    error: str,
    entries: list[hf.Entry],
    layouts: Mapping[str, list[Layout]],
    stored: Mapping[str, files.Stored],
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
) -> None:
    """Raises CheckpointError, which begins with ``error``, if stored shapes or dtypes don't fit the entries,
    or if names are ``missing`` or ``unexpected``."""
    problems = []
    for entry in entries:
        shape, own = tuple(entry.tensor.shape), entry.tensor.dtype
        if layouts[entry.name] and shares_memory_within(entry.tensor):
            problems.append(f"elements of {entry.name!r} share memory, as after expand()")
        if layouts[entry.name] and (kind := packed_kind(entry.tensor)):
            problems.append(
                f"{entry.name!r} is a {kind}, which is made from dense values: load first, quantise then"
            )
            continue
        for layout in layouts[entry.name]:
            if layout.shape != shape:
                problems.append(
                    f"{entry.name!r} is {shape} in the model and {layout.shape} in the files"
                )
                continue
            dtypes = {stored[patch.source].dtype for patch in layout.patches}
            # Eight-bit floating dtypes need scales.
            castable = {d for d in dtypes if d.is_floating_point and d.itemsize > 1}
            wrong = list(dtypes - {own} - (castable if own.is_floating_point else set()))
            if wrong:
                problems.append(
                    f"{entry.name!r} is {own} in the model and {wrong[0]} in the files, which can't be cast"
                )
    del problems[20:]
    if missing:
        problems.append(f"not in the files: {shown(missing, unexpected)}")
    if unexpected:
        problems.append(f"in the files, but not in the model: {shown(unexpected, missing)}")
    if problems:
        raise CheckpointError("\n".join([f"{error}:", *problems]))


def _needed(layout: Layout, tensor: Tensor) -> Iterator[tuple[Patch, Tensor]]:
    """Yields (stored patch to read, local view to read it into) for each part of ``tensor`` on this rank."""
    for piece in pieces_of(tensor):
        for patch in layout.patches:
            part = patch.within(piece.offsets, piece.sizes)
            if part is not None:
                yield part, piece.local[part.slices(piece.offsets)]


def _check_ties(
    entries: list[hf.Entry], layouts: Mapping[str, list[Layout]], reader: TensorReader
) -> None:
    """Raises CheckpointError if a tied tensor has different values under its names in the files."""
    for entry in entries:
        for other in layouts[entry.name][1:]:
            pairs = [_needed(each, entry.tensor) for each in (layouts[entry.name][0], other)]
            for (one, _), (two, _) in zip(*pairs, strict=True):
                if not reader.same(one, two):
                    raise CheckpointError(
                        f"{one.source!r} and {two.source!r} differ in {reader.folder}, but are one tensor "
                        "in the model, whose weights are tied"
                    )


@torch.no_grad()
def read_entries(
    entries: Sequence[hf.Entry], layouts: Mapping[str, Layout], reader: TensorReader
) -> None:
    """Reads this rank's parts of ``entries``; ``layouts``: first name of an entry -> where its values are."""
    for entry in entries:
        layout = layouts.get(entry.name)
        if layout is not None:
            for patch, target in _needed(layout, entry.tensor):
                reader.read(patch, target)


def stored_tensors(folder: Path) -> dict[str, files.Stored]:
    """Returns where each tensor of the model in ``folder`` is stored, by name; reads headers only."""
    if not folder.is_dir():
        raise CheckpointError(
            f"load_hf: {str(folder)!r} is not a folder; it reads local ones "
            "(huggingface_hub.snapshot_download brings one from the hub)"
        )
    if (folder / hf.SINGLE).exists():
        return files.read_header(path_in(folder, hf.SINGLE), hf.SINGLE)
    if not (folder / hf.INDEX).exists():
        there = sorted(path.name for path in folder.iterdir())[:10]
        raise CheckpointError(
            f"{folder} holds no {hf.SINGLE} and no {hf.INDEX}, which load_hf reads; it holds "
            f"{there or 'nothing'}"
        )
    path = path_in(folder, hf.INDEX)
    invalid = f"{path} is not an index of safetensors files"
    with files.damaged_if(invalid, (ValueError, KeyError, TypeError)):
        file_of = files.loads(files.read_json_object(path.resolve(), files.MAX_HEADER), "it")[
            "weight_map"
        ]
        if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
            raise ValueError("its weight_map is not a table of file names")
    headers = {
        file: files.read_header(path_in(folder, file), file)
        for file in sorted(set(file_of.values()))
    }
    lacking = [name for name, file in file_of.items() if name not in headers[file]]
    if lacking:
        raise CorruptCheckpointError(
            f"{folder / hf.INDEX} says that {file_of[lacking[0]]} holds {lacking[0]!r}, but it doesn't"
            + (f"; nor do the files hold {len(lacking) - 1} more" if len(lacking) > 1 else "")
        )
    return {name: headers[file][name] for name, file in file_of.items()}


def path_in(folder: Path, name: str) -> Path:
    """As ``file_in``; in a snapshot of the hub's cache, files may be links to ``../../blobs``."""
    cache = folder.resolve().parent
    return files.file_in(
        folder, name, cache.parent / "blobs" if cache.name == "snapshots" else None
    )


def without_values(model: nn.Module, loaded: Collection[int]) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of modules with tensors on meta whose ids are not in ``loaded``; raises if one
    of the modules can't initialise itself."""
    modules = []
    for name, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(t is not None and t.is_meta and id(t) not in loaded for t in own):
            modules.append((name, module))
    check_can_initialise(model, modules)
    return modules


def allocate(model: nn.Module, initialised: list[tuple[str, nn.Module]]) -> None:
    """Allocates memory for all tensors on meta, and initialises the given modules, (name, module)."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        give_memory(model, initialised)
