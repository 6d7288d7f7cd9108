"""Reader and Writer, with which DCP reads and writes this package's checkpoints, and planners that store
values as JSON."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from parallel3d._util.arguments import counted
from parallel3d.checkpoint.format import files
from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format.folder import Chunk, Index, TensorEntry, file_name
from parallel3d.checkpoint.format.lock import Lock
from parallel3d.checkpoint.pieces import Boxed, slices_of, whole_box
from parallel3d.checkpoint.values import decode, encode
from parallel3d.errors import CheckpointError

T = TypeVar("T")


class Reader(dcp.StorageReader):
    """Reads for ``torch.distributed.checkpoint.load`` what ``Writer`` has written::

        dcp.load(state, storage_reader=Reader(folder), planner=LoadPlanner())

    DCP plans on every rank before any rank reads, and a rank verifies what it is going to read while it
    plans. So all ranks know of damage before a value of the model has changed.

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
        return folders.is_checkpoint(Path(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and Path(checkpoint_id) != self.path:
            self.path = Path(checkpoint_id)
            self.index = folders.open_checkpoint(self.path)[0]

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        described: dict[str, Any] = {
            name: dcp.BytesStorageMetadata() for name in self.index.objects
        }
        for name, entry in self.index.tensors.items():
            chunks = [
                dcp.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                for c in entry.chunks
            ]
            described[name] = dcp.TensorStorageMetadata(
                TensorProperties(entry.dtype), torch.Size(entry.shape), chunks
            )
        return dcp.Metadata(described)

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """Builds the table (tensor's name, offsets) -> stored chunk."""
        self._chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, entry in self.index.tensors.items()
            for chunk in entry.chunks
        }

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Verifies all blocks and values that this rank will read, and returns the plan unchanged."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                decode(self.index.objects[item.storage_index.fqn])
        _verify(self.path, [part for _, part in self._parts(plan)])
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Reads what the plan asks for into the state dict's tensors; other values go to the planner."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                text = json.dumps(self.index.objects[item.storage_index.fqn])
                planner.load_bytes(item, io.BytesIO(text.encode()))
        parts = sorted(self._parts(plan), key=lambda each: each[1].place)
        for name, of_file in groupby(parts, key=lambda each: each[1].chunk.file):
            with files.opened(self.path / name) as file:
                for item, part in of_file:
                    target = planner.resolve_tensor(item).detach()
                    part.read(file, target, os.fspath(self.path / name))
                    planner.commit_tensor(item, target)
        return _done(None)

    def _parts(self, plan: dcp.LoadPlan) -> Iterator[tuple[dcp.ReadItem, _Part]]:
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO and item.lengths.numel():
                chunk = self._chunks[item.storage_index]
                dtype = self.index.tensors[item.storage_index.fqn].dtype
                offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
                yield item, _Part(offsets, sizes, chunk, dtype)


@dataclass(frozen=True)
class _Part(Boxed):
    """A part of a stored chunk that is read: offsets and sizes within it. Checksums are of whole blocks of
    bytes, so all rows (along dim 0) of the chunk that contain the part are verified."""

    chunk: Chunk
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return prod(self.chunk.sizes[1:]) * self.dtype.itemsize

    @property
    def first_byte(self) -> int:
        """The byte of the chunk at which the rows that contain the part begin."""
        return self.offsets[0] * self.row_bytes if self.chunk.sizes else 0

    @property
    def place(self) -> tuple[str, int]:
        """(file, byte in it) at which the rows that contain the part begin."""
        return self.chunk.file, self.chunk.begin + self.first_byte

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first byte in the file, size, CRC-32) of the blocks with the rows that contain the part."""
        chunk_bytes = self.chunk.nbytes(self.dtype)
        nbytes = self.sizes[0] * self.row_bytes if self.chunk.sizes else chunk_bytes
        for number in range(
            self.first_byte // files.BLOCK, -(-(self.first_byte + nbytes) // files.BLOCK)
        ):
            begin = number * files.BLOCK
            size = min(files.BLOCK, chunk_bytes - begin)
            yield self.chunk.begin + begin, size, self.chunk.crc[number]

    def read(self, file: int, target: torch.Tensor, where: str) -> None:
        """Fills ``target``, of the part's sizes, from the open ``file``, called ``where`` in errors."""
        strides = torch.empty(self.chunk.sizes, device="meta").stride()
        offset = sum(o * stride for o, stride in zip(self.offsets, strides, strict=True))
        with torch.inference_mode(target.is_inference()):
            files.read_strided(file, self.chunk.begin, self.dtype, offset, strides, target, where)


def _verify(folder: Path, parts: Iterable[_Part], label: str = "") -> None:
    """Verifies the blocks that contain ``parts``, each once; ``label`` follows the path in an error."""
    blocks: dict[str, set[tuple[int, int, int]]] = {}
    for part in parts:
        blocks.setdefault(part.chunk.file, set()).update(part.blocks())
    for name, of_file in blocks.items():
        with files.opened(folder / name) as file:
            files.verify_blocks(file, sorted(of_file), f"{folder / name}{label}")


def read_whole(folder: Path, index: Index, name: str) -> torch.Tensor:
    """Reads the whole tensor ``name`` to the CPU, after verifying its bytes."""
    entry = index.tensors[name]
    parts = [_Part(*whole_box(c.sizes), c, entry.dtype) for c in entry.chunks]
    _verify(folder, parts, f", of {name!r:.200}")  # before memory is allocated
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for part in parts:
        path = folder / part.chunk.file
        with files.opened(path) as file:
            part.read(file, whole[slices_of(part.chunk.offsets, part.sizes)], os.fspath(path))
    return whole


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner for ``Writer``: values that are not tensors are stored as JSON, not pickled.

    Raises:
        CheckpointError: in ``dcp.save``, for a value that cannot be stored.
    """

    def transform_object(self, write_item: dcp.WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(encode(object, write_item.index.fqn)).encode())
        return object


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner for ``Reader``: the inverse of ``SavePlanner``."""

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
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


class Writer(dcp.StorageWriter):
    """Writes for ``torch.distributed.checkpoint.save``, one safetensors file per rank::

        dcp.save(state, storage_writer=Writer(folder), planner=SavePlanner())

    The folder has a temporary name until it is complete and on the disk.

    Args:
        path: the checkpoint's folder. If it exists, its old content stays valid until the new one is
            complete.
        info: returns the content of ``checkpoint.json``; called on the coordinating rank after all else is
            written.
        ranks: how many ranks write; None: as many as DCP finds.

    Raises:
        CheckpointError: in ``dcp.save``, if another number of ranks writes, as after the process group was
            destroyed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        info: Callable[[], dict[str, Any]] | None = None,
        ranks: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.info = info
        self.ranks = ranks
        self.folder: Path | None = None  # the temporary folder, during a save
        self.lock: Lock | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(checkpoint_id) if checkpoint_id else self.path
        self.folder = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing; ``prepare_global_plan`` makes the folder."""

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Makes the temporary folder, and puts its path and each rank's number into the rank's plan."""
        if self.ranks is not None and len(plans) != self.ranks:
            raise CheckpointError(
                f"{self.path} was to be written by {self.ranks} ranks, but "
                f"{counted(len(plans), 'rank')} took part: the process group was destroyed "
                "meanwhile; wait for an async save's result() before that"
            )
        self.folder = folders.new_folder(self.path)
        data = [(os.fspath(self.folder), rank) for rank in range(len(plans))]
        return [replace(plan, storage_data=d) for plan, d in zip(plans, data, strict=True)]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file. Each result has, for a tensor's chunk, (dtype, global shape, the chunk,
        file's size); for another value, its JSON text."""
        name, rank = plan.storage_data
        self.folder = Path(name)
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        results = [_object(item, planner) for item in objects]
        if tensors:
            results += _write_file(self.folder / file_name(rank), tensors, planner)
        return _done(results)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Writes index, info and marker, and renames the folder to its final name."""
        index = Index()
        for result in (r for rank in results for r in rank):
            if not isinstance(result.storage_data, tuple):
                index.objects[result.index.fqn] = json.loads(result.storage_data)
                continue
            dtype, shape, chunk, size = result.storage_data
            entry = index.tensors.setdefault(result.index.fqn, TensorEntry(dtype, shape))
            entry.chunks.append(chunk)
            index.files[chunk.file] = size
        for name, described in metadata.state_dict_metadata.items():
            if isinstance(described, dcp.TensorStorageMetadata) and name not in index.tensors:
                # It has no elements, so no rank has written a part of it.
                index.tensors[name] = TensorEntry(described.properties.dtype, tuple(described.size))
        assert self.folder is not None
        info = self.info() if self.info else {}
        folders.finish(self.folder, self.path, index, info, self.lock)


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _write_file(
    path: Path, items: Sequence[dcp.WriteItem], planner: dcp.SavePlanner
) -> list[WriteResult]:
    """Writes the tensors ``items`` to a safetensors file, one after another, and flushes it to the disk; the
    results have a checksum of every block.

    The safetensors library would need all bytes of the file at once: a second copy of a rank's state.
    """
    header: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    # Larger elements first, so that each tensor begins at a multiple of its element's size.
    items = sorted(items, key=lambda item: -_description(item)[0].itemsize)
    for item in items:
        dtype, shape, offsets, sizes = _description(item)
        name = item.index.fqn
        key = name if sizes == shape else f"{name}@{','.join(map(str, offsets))}"
        header[key] = dtype, sizes
    written: list[tuple[dcp.WriteItem, torch.dtype, tuple[int, ...], Chunk]] = []
    with open(path, "wb", buffering=0) as opened_file:
        file = opened_file.fileno()
        first = files.header_of(header)
        files.write_all(file, memoryview(first))
        at = len(first)
        for item in items:
            dtype, shape, offsets, sizes = _description(item)
            values = planner.resolve_data(item)
            assert isinstance(values, torch.Tensor)
            values = values.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            if values.dtype != dtype or tuple(values.shape) != sizes:
                raise CheckpointError(
                    f"{item.index.fqn} is {values.dtype} of shape {tuple(values.shape)} now, but was planned "
                    f"as {dtype} of shape {sizes}"
                )
            data = files.bytes_of(values)
            chunk = Chunk(offsets, sizes, path.name, at, tuple(files.crcs_of(data)))
            written.append((item, dtype, shape, chunk))
            files.write_all(file, data)
            at += len(data)
        os.fsync(file)
    return [
        WriteResult(item.index, chunk.nbytes(dtype), (dtype, shape, chunk, at))
        for item, dtype, shape, chunk in written
    ]


def _description(
    item: dcp.WriteItem,
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns (dtype, global shape, offsets, sizes) of the part of a tensor that an item writes."""
    data = item.tensor_data
    assert data is not None
    box = data.chunk
    return data.properties.dtype, tuple(data.size), tuple(box.offsets), tuple(box.sizes)


def _object(item: dcp.WriteItem, planner: dcp.SavePlanner) -> WriteResult:
    value = planner.resolve_data(item)
    assert isinstance(value, io.BytesIO)
    try:
        text = value.getvalue().decode()
        json.loads(text)
    except ValueError:
        raise CheckpointError(
            f"{item.index.fqn} is not a tensor, and torch's planner has pickled it; these "
            "checkpoints hold no pickle: save with planner=parallel3d.checkpoint.SavePlanner()"
        ) from None
    return WriteResult(MetadataIndex(item.index.fqn), len(text), text)
