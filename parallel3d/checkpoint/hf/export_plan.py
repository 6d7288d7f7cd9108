"""What an export writes: which tensors, in which files, by which rank. Every rank makes the same plan."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d.checkpoint.format.dtypes import NAMES
from parallel3d.checkpoint.format.safetensors_file import header_of
from parallel3d.checkpoint.hf.conversion import is_transformers, tied_away, to_file
from parallel3d.checkpoint.hf.entries import Names, entries_of, file_names
from parallel3d.checkpoint.hf.folder import SINGLE
from parallel3d.checkpoint.hf.layout import Layout, whole_of
from parallel3d.checkpoint.pieces import HeldBox, held_boxes, pieces_of
from parallel3d.checkpoint.ranks import Ranks
from parallel3d.errors import CheckpointError

__all__ = ["Export", "OutFile", "OutTensor", "as_bytes", "plan_export"]

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
