"""Reader: DCP's StorageReader for the folders of this package.

DCP plans on every rank before any rank reads. A rank verifies what it is going to read while it plans:
so damage anywhere is known to all ranks before a value of the model has changed.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner import LoadPlanner as TorchLoadPlanner
from torch.futures import Future

from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format.folder import opened
from parallel3d.checkpoint.format.index import Chunk, Index
from parallel3d.checkpoint.format.safetensors_file import BLOCK, BlockCheck, bytes_of, read_into
from parallel3d.checkpoint.values import decode, encode

_ROWS = 1 << 20  # bytes that are read at once where not all of them are wanted


class Reader(StorageReader):
    """Reads for ``torch.distributed.checkpoint.load`` what ``Writer`` has written::

        dcp.load(state, storage_reader=Reader(folder), planner=LoadPlanner())

    Args:
        path: the checkpoint's folder.
        index: its index, if it has been read.

    Raises:
        CorruptCheckpointError: it is no whole checkpoint. In ``dcp.load``: what this rank reads isn't what
            was saved; nothing has been read into the state by then, on any rank.
    """

    def __init__(self, path: str | os.PathLike[str], index: Index | None = None) -> None:
        self.path = Path(path)
        self.index = folders.open_checkpoint(self.path)[0] if index is None else index

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is such a folder."""
        return folders.is_checkpoint(Path(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """For the next load, of another folder if one is given."""
        if checkpoint_id is not None and Path(checkpoint_id) != self.path:
            self.path = Path(checkpoint_id)
            self.index = folders.open_checkpoint(self.path)[0]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the index says, in DCP's words."""
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in self.index.objects}
        for name, entry in self.index.tensors.items():
            properties = TensorProperties(entry.dtype)
            chunks = [
                ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                for c in entry.chunks
            ]
            found[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return Metadata(found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Finds chunks by where they begin."""
        self._chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, entry in self.index.tensors.items()
            for chunk in entry.chunks
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verifies all blocks and values that this rank will read."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                decode(self.index.objects[item.storage_index.fqn])
        wanted: dict[str, dict[int, tuple[int, int]]] = {}
        for part in self._parts(plan):
            blocks = wanted.setdefault(part.chunk.file, {})
            for number in part.blocks:
                begin = number * BLOCK
                size = min(BLOCK, part.chunk_bytes - begin)
                blocks[part.chunk.begin + begin] = size, part.chunk.crc[number]
        check = BlockCheck()
        for name, blocks in wanted.items():
            with opened(self.path / name) as file:
                for begin, (size, crc) in sorted(blocks.items()):
                    check.verify(file, begin, size, crc, os.fspath(self.path / name))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: TorchLoadPlanner) -> Future[None]:
        """Reads into the state's tensors."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                text = json.dumps(self.index.objects[item.storage_index.fqn])
                planner.load_bytes(item, io.BytesIO(text.encode()))
        by_file: dict[str, list[_Part]] = {}
        for part in self._parts(plan):
            by_file.setdefault(part.chunk.file, []).append(part)
        for name, parts in by_file.items():
            with opened(self.path / name) as file:
                for part in sorted(parts, key=lambda part: part.chunk.begin + part.first_byte):
                    target = planner.resolve_tensor(part.item).detach()
                    part.read(file, target, os.fspath(self.path / name))
                    planner.commit_tensor(part.item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _parts(self, plan: LoadPlan) -> Iterator[_Part]:
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO and item.lengths.numel():
                chunk = self._chunks[item.storage_index]
                dtype = self.index.tensors[item.storage_index.fqn].dtype
                yield _Part(item, chunk, dtype)


@dataclass(frozen=True)
class _Part:
    """A box of a chunk that is to be read."""

    item: ReadItem
    chunk: Chunk
    dtype: torch.dtype

    @property
    def chunk_bytes(self) -> int:
        return prod(self.chunk.sizes) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one row of the chunk."""
        return prod(self.chunk.sizes[1:]) * self.dtype.itemsize

    @property
    def first_byte(self) -> int:
        """Of the rows that are wanted, from the chunk's begin."""
        return self.item.storage_offsets[0] * self.row_bytes if self.chunk.sizes else 0

    @property
    def nbytes(self) -> int:
        """Of these rows."""
        return self.item.lengths[0] * self.row_bytes if self.chunk.sizes else self.chunk_bytes

    @property
    def blocks(self) -> range:
        """Numbers of the blocks that have bytes of these rows."""
        return range(self.first_byte // BLOCK, -(-(self.first_byte + self.nbytes) // BLOCK))

    def read(self, file: int, target: torch.Tensor, where: str) -> None:
        """Fills ``target``, of the sizes that are wanted."""
        at = self.chunk.begin + self.first_byte
        whole_rows = tuple(self.item.lengths[1:]) == self.chunk.sizes[1:]
        direct = target.is_cpu and target.dtype == self.dtype and target.is_contiguous()
        if whole_rows and direct and not target.is_conj() and not target.is_neg():
            read_into(file, bytes_of(target), at, where)
            increment_version(target)
            return
        if not self.chunk.sizes:
            target = target.unsqueeze(0)
        rows = self._rows_at_once(whole_rows)
        sizes = (min(rows, len(target)), *self.chunk.sizes[1:])
        buffer = torch.empty(sizes, dtype=self.dtype)
        columns = tuple(
            slice(start, start + length)
            for start, length in zip(
                self.item.storage_offsets[1:], self.item.lengths[1:], strict=True
            )
        )
        for row in range(0, len(target), rows):
            part = buffer[: min(rows, len(target) - row)]
            read_into(file, bytes_of(part), at + row * max(self.row_bytes, 1), where)
            with torch.inference_mode(target.is_inference()):
                target[row : row + rows].copy_(part[(slice(None), *columns)])

    def _rows_at_once(self, whole: bool) -> int:
        size = max(self.row_bytes, 1)
        return max(1, (16 * _ROWS if whole else _ROWS) // size)


# read_whole: a stored tensor, all of it, verified.


def read_whole(folder: Path, index: Index, name: str) -> torch.Tensor:
    """The tensor ``name``, on the CPU.

    Raises:
        CorruptCheckpointError: its bytes are not those that were saved.
    """
    entry = index.tensors[name]
    check = BlockCheck()
    for chunk in entry.chunks:  # before there is memory for it
        path = folder / chunk.file
        size = prod(chunk.sizes) * entry.dtype.itemsize
        with opened(path) as file:
            for number, crc in enumerate(chunk.crc):
                begin = number * BLOCK
                at, count = chunk.begin + begin, min(BLOCK, size - begin)
                check.verify(file, at, count, crc, f"{path}, of {name!r:.200}")
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for chunk in entry.chunks:
        box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        target = whole[box]
        part = target if target.is_contiguous() else torch.empty(chunk.sizes, dtype=entry.dtype)
        data, path = bytes_of(part), folder / chunk.file
        with opened(path) as file:
            read_into(file, data, chunk.begin, os.fspath(path))
        if part is not target:
            target.copy_(part)
    return whole


# DCP's planners, without pickle: what is no tensor goes as JSON.


class SavePlanner(DefaultSavePlanner):
    """For ``Writer``: as torch's, but values that are no tensors are written as JSON.

    Raises, from ``dcp.save``:
        CheckpointError: for one that can't be.
    """

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """bytes of the JSON text, for a value."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(encode(object, write_item.index.fqn)).encode())
        return object


class LoadPlanner(DefaultLoadPlanner):
    """For ``Reader``: the reverse."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value where it belongs in the state dict."""
        name = read_item.dest_index.fqn
        found = decode(json.loads(value.getvalue()))
        if not self.flatten_state_dict:
            self.state_dict[name] = found
            self.original_state_dict[name] = found  # the base may have made another dict of it
            return
        *path, last = self.mappings[name]
        at: Any = self.original_state_dict
        for key in path:
            at = at[key]
        at[last] = found
