"""Export: the tensors that ``save_hf`` writes, their files and ranks. Every rank makes the same plan."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d.checkpoint.format.boxes import Box, whole_box
from parallel3d.checkpoint.format.safetensors_file import NAMES, header_of
from parallel3d.checkpoint.hf.conversion import is_transformers, tied_away, to_file
from parallel3d.checkpoint.hf.folder import SINGLE, Names, entries_of, file_names
from parallel3d.checkpoint.hf.layout import Layout, whole_of
from parallel3d.checkpoint.pieces import held_boxes, pieces_of
from parallel3d.checkpoint.ranks import Ranks
from parallel3d.errors import CheckpointError

_MIN_FILE = 256 << 20  # bytes; smaller files are not made to give more ranks one to write


@dataclass(frozen=True)
class OutTensor:
    """A tensor of the export, made of the model's as ``layout`` says."""

    name: str
    layout: Layout
    dtype: torch.dtype

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
        tensors: the model's, by the names that are the layouts' sources.
        boxes: of each of them, with the ranks that hold it (their numbers among the Ranks).
    """

    files: tuple[OutFile, ...]
    tensors: Mapping[str, Tensor]
    boxes: Mapping[str, Mapping[Box, list[int]]]

    def digest(self) -> str:
        """Returns a value that is equal on ranks with equal plans."""
        files = [(f.name, f.owner, f.header) for f in self.files]
        shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in self.tensors.items()]
        text = repr((files, shapes, sorted(self.boxes.items())))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def plan_export(
    model: nn.Module, ranks: Ranks, names: Names, dtype: torch.dtype | None, limit: int
) -> Export:
    """Plans the export, with files of at most ``limit`` bytes. Collective.

    Raises:
        CheckpointError: on every rank, if a tensor has no values or a dtype that the format lacks, names
            clash, or a conversion cannot be traced.
    """
    tensors, layouts = ranks.on_each(lambda: _tensors(model, names))
    boxes = _boxes(tensors, ranks)
    outputs = [
        OutTensor(name, layout, dtype if dtype is not None and own.is_floating_point else own)
        for name, (layout, own) in layouts.items()
    ]
    export = Export(tuple(_files(outputs, ranks.size, limit)), tensors, boxes)
    digests = ranks.all(export.digest)

    def check_same() -> None:
        if digests[ranks.rank] != digests[0]:
            raise CheckpointError(
                "this rank's model has other names, shapes, dtypes or placements than the first rank's"
            )

    ranks.all(check_same)
    return export


def _tensors(
    model: nn.Module, names: Names
) -> tuple[dict[str, Tensor], dict[str, tuple[Layout, torch.dtype]]]:
    """Returns the model's tensors by name, and layout and dtype of the export's."""
    tensors: dict[str, Tensor] = {}
    entries = entries_of(model)
    with_transformers = names is None and is_transformers(model)
    omitted = tied_away(model) if with_transformers else set()
    never = getattr(model, "_keys_to_ignore_on_save", None) if with_transformers else None
    for entry in entries:
        kept = [name for name in entry.names if name not in omitted] or list(entry.names[:1])
        if not with_transformers:  # load_hf, its only reader, knows which weights are tied
            kept = kept[:1]
        tensors |= {name: entry.tensor for name in kept if name not in (never or ())}
    if not tensors:
        raise CheckpointError("save_hf: the model has no parameters and no buffers")
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise CheckpointError(f"save_hf: {len(meta)} tensors are on meta, such as {meta[0]!r}")
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"save_hf: {name!r} is {tensor.dtype}, which safetensors don't have"
            )
    described = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if with_transformers:
        return tensors, to_file(model, described)
    in_file = {} if names is None else file_names(entries, names)
    return tensors, {
        in_file.get(name, name): (whole_of(name, shape), dtype)
        for name, (shape, dtype) in described.items()
    }


def _boxes(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, dict[Box, list[int]]]:
    """Returns the boxes of each tensor with the ranks that hold them. Collective.

    Ranks communicate what they hold of tensors on smaller meshes.
    """
    numbers = {rank: i for i, rank in enumerate(ranks.ranks)}
    boxes: dict[str, dict[Box, list[int]]] = {}
    smaller: list[str] = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            boxes[name] = {whole_box(tensor.shape): list(range(ranks.size))}
        elif tensor.device_mesh.size() < ranks.size:
            smaller.append(name)
            boxes[name] = {}
        else:
            held = held_boxes(tensor)
            boxes[name] = {box: sorted(numbers[r] for r in by) for box, by in held.items()}

    def held_here() -> dict[str, list[Box]]:
        return {name: [piece.box for piece in pieces_of(tensors[name])] for name in smaller}

    for rank, held_there in enumerate(ranks.all(held_here)):
        for name, of_name in held_there.items():
            for box in of_name:
                boxes[name].setdefault(box, []).append(rank)
    return boxes


def _files(outputs: list[OutTensor], ranks: int, limit: int) -> list[OutFile]:
    """Distributes tensors, in their order, to files of at most ``limit`` bytes or one tensor, and files to
    ranks.

    Large models get at least one file per rank.
    """
    total = sum(output.nbytes for output in outputs)
    limit = min(limit, max(-(-total // ranks), _MIN_FILE))
    groups: list[list[OutTensor]] = [[]]
    sizes = [0]
    for output in outputs:
        if groups[-1] and sizes[-1] + output.nbytes > limit:
            groups.append([])
            sizes.append(0)
        groups[-1].append(output)
        sizes[-1] += output.nbytes
    loads = [0] * ranks
    owners = [0] * len(groups)
    for index in sorted(range(len(groups)), key=lambda i: -sizes[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    files = []
    for index, group in enumerate(groups):
        name = f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        header = header_of({t.name: (t.dtype, t.layout.shape) for t in group})
        name = SINGLE if len(groups) == 1 else name
        files.append(OutFile(name, header, tuple(group), owners[index]))
    return files


def as_bytes(size: int | str) -> int:
    """Converts ``"5GB"``, ``"200MiB"`` or a number to a number of bytes.

    Raises CheckpointError if it is something else.
    """
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B\s*", str(size).upper())
    if not isinstance(size, str) or match is None or match[2] not in units:
        raise CheckpointError(f"max_shard_size is {size!r}; give bytes, or a text such as '5GB'")
    return max(1, int(float(match[1]) * units[match[2]]))
