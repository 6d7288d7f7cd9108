"""Folders of ``torch.distributed.checkpoint``, as FSDP2 and torchtitan write them: loaded and saved.

DCP's own reader unpickles the table of contents, ``.metadata``, which runs code that it contains. Here the
standard library's unpickler gets the few names that DCP writes, each of which stands for a class without
code.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.fsdp import StateDictType

from parallel3d._torch.fully_shard import plain_name
from parallel3d._util import dry_run
from parallel3d.checkpoint import pieces
from parallel3d.checkpoint.format import files
from parallel3d.checkpoint.ranks import new_folder, ranks_of
from parallel3d.checkpoint.state import stateful
from parallel3d.checkpoint.torch_formats.loading import Checkpoint, LoadOptions, load, state_at_rest
from parallel3d.checkpoint.torch_formats.names import MAX_NAME, without_wrappers
from parallel3d.checkpoint.torch_formats.optimizer import SavedOptimizer, saved_in_names
from parallel3d.checkpoint.torch_formats.sources import Archive, Budget, Records, Source
from parallel3d.checkpoint.values import refuse_wrapper
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.fsdp import optim_state_dict


def load_dcp(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    model_prefix: str | None = None,
    optimizer_prefix: str | None = None,
    strict: bool = True,
    cast: bool = False,
    checksums: bool = True,
    trusted: bool = False,
) -> None:
    """Loads a folder that ``torch.distributed.checkpoint.save`` has written on any mesh, by any program.

    Every rank of the model's mesh must call it. It reads the usual forms: ``{"model": ..., "optimizer":
    ...}`` of ``get_model_state_dict`` and ``get_optimizer_state_dict`` (or of the ``state_dict()`` of both),
    a model's state dict at the top, ``{"app": ...}`` as in torch's tutorial, torchtitan's, and flattened
    optimizers.

    Each rank reads the chunks that contain a part of what it holds twice, one at a time: first all ranks
    check that everything is there, fits and has its checksum; then it loads the chunk and copies. Nothing in
    the folder is executed. State that the optimizer doesn't have yet is allocated, placed as its parameters
    are.

    Args:
        folder: where it is; every rank must be able to read it.
        model: values are copied into its parameters and persistent buffers.
        optimizer: an optimizer of ``model``'s parameters, also of ``parallel3d.optim``; None: load the model
            alone.
        model_prefix, optimizer_prefix: what precedes the model's names, and "param_groups", in the folder's
            names, such as "app.model."; None: search for it.
        strict: require all of the model's names, and no others.
        cast: convert values of another dtype.
        checksums: verify them. False: for what was written under
            ``torch.serialization.set_crc32_options(False)``.
        trusted: read values of classes that torch doesn't write, by ``pickle``, which runs code that the
            folder contains: only for folders you made.

    Raises:
        CheckpointError: on every rank, naming what is wrong; a CorruptCheckpointError if it is damaged. Model
            and optimizer are unchanged.
    """
    options = LoadOptions(model_prefix, optimizer_prefix, strict, cast, checksums, trusted)
    load("load_dcp", model, optimizer, partial(_Folder, Path(folder)), options)


class _Folder(Checkpoint):
    """A DCP folder."""

    def __init__(self, path: Path, options: LoadOptions) -> None:
        self._path, self._options = path, options
        contents = read_folder(path, trusted=options.trusted, checksums=options.checksums)
        self.names = without_wrappers(contents)

    def value(self, name: str) -> Any:
        stored = self.names[name]
        if not isinstance(stored, StoredAt):
            return stored
        archive = stored.archive(f"{self._path}: {name}")
        for records in archive.checked(checksums=self._options.checksums):
            records.verify()
        trusted = self._options.trusted
        value = archive.load(trusted=trusted, device="cpu" if trusted else "meta")
        tensors = Budget(archive.length, archive.what).count(value)
        if trusted or not tensors:
            return value
        for tensor in tensors:  # torch reads as many bytes as the pickle says
            archive.check(tensor)
        return archive.load()

    def optimizer(self, prefix: str, params: Mapping[str, Any]) -> SavedOptimizer:
        flat = {}
        for name in self.names:
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and key.startswith(("state.", "param_groups")):
                value = self.value(name)
                option = key.startswith("param_groups") and isinstance(value, DcpTensor)
                flat[key] = read_small(value, name) if option else value
        return saved_in_names(flat, params)


def save_dcp(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    model_prefix: str = "model.",
    optimizer_prefix: str = "optimizer.",
    flatten_optimizer: bool = False,
) -> None:
    """Writes a folder that any program of torch reads with ``torch.distributed.checkpoint.load``.

    Every rank of the model's mesh must call it, and writes what it holds. The names are those of
    ``get_model_state_dict`` and ``get_optimizer_state_dict``: a torch FSDP2 model on any mesh loads
    ``{"model": ..., "optimizer": ...}`` made by these, and sets it with ``set_state_dict``.

    Args:
        folder: must not exist, or be empty; it gets its name when everything is written.
        optimizer: an optimizer of ``model``'s parameters; None: save the model alone. Before its first step
            it has no state, which torch's loading, which first makes some, then doesn't find.
        model_prefix, optimizer_prefix: precede the names; "" puts a model at the top, as torchtitan does.
        flatten_optimizer: as the option ``flatten_optimizer_state_dict`` does.

    Raises:
        CheckpointError: on every rank; what was written is removed.
    """
    if dry_run.active():  # nothing is written
        return
    ranks = ranks_of(model, "save_dcp")
    path = Path(folder)

    def write() -> None:
        state: dict[str, Any] = {}
        _put(state, model_prefix, state_at_rest(model, "saving a checkpoint"))
        if optimizer is not None:
            _put(state, optimizer_prefix, _optimizer_state(model, optimizer, flatten_optimizer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that a process is alone
            torch_checkpoint.save(
                state,
                storage_writer=torch_checkpoint.FileSystemWriter(temporary),
                planner=_Planner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )

    # By itself, since a rank alone may have such state, and the others would wait in ``write``.
    ranks.all(lambda: _check_optimizer(model, optimizer))
    with new_folder(ranks, path, _check_empty) as temporary:
        ranks.all(write)


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raises CheckpointError for state that torch would store, and ``load_dcp`` not read."""
    for name, param in model.named_parameters():
        for key, value in (getattr(stateful(optimizer), "state", {}).get(param) or {}).items():
            if isinstance(value, torch.Tensor):
                refuse_wrapper(f"optimizer.{plain_name(name)}.{key}", value)


def _check_empty(path: Path) -> None:
    if any(path.iterdir()):
        raise CheckpointError(
            f"{path} exists already, with files in it; give another, or remove it"
        )


class _Planner(torch_checkpoint.DefaultSavePlanner):
    """torch's planner, for tensors with a conjugate or negative bit, which torch does not store portably."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return value.resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value


def _put(state: dict[str, Any], prefix: str, values: dict[str, Any]) -> None:
    """Puts ``values`` into the nested dict that ``prefix`` leads to."""
    for part in filter(None, prefix.split(".")):
        state = state.setdefault(part, {})
    state.update(values)


def _optimizer_state(model: nn.Module, optimizer: Any, flatten: bool) -> dict[str, Any]:
    nested = optim_state_dict(
        model, optimizer, type=StateDictType.SHARDED_STATE_DICT, offload_to_cpu=False
    )
    for group in nested["param_groups"]:
        group.pop("param_names", None)  # params are names already
    if not flatten:
        return nested
    flat = {
        f"state.{name}.{key}": value
        for name, state in nested["state"].items()
        for key, value in state.items()
    }
    for group in nested["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
    return flat


_TABLE = ".metadata"
_MAX_TABLE = 1 << 31
_sizes = partial(files.numbers_of, what="sizes or offsets")


@dataclass(frozen=True)
class StoredAt:
    """Bytes [offset, offset + length) of a file in ``folder``."""

    folder: Path
    name: str
    offset: int
    length: int

    def archive(self, what: str) -> Archive:
        """Returns the archive that is stored there."""
        path, end = files.file_in(self.folder, self.name), self.offset + self.length
        size = path.stat().st_size
        if end > size:
            raise CorruptCheckpointError(
                f"{what}: bytes {self.offset} to {end} of {path.name}, which has {size}"
            )
        return Archive(path, self.offset, self.length, what)


@dataclass(frozen=True)
class StoredChunk(pieces.Boxed):
    """A box of a tensor, and where it is stored; ``at`` is None if it is listed but not stored."""

    at: StoredAt | None


@dataclass(eq=False)
class DcpTensor(Source):
    """A tensor of a DCP folder, in chunks that are archives; ``what`` names it in errors."""

    what: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[StoredChunk]
    checksums: bool
    _archives: dict[pieces.Box, Archive] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = Budget(sum(c.at.length for c in self.chunks if c.at is not None), self.what)

    def records(self, boxes: Iterable[pieces.Box]) -> list[Records]:
        boxes, found = list(boxes), []
        for chunk in self.chunks:
            if chunk.box not in self._archives and any(
                pieces.intersection(b, chunk.box) for b in boxes
            ):
                found += self._check(chunk)
        return found

    def _check(self, chunk: StoredChunk) -> list[Records]:
        """Checks that a tensor of the chunk's shape is stored, without reading its values."""
        what = f"{self.what} at {chunk.offsets}"
        if chunk.at is None:
            raise CorruptCheckpointError(f"{what} is listed but not stored")
        archive = self._archives[chunk.box] = chunk.at.archive(what)
        records = archive.checked(checksums=self.checksums)
        value = archive.load(device="meta")
        if not isinstance(value, Tensor):
            raise CorruptCheckpointError(f"{what} is not a tensor")
        archive.check(value)
        if value.dtype != self.dtype or tuple(value.shape) != chunk.sizes:
            raise CorruptCheckpointError(
                f"{what} is {value.dtype} of {tuple(value.shape)}; the metadata says {self.dtype} of "
                f"{chunk.sizes}"
            )
        return records

    def fill(self, tensor: Tensor) -> None:
        """As for all sources; one chunk is in memory at a time."""
        held = pieces.pieces_of(tensor)
        for chunk in self.chunks:
            parts = [(piece, pieces.intersection(piece.box, chunk.box)) for piece in held]
            if not any(part for _, part in parts):
                continue
            value = self._archives[chunk.box].load()
            for piece, part in parts:
                if part is not None:
                    offsets, sizes = part
                    target = piece.local[pieces.slices_of(_less(offsets, piece.offsets), sizes)]
                    target.copy_(value[pieces.slices_of(_less(offsets, chunk.offsets), sizes)])


def _less(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(m - n for m, n in zip(a, b, strict=True))


def read_small(source: Source, name: str) -> Tensor:
    """Reads and verifies a whole tensor, if it takes no more memory than is stored of it."""
    records = source.records([pieces.whole_box(source.shape)])
    source.take(name)
    for each in records:
        each.verify()
    return source.whole()


# -- the table ---------------------------------------------------------------------------------------------


def read_folder(
    path: Path, *, trusted: bool, checksums: bool = True
) -> dict[str, DcpTensor | StoredAt]:
    """Returns the contents of a folder by flat names, such as "model.layers.0.weight"; what is no tensor as a
    StoredAt. ``trusted``: read its ``.metadata`` by ``pickle``, which runs code in it."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; load_dcp reads those of dcp.save")
    what = path / _TABLE
    if not os.path.lexists(what):
        raise CheckpointError(
            f"{path} has no {_TABLE}: it is not a checkpoint of torch.distributed.checkpoint, or its save "
            "didn't complete"
        )
    if (size := files.file_in(path, _TABLE).stat().st_size) > _MAX_TABLE:
        raise CorruptCheckpointError(f"{what} has {size} bytes")
    with (
        files.damaged_if(f"{what} is not a complete pickle", (Exception,)),
        open(what, "rb") as file,
    ):
        content = FileSystemReader(path).read_metadata() if trusted else _Unpickler(file).load()
    invalid = f"{what} is not valid metadata of torch.distributed.checkpoint"
    with files.damaged_if(invalid, (ValueError, KeyError, TypeError, AttributeError)):
        return _contents(path, content, checksums)


class _Record:
    """An object of the table, of a class with the name of DCP's: its state. No code belongs to it."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA, _FILESYSTEM = (f"torch.distributed.checkpoint.{n}" for n in ("metadata", "filesystem"))
_RECORDS = {
    *((_METADATA, f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
    *((_METADATA, n) for n in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout")),
    *((_FILESYSTEM, "_StorageInfo"), (_FILESYSTEM, "_StoragePrefix")),
    *(
        (module, f"{pure}{system}Path")
        for module in ("pathlib", "pathlib._local")
        for pure in ("", "Pure")
        for system in ("Posix", "Windows")
    ),
}


class _Unpickler(pickle._Unpickler):
    """The standard library's unpickler in Python, whose memo is a dict, with the names that DCP writes.

    What a name stands for is made anew each time: a pickle can set attributes of it.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): sizes
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        # An enum's member, in Python 3.11.0 to 3.11.3.
        if (module, name) == ("builtins", "getattr"):
            return lambda of, name: None
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        raise CheckpointError(
            f"{_TABLE} names {module[:80]}.{name[:80]}, which DCP doesn't write; nothing of it was called. "
            "If you trust who made it: trusted=True"
        )

    def get_extension(self, code: int) -> None:
        raise ValueError("an extension of this process's pickles")


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Returns the attributes of ``value``, an object of the class of this name."""
    if type(value).__name__ != kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind}")
    fields = value.state if isinstance(value, _Record) else vars(value)
    if kind == "TensorProperties" and isinstance(fields, tuple):  # by its __getstate__
        return {"dtype": fields[0]}
    if not isinstance(fields, dict):
        raise ValueError(f"a {kind} without attributes")
    return fields


def _contents(path: Path, value: Any, checksums: bool) -> dict[str, DcpTensor | StoredAt]:
    metadata = _fields(value, "Metadata")
    described, places = metadata["state_dict_metadata"], metadata["storage_data"]
    if not isinstance(described, dict) or not isinstance(places, dict):
        raise ValueError("no state_dict_metadata or no storage_data")
    stored = dict(_place(path, index, at) for index, at in places.items())
    files.check_disjoint((at.name, at.offset, at.length, key) for key, at in stored.items())
    _check_paths(described, metadata.get("planner_data"))
    listed = 0
    contents: dict[str, DcpTensor | StoredAt] = {}
    for name, entry in described.items():
        if type(name) is not str or len(name) > MAX_NAME:
            raise ValueError(f"the name {name!r:.40}, no string or longer than {MAX_NAME}")
        if type(entry).__name__ == "TensorStorageMetadata":
            fields = _fields(entry, "TensorStorageMetadata")
            listed += len(fields["chunks"])
            if listed > 2 * len(stored) + 1000:  # many tensors may refer to one list
                raise ValueError("more chunks are listed than stored")
            dtype, shape, chunks = _tensor(name, fields, stored)
            contents[name] = DcpTensor(f"{path}: {name}", dtype, shape, chunks, checksums)
        elif type(entry).__name__ != "BytesStorageMetadata":
            raise ValueError(f"a {type(entry).__name__} as the description of a value")
        elif (at := stored.get(_key(name, None))) is None:
            raise ValueError(f"{name} is listed but not stored")
        else:
            contents[name] = at
    return contents


def _check_paths(described: dict[Any, Any], planned: Any) -> None:
    """Raises ValueError if torch's planner has not made the names of the paths in its data."""
    if not isinstance(planned, dict):
        return  # of another planner
    for name, path in planned.items():
        whole = isinstance(path, (tuple, list)) and all(type(key) in (str, int) for key in path)
        if not whole or name not in described or ".".join(map(str, path)) != name:
            raise ValueError(f"the path to {name!r:.100} leads elsewhere")
    if len(planned) != len(described):
        raise ValueError("another number of paths than of names")


def _key(name: str, offset: tuple[int, ...] | None) -> str:
    """Returns a dict key; a tuple of numbers could be chosen to have the hash of many others."""
    return f"{offset} {name}"


def _place(folder: Path, index: Any, at: Any) -> tuple[str, StoredAt]:
    fields, place = _fields(index, "MetadataIndex"), _fields(at, "_StorageInfo")
    name, offset = fields["fqn"], fields.get("offset")
    path, start, length = place["relative_path"], place["offset"], place["length"]
    if type(name) is not str or type(path) is not str:
        raise ValueError("a name that is not a string")
    if place.get("transform_descriptors"):
        raise CheckpointError(
            f"{name} was written through an extension, such as compression, which load_dcp doesn't undo; "
            "write it without"
        )
    _sizes((start, length))
    key = _key(name, None if offset is None else _sizes(offset))
    return key, StoredAt(folder, path, start, length)


def _tensor(
    name: str, fields: dict[str, Any], stored: Mapping[str, StoredAt]
) -> tuple[torch.dtype, tuple[int, ...], list[StoredChunk]]:
    """Returns (dtype, shape, chunks); each element of the tensor is in exactly one of the chunks."""
    dtype = _fields(fields["properties"], "TensorProperties")["dtype"]
    if type(dtype) is not torch.dtype:
        raise ValueError(f"{name} has no dtype")
    shape = files.shape_of(fields["size"], f"shape of {name!r:.100}")
    chunks: dict[str, StoredChunk] = {}
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(box["offsets"]), _sizes(box["sizes"])
        chunks[f"{offsets} {sizes}"] = StoredChunk(offsets, sizes, stored.get(_key(name, offsets)))
    pieces.check_tiles(name, shape, [chunk.box for chunk in chunks.values()])
    return dtype, shape, list(chunks.values())
