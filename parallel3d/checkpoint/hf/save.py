"""save_hf: a parallel model as a Hugging Face safetensors folder."""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.format.safetensors_file import NAMES, bytes_of, is_ours
from parallel3d.checkpoint.hf.conversion import is_transformers
from parallel3d.checkpoint.hf.exchange import (
    Export,
    OutFile,
    OutTensor,
    as_bytes,
    exchange,
    plan_export,
)
from parallel3d.checkpoint.hf.folder import INDEX, Names, bring_to_rest, plain_class
from parallel3d.checkpoint.ranks import ranks_of
from parallel3d.errors import CheckpointError

# The folder that an export becomes: made beside it under another name, and renamed when it is
# whole.

_TEXTS = {"config.json", "generation_config.json", INDEX}
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def begin(folder: Path) -> Path:
    """Makes the temporary folder.

    Raises:
        CheckpointError: ``folder`` is there and not an earlier export, which alone is replaced.
    """
    if folder.exists() or folder.is_symlink():
        _check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    return temporary


def _check_replaceable(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"save_hf: {folder} is there and is no folder")
    foreign = [
        path.name
        for path in sorted(folder.iterdir())
        if path.name not in _TEXTS and not (_WEIGHTS.fullmatch(path.name) and is_ours(path))
    ]
    if foreign:
        raise CheckpointError(
            f"save_hf: {folder} holds {', '.join(foreign[:5])}, which is no export of save_hf's, and only "
            "those are replaced; give another folder"
        )


def finish(temporary: Path, folder: Path) -> None:
    """Gives the temporary folder its name; what had it before is removed."""
    _sync(temporary)
    old = None
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.old")
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if old is not None:
            old.rename(folder)
        raise
    _sync(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def remove(temporary: Path) -> None:
    """After a failure."""
    shutil.rmtree(temporary, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Brings a folder's names to the disk, where the file system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_texts(model: nn.Module, export: Export, dtype: torch.dtype | None, folder: Path) -> None:
    """All but the weights: the index, and the model's configs."""
    if len(export.files) > 1:
        index = {
            "metadata": {"total_size": sum(file.nbytes for file in export.files)},
            "weight_map": {t.name: file.name for file in export.files for t in file.tensors},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if not is_transformers(model):
        return
    anything: Any = model
    config = copy.deepcopy(anything.config)
    config.architectures = [plain_class(model).__name__]
    own = next((t.dtype for t in export.tensors.values() if t.is_floating_point()), None)
    if own is not None:  # from_pretrained makes the model in it
        config.dtype = str(dtype or own).removeprefix("torch.")
    config.save_pretrained(folder)
    if anything.can_generate() and getattr(model, "generation_config", None) is not None:
        anything.generation_config.save_pretrained(folder)


def save_hf(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    names: Names = None,
) -> None:
    """Writes ``model`` as a folder that ``from_pretrained`` loads; every rank must call it.

    Files are shared out among the ranks, and each assembles one tensor at a time, from pieces that the others
    send: no rank ever has more than its own part and the largest tensor. All is written into a folder beside
    the target, which gets its name when it is whole.

    Args:
        folder: on a file system that all ranks share. It may be there only if it is empty or an earlier
            export of save_hf's, which is replaced.
        model: plain or parallel, at rest. Of a transformers model the configs are written too, and names and
            layouts become those of its checkpoints, as ``save_pretrained`` does.
        max_shard_size: of a file, in bytes or as ``"5GB"``; only a single tensor may be larger. Files of
            large models are smaller where ranks would have nothing to write.
        dtype: cast floating-point tensors to it; by default each keeps its own.
        names: for other models: as in ``load_hf``.

    Raises:
        CheckpointError: on every rank, whatever failed on whichever: the target is something else, a rank
            can't write, doesn't see the others' folder, or has another model. Nothing is left behind.
    """
    ranks = ranks_of(model, "save_hf")
    path = Path(os.path.abspath(folder))

    def check() -> int:
        if dtype is not None and not (dtype in NAMES and dtype.is_floating_point):
            raise CheckpointError(f"save_hf: dtype is {dtype!r}; give a floating-point one")
        bring_to_rest(model, "save_hf")
        return as_bytes(max_shard_size)

    export = plan_export(model, ranks, names, dtype, ranks.all(check)[0])
    temporary = ranks.first(lambda: begin(path))
    done = False
    try:
        ranks.all(lambda: _check_seen(temporary))
        with _Files(temporary) as files:
            ranks.all(lambda: exchange(export, ranks, files.write))
        ranks.first(lambda: write_texts(model, export, dtype, temporary))
        ranks.first(lambda: finish(temporary, path))
        done = True
    finally:
        if not done and ranks.is_first:
            remove(temporary)


def _check_seen(temporary: Path) -> None:
    if not temporary.is_dir():
        raise CheckpointError(
            f"save_hf: this rank doesn't see {temporary}, which the first has made; the folder must be on a "
            "file system that all ranks share"
        )


class _Files:
    """The files that this rank writes, one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: tuple[str, int] | None = None

    def write(self, file: OutFile, tensor: OutTensor, values: Tensor) -> None:
        """Writes a tensor to its place; with a file's first tensor the header, and its last closes it."""
        if tensor is file.tensors[0]:
            self._open(file)
        assert self._opened is not None and self._opened[0] == file.name
        _write_all(self._opened[1], bytes_of(values), tensor.at)
        if tensor is file.tensors[-1]:
            os.fsync(self._opened[1])
            self.__exit__()

    def _open(self, file: OutFile) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._opened = file.name, os.open(self._folder / file.name, flags, 0o666)
        _write_all(self._opened[1], memoryview(file.header), 0)

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened[1], None
            os.close(opened)


def _write_all(opened: int, data: memoryview, at: int) -> None:
    while data:
        n = os.pwrite(opened, data[: 1 << 26], at)
        at, data = at + n, data[n:]
