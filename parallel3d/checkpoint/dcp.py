"""load_dcp and save_dcp: folders of ``torch.distributed.checkpoint`` (DCP), as FSDP2 and torchtitan use them.

DCP's own reader unpickles a folder's index, the file ``.metadata``, and a pickle can run any code. Here the
standard library's unpickler accepts only the few class names that DCP writes, and makes plain records, which
have no code of those classes.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from parallel3d.checkpoint.torch_formats.sources import Archive, Budget, Source, Verify
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

    Each rank reads the stored chunks that overlap its shards, one at a time, in two passes: first all ranks
    check that everything is there, fits and has the stored checksum; then each loads the chunks and copies.
    Nothing in the folder is executed. State that the optimizer doesn't have yet is allocated, with its
    parameters' placements.

    Args:
        folder: its path; every rank must be able to read it.
        model: values are copied into its parameters and persistent buffers.
        optimizer: an optimizer of ``model``'s parameters, also of ``parallel3d.optim``; None: load the model
            alone.
        model_prefix, optimizer_prefix: what comes before the model's names, and before the optimizer's
            "state." and "param_groups", in the folder's names, such as "app.model."; None: search for it.
        strict: require all of the model's names, and no others.
        cast: convert values of another dtype.
        checksums: verify the CRC-32 of what is read. False: for what was written under
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
    """A DCP folder, opened for ``load_dcp``."""

    def __init__(self, path: Path, options: LoadOptions) -> None:
        self._options = options
        contents = read_folder(path, trusted=options.trusted, checksums=options.checksums)
        self.names = without_wrappers(contents)

    def value(self, name: str) -> Any:
        stored = self.names[name]
        if not isinstance(stored, Archive):
            return stored
        if self._options.checksums:
            stored.verify()
        if not self._options.trusted:
            described = stored.load(device="meta")
            for tensor in Budget(stored.length, stored.what).count(described):
                stored.check(tensor)
        return stored.load(trusted=self._options.trusted)

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
    """Writes a checkpoint folder that any program can read with ``torch.distributed.checkpoint.load``.

    Every rank of the model's mesh must call it, and writes what it holds. The names are those of
    ``get_model_state_dict`` and ``get_optimizer_state_dict``: a torch FSDP2 model on any mesh loads
    ``{"model": ..., "optimizer": ...}`` made by these, and sets it with ``set_state_dict``.

    Args:
        folder: its path; it must be empty or not exist. It is written under a temporary name and renamed at
            the end.
        optimizer: an optimizer of ``model``'s parameters; None: save the model alone. Save it after its first
            step: before that it has no state, and torch's loading, which makes state before it reads, would
            miss it in the folder.
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
    with new_folder(ranks, path) as temporary:
        ranks.all(write)


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raises CheckpointError for optimizer state in a tensor subclass, which ``load_dcp`` can't read."""
    for name, param in model.named_parameters():
        for key, value in (getattr(stateful(optimizer), "state", {}).get(param) or {}).items():
            if isinstance(value, torch.Tensor):
                refuse_wrapper(f"optimizer.{plain_name(name)}.{key}", value)


class _Planner(torch_checkpoint.DefaultSavePlanner):
    """DCP's save planner, with conjugate and negative bits resolved, which torch doesn't store portably."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return value.resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value


def _put(state: dict[str, Any], prefix: str, values: dict[str, Any]) -> None:
    """Puts ``values`` into ``state`` below the nested keys that ``prefix`` names, such as "app.model."."""
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
class StoredChunk(pieces.Boxed):
    """A chunk of a tensor (its offsets and sizes), and the archive ``at`` that holds its values; None if the
    index lists the chunk but no archive is stored."""

    at: Archive | None


@dataclass(eq=False)
class DcpTensor(Source):
    """A tensor of a DCP folder, in chunks, each a ``torch.save`` archive; ``what`` names it in errors."""

    what: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[StoredChunk]
    checksums: bool

    def __post_init__(self) -> None:
        self.budget = Budget(sum(c.at.length for c in self.chunks if c.at is not None), self.what)

    def checks(self, boxes: Iterable[pieces.Box]) -> list[Verify]:
        boxes = list(boxes)
        needed = [c for c in self.chunks if any(pieces.intersection(b, c.box) for b in boxes)]
        archives = [self._checked(chunk) for chunk in needed]
        return [archive.verify for archive in archives if self.checksums]

    def _checked(self, chunk: StoredChunk) -> Archive:
        """Returns the chunk's archive if it has a tensor of the right shape; reads no values."""
        archive = chunk.at
        if archive is None:
            raise CorruptCheckpointError(f"{self.what} at {chunk.offsets} is listed but not stored")
        if self.checksums:
            archive.verify(["data.pkl"])
        value = archive.load(device="meta")
        if not isinstance(value, Tensor):
            raise CorruptCheckpointError(f"{archive.what} is not a tensor")
        archive.check(value)
        if value.dtype != self.dtype or tuple(value.shape) != chunk.sizes:
            raise CorruptCheckpointError(
                f"{archive.what} is {value.dtype} of {tuple(value.shape)}; the metadata says {self.dtype} of "
                f"{chunk.sizes}"
            )
        return archive

    def fill(self, tensor: Tensor) -> None:
        """Copies this rank's parts of the stored tensor into ``tensor``; one chunk is in memory at a time."""
        held = pieces.pieces_of(tensor)
        for chunk in self.chunks:
            parts = [(piece, pieces.intersection(piece.box, chunk.box)) for piece in held]
            if not any(part for _, part in parts):
                continue
            if chunk.at is None:
                raise CorruptCheckpointError(
                    f"{self.what} at {chunk.offsets} is listed but not stored"
                )
            value = chunk.at.load()
            for piece, part in parts:
                if part is not None:
                    offsets, sizes = part
                    target = piece.local[pieces.slices_of(_less(offsets, piece.offsets), sizes)]
                    target.copy_(value[pieces.slices_of(_less(offsets, chunk.offsets), sizes)])


def _less(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(m - n for m, n in zip(a, b, strict=True))


def read_small(source: Source, name: str) -> Tensor:
    """Returns a whole stored tensor, verified; raises if it would have more bytes than the folder stores."""
    checks = source.checks([pieces.whole_box(source.shape)])
    source.take(name)
    for verify in checks:
        verify()
    return source.whole()


# -- the table ---------------------------------------------------------------------------------------------


def read_folder(
    path: Path, *, trusted: bool, checksums: bool = True
) -> dict[str, DcpTensor | Archive]:
    """Returns a folder's contents by flat names, such as "model.layers.0.weight": a DcpTensor for a tensor,
    else an Archive. ``trusted``: read ``.metadata`` by ``pickle``, which runs code in it."""
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
    with files.damaged_if(invalid, (ValueError, LookupError, TypeError, AttributeError)):
        return _contents(path, content, checksums)


class _Record:
    """An object of one of DCP's classes in ``.metadata``: its attributes, without code of the class."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        # That of TensorProperties is a tuple, which begins with the dtype.
        vars(self).update({"dtype": state[0]} if isinstance(state, tuple) else state)


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
    """The standard library's unpickler in Python, which accepts only the class names that DCP writes; its
    memo is a dict, whose size does not depend on the numbers in the file.

    Each lookup of a name makes a new class, because a pickle can set attributes of what it looks up.
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


def _contents(path: Path, metadata: Any, checksums: bool) -> dict[str, DcpTensor | Archive]:
    stored = dict(_place(path, *item) for item in metadata.storage_data.items())
    files.check_disjoint((at.name, at.offset, at.length, at.what) for at in stored.values())
    _check_paths(metadata.state_dict_metadata, getattr(metadata, "planner_data", None))
    listed = 0
    contents: dict[str, DcpTensor | Archive] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or len(name) > MAX_NAME:
            raise ValueError(f"the name {name!r:.40}, no string or longer than {MAX_NAME}")
        if type(entry).__name__ == "BytesStorageMetadata":
            if (at := stored.get(_key(name, None))) is None:
                raise ValueError(f"{name} is listed but not stored")
            contents[name] = at
            continue
        dtype = entry.properties.dtype
        if type(dtype) is not torch.dtype:
            raise ValueError(f"{name} has no dtype")
        listed += len(entry.chunks)
        if listed > 2 * len(stored) + 1000:  # many tensors may refer to one list
            raise ValueError("more chunks are listed than stored")
        shape = files.shape_of(entry.size, f"shape of {name!r:.100}")
        listed_boxes = [(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
        boxes = list({str(box): box for box in listed_boxes}.values())
        pieces.check_tiles(name, shape, boxes)
        chunks = [StoredChunk(*box, stored.get(_key(name, box[0]))) for box in boxes]
        contents[name] = DcpTensor(f"{path}: {name}", dtype, shape, chunks, checksums)
    return contents


def _check_paths(described: dict[Any, Any], planned: Any) -> None:
    """Raises ValueError unless ``planned``, the planner's table name -> path of keys, has the names in
    ``described``, and each is its path joined by dots."""
    if not isinstance(planned, dict):
        return  # of another planner
    for name, path in planned.items():
        whole = isinstance(path, (tuple, list)) and all(type(key) in (str, int) for key in path)
        if not whole or name not in described or ".".join(map(str, path)) != name:
            raise ValueError(f"the path to {name!r:.100} leads elsewhere")
    if len(planned) != len(described):
        raise ValueError("another number of paths than of names")


def _key(name: str, offsets: tuple[int, ...] | None) -> str:
    """Returns a string as dict key: a file could choose tuples of numbers that all collide in a dict."""
    return f"{offsets} {name}"


def _place(folder: Path, index: Any, at: Any) -> tuple[str, Archive]:
    """Returns (``_key``, archive with the values) of an entry of DCP's index; ``at``: its bytes in a file."""
    name, file = index.fqn, at.relative_path
    if type(name) is not str or type(file) is not str:
        raise ValueError("a name that is not a string")
    if getattr(at, "transform_descriptors", None):
        raise CheckpointError(
            f"{name} was written through an extension, such as compression, which load_dcp doesn't undo; "
            "write it without"
        )
    start, length = _sizes((at.offset, at.length))
    given = getattr(index, "offset", None)
    offsets = None if given is None else _sizes(given)
    what = f"{folder}: {name}" + ("" if offsets is None else f" at {offsets}")
    return _key(name, offsets), Archive(folder, file, start, length, what)
