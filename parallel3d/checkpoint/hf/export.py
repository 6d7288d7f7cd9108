"""What a model is in Hugging Face's form, tensor by tensor, and which rank holds which part of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel3d._util.arguments import counted
from parallel3d._util.quantised import packed_kind
from parallel3d.checkpoint.format.safetensors_file import NAMES
from parallel3d.checkpoint.hf.conversion import (
    Names,
    entries_of,
    file_names,
    is_transformers,
    to_file,
)
from parallel3d.checkpoint.hf.layout import Layout, Patch, in_source, whole_of, within_source
from parallel3d.checkpoint.pieces import (
    Box,
    boxes_of,
    held_boxes,
    intersection,
    pieces_of,
    whole_box,
)
from parallel3d.checkpoint.ranks import Ranks, as_checkpoint_error
from parallel3d.errors import CheckpointError


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
class Export:
    """The tensors of an export, in their order, made of the model's tensors by name."""

    outputs: tuple[OutTensor, ...]
    tensors: Mapping[str, Tensor]
    boxes: Mapping[str, Mapping[Box, list[int]]]  # with the ranks that hold them (numbers of Ranks)

    def digest(self) -> str:
        """Returns a value that is equal on ranks with equal exports."""
        outputs = [(out.name, out.layout.shape, str(out.dtype)) for out in self.outputs]
        shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in self.tensors.items()]
        text = repr((outputs, shapes, sorted(self.boxes.items())))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def parts(self, output: OutTensor, limit: int) -> Iterator[tuple[Patch, list[int]]]:
        """Yields each part of ``output`` that ranks hold in one box, of at most ``limit`` bytes, with these
        ranks; in the same order on all ranks."""
        for patch in output.layout.patches:
            shape = self.tensors[patch.source].shape
            for (offsets, sizes), holders in self.boxes[patch.source].items():
                for part in within_source(patch, shape, offsets, sizes):
                    for piece in part.bounded(limit // output.dtype.itemsize):
                        yield piece, holders


class HeldParts:
    """The parts of the model's tensors that this rank holds."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._pieces = {name: pieces_of(tensor) for name, tensor in tensors.items()}

    def of(self, patch: Patch) -> Tensor:
        """Returns the values of a part of an export, which lies in one box; a view of the shard."""
        ((_, alongs),) = in_source(patch, self._shapes[patch.source])
        first = tuple(along.start for along in alongs), (1,) * len(alongs)
        piece = next(p for p in self._pieces[patch.source] if intersection(p.box, first))
        index: list[int | slice] = []
        for (start, step, dim), offset in zip(alongs, piece.offsets, strict=True):
            begin = start - offset
            if dim is None:
                index.append(begin)
            else:
                index.append(slice(begin, begin + (patch.runs[dim].size - 1) * step + 1, step))
        dims = [along.dim for along in alongs if along.dim is not None]
        order = sorted(range(len(dims)), key=lambda i: dims[i])
        return piece.local[tuple(index)].permute(order).reshape(patch.counts)

    def parts(self, output: OutTensor) -> Iterator[Patch]:
        """Yields the parts of ``output`` that this rank holds."""
        for patch in output.layout.patches:
            for piece in self._pieces[patch.source]:
                yield from within_source(patch, self._shapes[patch.source], *piece.box)


def check_dtype(dtype: object, call: str) -> None:
    """Raises unless ``dtype`` is None or a floating-point one that safetensors have."""
    if dtype is None:
        return
    if not (isinstance(dtype, torch.dtype) and dtype in NAMES and dtype.is_floating_point):
        raise CheckpointError(f"{call}: dtype is {dtype!r}; give a floating-point one")


def plan_export(
    model: nn.Module, ranks: Ranks, names: Names, dtype: torch.dtype | None, call: str
) -> Export:
    """Plans the export; every rank makes the same plan. Collective."""
    tensors, outputs = ranks.on_each(lambda: outputs_of(model, names, dtype, call))
    export = Export(outputs, tensors, _boxes(tensors, ranks))
    digests = ranks.all(export.digest)
    problem: Exception = CheckpointError(
        "this rank's model has other names, shapes, dtypes or placements than the first rank's"
    )
    others = {rank: problem for rank, digest in enumerate(digests) if digest != digests[0]}
    if others:
        raise as_checkpoint_error(others, ranks.size)
    return export


def outputs_of(
    model: nn.Module, names: Names, dtype: torch.dtype | None, call: str
) -> tuple[dict[str, Tensor], tuple[OutTensor, ...]]:
    """Returns the model's tensors by name, and the export's, without communication."""
    tensors: dict[str, Tensor] = {}
    entries = entries_of(model)
    with_transformers = names is None and is_transformers(model)
    # Names that transformers ties to another name's weights are omitted.
    tied = getattr(model, "all_tied_weights_keys", None) if with_transformers else None
    never = getattr(model, "_keys_to_ignore_on_save", None) if with_transformers else None
    for entry in entries:
        kept = [name for name in entry.names if name not in (tied or ())] or list(entry.names[:1])
        if not with_transformers:  # load_hf, its only reader, knows which weights are tied
            kept = kept[:1]
        tensors |= {name: entry.tensor for name in kept if name not in (never or ())}
    if not tensors:
        raise CheckpointError(f"{call}: the model has no parameters and no buffers")
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise CheckpointError(
            f"{call}: {meta[0]!r} is on meta, the first of {counted(len(meta), 'tensor')} without values"
        )
    for name, tensor in tensors.items():
        if kind := packed_kind(tensor):
            raise CheckpointError(
                f"{call}: {name!r} is a {kind}, whose values are packed in blocks; a folder holds dense "
                "tensors. save_peft writes adapters alone"
            )
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{call}: {name!r} is {tensor.dtype}, which safetensors don't have"
            )
    described = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if with_transformers:
        layouts = to_file(model, described)
    else:
        in_file = {} if names is None else file_names(entries, names)
        layouts = {
            in_file.get(name, name): (whole_of(name, shape), own)
            for name, (shape, own) in described.items()
        }
    return tensors, tuple(
        OutTensor(name, layout, dtype if dtype is not None and own.is_floating_point else own)
        for name, (layout, own) in layouts.items()
    )


def _boxes(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, dict[Box, list[int]]]:
    """Returns the boxes of each tensor with the ranks that hold them, communicated for smaller meshes."""
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

    here = ranks.all(lambda: {name: boxes_of(tensors[name]) for name in smaller})
    for rank, held_there in enumerate(here):
        for name, of_name in held_there.items():
            for box in of_name:
                boxes[name].setdefault(box, []).append(rank)
    return boxes
