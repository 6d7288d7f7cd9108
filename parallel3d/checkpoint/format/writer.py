"""Writer: DCP's StorageWriter for the folders of this package."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format.index import Chunk, Index, TensorEntry, file_name
from parallel3d.checkpoint.format.lock import Lock
from parallel3d.checkpoint.format.safetensors_file import bytes_of, crcs_of, header_of, write_all
from parallel3d.errors import CheckpointError

# Writes one rank's file: the safetensors layout, a checksum of every block on the way.
#
# The library itself takes a whole file's bytes at once, which would be a second copy of what a
# rank holds.


@dataclass(frozen=True)
class Stored:
    """A box of a tensor that is to be written.

    Attributes:
        name: of the tensor.
        dtype, shape: the whole's.
        offsets, sizes: the box.
        values: gives them, on any device; called when their turn comes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    @property
    def key(self) -> str:
        """Its name in the file."""
        if self.sizes == self.shape:
            return self.name
        return f"{self.name}@{','.join(map(str, self.offsets))}"


def write_file(path: Path, items: Sequence[Stored]) -> tuple[list[Chunk], int]:
    """Writes ``items`` to a new file and on to the disk.

    Returns:
        (where each of them lies, the file's size).
    """
    # Larger elements first, so that each tensor begins at a multiple of its element's size.
    order = sorted(range(len(items)), key=lambda i: -items[i].dtype.itemsize)
    header = header_of({items[i].key: (items[i].dtype, items[i].sizes) for i in order})
    chunks: dict[int, Chunk] = {}
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(file, memoryview(header))
        at = len(header)
        for i in order:
            item = items[i]
            values = item.values().detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            if values.dtype != item.dtype or tuple(values.shape) != item.sizes:
                raise CheckpointError(
                    f"{item.name}: {values.dtype} of {tuple(values.shape)} was to be stored as "
                    f"{item.dtype} of {item.sizes}"
                )
            data = bytes_of(values)
            chunks[i] = Chunk(item.offsets, item.sizes, path.name, at, tuple(crcs_of(data)))
            write_all(file, data)
            at += len(data)
        os.fsync(file)
    finally:
        os.close(file)
    return [chunks[i] for i in range(len(items))], at


class Writer(StorageWriter):
    """Writes what ``torch.distributed.checkpoint.save`` gives it, one safetensors file a rank::

        dcp.save(state, storage_writer=Writer(folder), planner=SavePlanner())

    The folder has another name until everything is in it and on the disk.

    Args:
        path: the checkpoint's folder; of an existing one the old content counts until the new is whole.
        info: for its ``checkpoint.json``, asked for on the coordinating rank when all else is written.
        ranks: how many write it; None: as many as DCP finds.

    Raises:
        CheckpointError: in ``dcp.save``: another number of ranks. It writes for one rank alone, without an
            error, where the process group has been destroyed.
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
        self.folder: Path | None = None  # while it is written
        self.lock: Lock | None = None  # that it is written under

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a folder's path."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """For the next save, to another folder if one is given."""
        self.path = Path(checkpoint_id) if checkpoint_id else self.path
        self.folder = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the first rank makes the folder when all have planned."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the folder; tells each rank its name and the file's."""
        if self.ranks is not None and len(plans) != self.ranks:
            raise CheckpointError(
                f"{self.path} was to be written by {self.ranks} ranks, of which {len(plans)} are there: the "
                "process group was destroyed meanwhile; wait for an async save's result() before that"
            )
        self.folder = folders.new_folder(self.path)
        return [
            SavePlan(
                plan.items, (os.fspath(self.folder), rank), plan.planner_data, usable=plan.usable
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file. Results hold its name, its size and where each chunk lies."""
        name, rank = plan.storage_data
        self.folder = Path(name)
        results = []
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                results.append(_object(item, planner))
        if tensors:
            stored = [_stored(item, planner) for item in tensors]
            path = self.folder / file_name(rank)
            chunks, size = write_file(path, stored)
            for item, what, chunk in zip(tensors, stored, chunks, strict=True):
                found = (what.name, what.dtype, what.shape, chunk, size)
                results.append(WriteResult(item.index, what.nbytes, found))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index and the marker, and gives the folder its name."""
        index = Index()
        for result in (r for rank in results for r in rank):
            if not isinstance(result.storage_data, tuple):
                index.objects[result.index.fqn] = json.loads(result.storage_data)
                continue
            name, dtype, shape, chunk, size = result.storage_data
            index.tensors.setdefault(name, TensorEntry(dtype, shape)).chunks.append(chunk)
            index.files[chunk.file] = size
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and name not in index.tensors:
                # Without elements: no rank has a part of it.
                index.tensors[name] = TensorEntry(entry.properties.dtype, tuple(entry.size))
        assert self.folder is not None
        info = self.info() if self.info else {}
        folders.finish(self.folder, self.path, index, info, self.lock)


def _stored(item: WriteItem, planner: SavePlanner) -> Stored:
    data = item.tensor_data
    assert data is not None

    def values() -> torch.Tensor:
        found = planner.resolve_data(item)
        assert isinstance(found, torch.Tensor)
        return found

    return Stored(
        item.index.fqn,
        data.properties.dtype,
        tuple(data.size),
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
        values,
    )


def _object(item: WriteItem, planner: SavePlanner) -> WriteResult:
    found = planner.resolve_data(item)
    assert isinstance(found, io.BytesIO)
    try:
        text = found.getvalue().decode()
        json.loads(text)
    except ValueError:
        raise CheckpointError(
            f"{item.index.fqn} is no tensor, and torch's planner has pickled it; these checkpoints hold no "
            "pickle: save with planner=parallel3d.checkpoint.SavePlanner()"
        ) from None
    return WriteResult(MetadataIndex(item.index.fqn), len(text), text)
