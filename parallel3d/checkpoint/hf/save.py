"""save_hf: writes a parallel model as a Hugging Face safetensors folder."""

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

from parallel3d.checkpoint.format.files import bytes_of, sync_folder, write_all
from parallel3d.checkpoint.format.safetensors_file import NAMES, is_ours
from parallel3d.checkpoint.hf.conversion import is_transformers
from parallel3d.checkpoint.hf.exchange import exchange
from parallel3d.checkpoint.hf.export import Export, OutFile, OutTensor, as_bytes, plan_export
from parallel3d.checkpoint.hf.folder import INDEX, Names, bring_to_rest, plain_class
from parallel3d.checkpoint.ranks import ranks_of
from parallel3d.errors import CheckpointError

_TEXTS = {"config.json", "generation_config.json", INDEX}
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def save_hf(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    names: Names = None,
) -> None:
    """Writes ``model`` as a folder that ``from_pretrained`` loads; every rank must call it.

    Files are distributed over the ranks. Each assembles one tensor at a time, from pieces that the others
    send, so that no rank ever has more than its own shards and the largest tensor. Everything is written into
    a temporary folder, which is renamed when it is complete.

    Args:
        folder: on a file system that all ranks share. It must be empty, not exist, or be an earlier export of
            save_hf, which is replaced.
        model: plain or parallel, at rest. For a transformers model the configs are written too, and names and
            layouts are those of its checkpoints, as with ``save_pretrained``.
        max_shard_size: size of a file, in bytes or as ``"5GB"``; only a single tensor may be larger. Files of
            large models are smaller where ranks would have nothing to write.
        dtype: cast floating-point tensors to it; None: keep their dtypes.
        names: for other models: as in ``load_hf``.

    Raises:
        CheckpointError: on every rank, if the target is something else, or a rank can't write, doesn't see
            the others' folder, or has another model. What was written is removed.
    """
    ranks = ranks_of(model, "save_hf")
    path = Path(os.path.abspath(folder))

    def check() -> int:
        if dtype is not None and not (dtype in NAMES and dtype.is_floating_point):
            raise CheckpointError(f"save_hf: dtype is {dtype!r}; give a floating-point one")
        bring_to_rest(model, "save_hf")
        return as_bytes(max_shard_size)

    export = plan_export(model, ranks, names, dtype, ranks.all(check)[0])
    temporary = ranks.first(lambda: _make_temporary(path))
    done = False
    try:
        ranks.all(lambda: _check_seen(temporary))
        with _Files(temporary) as files:
            ranks.all(lambda: exchange(export, ranks, files.write))
        ranks.first(lambda: _write_texts(model, export, dtype, temporary))
        ranks.first(lambda: _finish(temporary, path))
        done = True
    finally:
        if not done and ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)


def _make_temporary(folder: Path) -> Path:
    """Makes the temporary folder.

    Raises CheckpointError if ``folder`` exists and is not an earlier export.
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


def _check_seen(temporary: Path) -> None:
    if not temporary.is_dir():
        raise CheckpointError(
            f"save_hf: this rank doesn't see {temporary}, which the first has made; the folder must be on a "
            "file system that all ranks share"
        )


def _finish(temporary: Path, folder: Path) -> None:
    """Renames the temporary folder to ``folder``, and removes the previous one."""
    with suppress(OSError):  # not every file system can
        sync_folder(temporary)
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
    with suppress(OSError):
        sync_folder(folder.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _write_texts(model: nn.Module, export: Export, dtype: torch.dtype | None, folder: Path) -> None:
    """Writes the index and the model's configs."""
    if len(export.files) > 1:
        index = {
            "metadata": {"total_size": sum(file.nbytes for file in export.files)},
            "weight_map": {t.name: file.name for file in export.files for t in file.tensors},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if not is_transformers(model):
        return
    hf_model: Any = model
    config = copy.deepcopy(hf_model.config)
    config.architectures = [plain_class(model).__name__]
    own = next((t.dtype for t in export.tensors.values() if t.is_floating_point()), None)
    if own is not None:  # from_pretrained makes the model in it
        config.dtype = str(dtype or own).removeprefix("torch.")
    config.save_pretrained(folder)
    if hf_model.can_generate() and getattr(model, "generation_config", None) is not None:
        hf_model.generation_config.save_pretrained(folder)


class _Files:
    """The files that this rank writes, one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: int | None = None

    def write(self, file: OutFile, tensor: OutTensor, values: Tensor) -> None:
        """Writes the next tensor of a file; the header before the first one, and closes it after the last."""
        if tensor is file.tensors[0]:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._opened = os.open(self._folder / file.name, flags, 0o666)
            write_all(self._opened, memoryview(file.header))
        assert self._opened is not None
        write_all(self._opened, bytes_of(values))
        if tensor is file.tensors[-1]:
            os.fsync(self._opened)
            self.__exit__()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            os.close(opened)
