"""Reader: DCP's StorageReader for this package's checkpoints, and the planners that store values as JSON.

DCP plans on every rank before any rank reads, and a rank verifies what it is going to read while it plans. So
all ranks know of damage before a value of the model has changed.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
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
from parallel3d.checkpoint.format.boxes import slices_of, whole_box
from parallel3d.checkpoint.format.files import (
    BLOCK,
    opened,
    verify_blocks,
)
from parallel3d.checkpoint.format.index import Chunk, Index
from parallel3d.checkpoint.format.strided import read_strided
from parallel3d.checkpoint.values import decode, encode


class Reader(StorageReader):
    """Reads for ``torch.distributed.checkpoint.load`` what ``Writer`` has written::

        dcp.load(state, storage_reader=Reader(folder), planner=LoadPlanner())

    Args:
        path: the checkpoint's folder.
        index: its index, if already read.

    Raises:
        CorruptCheckpointError: if it is not a complete checkpoint. In ``dcp.load``: if what a rank needs is
            damaged; nothing has been read into the state then, on any rank.
    """

    def __init__(self, path: str | os.PathLike[str], index: Index | None = None) -> None:
        self.path = Path(path)
        self.index = folders.open_checkpoint(self.path)[0] if index is None else index

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether it is a checkpoint's folder."""
        return folders.is_checkpoint(Path(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares the next load, of another folder if one is given."""
        if checkpoint_id is not None and Path(checkpoint_id) != self.path:
            self.path = Path(checkpoint_id)
            self.index = folders.open_checkpoint(self.path)[0]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index as DCP's metadata."""
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in self.index.objects}
        for name, entry in self.index.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                for c in entry.chunks
            ]
            described[name] = TensorStorageMetadata(
                TensorProperties(entry.dtype), torch.Size(entry.shape), chunks
            )
        return Metadata(described)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Maps (tensor, offsets) to chunks."""
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
        _verify(self.path, [part for _, part in self._parts(plan)])
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns them unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: TorchLoadPlanner) -> Future[None]:
        """Reads into the state's tensors."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                text = json.dumps(self.index.objects[item.storage_index.fqn])
                planner.load_bytes(item, io.BytesIO(text.encode()))
        parts = sorted(self._parts(plan), key=lambda each: each[1].place)
        for name, of_file in groupby(parts, key=lambda each: each[1].chunk.file):
            with opened(self.path / name) as file:
                for item, part in of_file:
                    target = planner.resolve_tensor(item).detach()
                    part.read(file, target, os.fspath(self.path / name))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _parts(self, plan: LoadPlan) -> Iterator[tuple[ReadItem, _Part]]:
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO and item.lengths.numel():
                chunk = self._chunks[item.storage_index]
                dtype = self.index.tensors[item.storage_index.fqn].dtype
                offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
                yield item, _Part(chunk, dtype, offsets, sizes)


@dataclass(frozen=True)
class _Part:
    """A box of a chunk that is read; the rows that contain it are verified."""

    chunk: Chunk
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Size of one row of the chunk."""
        return prod(self.chunk.sizes[1:]) * self.dtype.itemsize

    @property
    def first_byte(self) -> int:
        """Where the rows begin in the chunk."""
        return self.offsets[0] * self.row_bytes if self.chunk.sizes else 0

    @property
    def place(self) -> tuple[str, int]:
        """(file, first byte) of the rows."""
        return self.chunk.file, self.chunk.begin + self.first_byte

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first byte, size, CRC-32) of the blocks that contain the rows."""
        chunk_bytes = prod(self.chunk.sizes) * self.dtype.itemsize
        nbytes = self.sizes[0] * self.row_bytes if self.chunk.sizes else chunk_bytes
        for number in range(self.first_byte // BLOCK, -(-(self.first_byte + nbytes) // BLOCK)):
            begin = number * BLOCK
            size = min(BLOCK, chunk_bytes - begin)
            yield self.chunk.begin + begin, size, self.chunk.crc[number]

    def read(self, file: int, target: torch.Tensor, where: str) -> None:
        """Fills ``target``, of the box's sizes."""
        strides = torch.empty(self.chunk.sizes, device="meta").stride()
        offset = sum(o * stride for o, stride in zip(self.offsets, strides, strict=True))
        with torch.inference_mode(target.is_inference()):
            read_strided(file, self.chunk.begin, self.dtype, offset, strides, target, where)
        increment_version(target)


def _verify(folder: Path, parts: Iterable[_Part], label: str = "") -> None:
    """Verifies the blocks of ``parts``, each once; ``label`` follows the path in an error."""
    blocks: dict[str, set[tuple[int, int, int]]] = {}
    for part in parts:
        blocks.setdefault(part.chunk.file, set()).update(part.blocks())
    for name, of_file in blocks.items():
        with opened(folder / name) as file:
            verify_blocks(file, sorted(of_file), f"{folder / name}{label}")


def read_whole(folder: Path, index: Index, name: str) -> torch.Tensor:
    """Reads the whole tensor ``name`` to the CPU.

    Raises CorruptCheckpointError if its bytes are not those that were saved.
    """
    entry = index.tensors[name]
    parts = [_Part(c, entry.dtype, *whole_box(c.sizes)) for c in entry.chunks]
    _verify(folder, parts, f", of {name!r:.200}")  # before memory is allocated
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for part in parts:
        path = folder / part.chunk.file
        with opened(path) as file:
            part.read(file, whole[slices_of(part.chunk.offsets, part.sizes)], os.fspath(path))
    return whole


class SavePlanner(DefaultSavePlanner):
    """DCP's planner for ``Writer``: values that are not tensors are stored as JSON, not pickled.

    Raises:
        CheckpointError: in ``dcp.save``, for a value that cannot be stored.
    """

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Returns the JSON text of a value."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(encode(object, write_item.index.fqn)).encode())
        return object


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for ``Reader``: the inverse of ``SavePlanner``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value into the state dict."""
        name = read_item.dest_index.fqn
        result = decode(json.loads(value.getvalue()))
        if not self.flatten_state_dict:
            self.state_dict[name] = result
            self.original_state_dict[name] = result  # the base class may have copied the dict
            return
        *path, last = self.mappings[name]
        at: Any = self.original_state_dict
        for key in path:
            at = at[key]
        at[last] = result
