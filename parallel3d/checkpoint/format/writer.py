"""Writer: DCP's StorageWriter for this package's checkpoints."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
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
from parallel3d.checkpoint.format.files import bytes_of, crcs_of, write_all
from parallel3d.checkpoint.format.index import Chunk, Index, TensorEntry, file_name
from parallel3d.checkpoint.format.lock import Lock
from parallel3d.checkpoint.format.safetensors_file import header_of
from parallel3d.errors import CheckpointError


class Writer(StorageWriter):
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
        """Returns whether it is a local path."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares the next save, to another folder if one is given."""
        self.path = Path(checkpoint_id) if checkpoint_id else self.path
        self.folder = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the first rank makes the folder when all have planned."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns it unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the folder, and tells each rank its path and the rank's number."""
        if self.ranks is not None and len(plans) != self.ranks:
            raise CheckpointError(
                f"{self.path} was to be written by {self.ranks} ranks, but only {len(plans)} take part: the "
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
        """Writes this rank's file. Results have the tensor's dtype and shape, its chunk, the file's size."""
        name, rank = plan.storage_data
        self.folder = Path(name)
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        results = [_object(item, planner) for item in objects]
        if tensors:
            results += _write_file(self.folder / file_name(rank), tensors, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index and the marker, and renames the folder."""
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
            if isinstance(described, TensorStorageMetadata) and name not in index.tensors:
                # It has no elements, so no rank has written a part of it.
                entry = TensorEntry(described.properties.dtype, tuple(described.size))
                index.tensors[name] = entry
        assert self.folder is not None
        info = self.info() if self.info else {}
        folders.finish(self.folder, self.path, index, info, self.lock)


def _write_file(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """Writes a safetensors file and flushes it to the disk, tensor by tensor, with a checksum of every block.

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
    written: list[tuple[WriteItem, Chunk]] = []
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        first = header_of(header)
        write_all(file, memoryview(first))
        at = len(first)
        for item in items:
            dtype, _, offsets, sizes = _description(item)
            values = planner.resolve_data(item)
            assert isinstance(values, torch.Tensor)
            values = values.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            if values.dtype != dtype or tuple(values.shape) != sizes:
                raise CheckpointError(
                    f"{item.index.fqn} is {values.dtype} of shape {tuple(values.shape)} now, but was planned "
                    f"as {dtype} of shape {sizes}"
                )
            data = bytes_of(values)
            written.append((item, Chunk(offsets, sizes, path.name, at, tuple(crcs_of(data)))))
            write_all(file, data)
            at += len(data)
        os.fsync(file)
    finally:
        os.close(file)
    results = []
    for item, chunk in written:
        dtype, shape, _, sizes = _description(item)
        result = WriteResult(item.index, prod(sizes) * dtype.itemsize, (dtype, shape, chunk, at))
        results.append(result)
    return results


def _description(
    item: WriteItem,
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns (dtype, global shape, offsets, sizes) of the box that an item writes."""
    data = item.tensor_data
    assert data is not None
    box = data.chunk
    return data.properties.dtype, tuple(data.size), tuple(box.offsets), tuple(box.sizes)


def _object(item: WriteItem, planner: SavePlanner) -> WriteResult:
    value = planner.resolve_data(item)
    assert isinstance(value, io.BytesIO)
    try:
        text = value.getvalue().decode()
        json.loads(text)
    except ValueError:
        raise CheckpointError(
            f"{item.index.fqn} is no tensor, and torch's planner has pickled it; these checkpoints hold no "
            "pickle: save with planner=parallel3d.checkpoint.SavePlanner()"
        ) from None
    return WriteResult(MetadataIndex(item.index.fqn), len(text), text)
