"""The folder that an export becomes: made beside it under another name, and renamed when it is whole."""

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
from torch import nn

from parallel3d.checkpoint.format.safetensors_file import is_ours
from parallel3d.checkpoint.hf.conversion import is_transformers
from parallel3d.checkpoint.hf.entries import plain_class
from parallel3d.checkpoint.hf.export_plan import Export
from parallel3d.checkpoint.hf.folder import INDEX
from parallel3d.errors import CheckpointError

__all__ = ["begin", "finish", "remove", "write_texts"]

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
