"""A folder in Hugging Face's form: which tensors it has, and in which of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from parallel3d.checkpoint.format.safetensors_file import LONGEST, Stored, open_regular, read_header
from parallel3d.errors import CheckpointError, CorruptCheckpointError

__all__ = ["INDEX", "SINGLE", "path_in", "stored_tensors"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the model in ``folder``, by name; headers are read, no values.

    Raises:
        CheckpointError: no such folder, or no safetensors model in it.
        CorruptCheckpointError: an index or a header that can't be right, a file that is missing, cut short or
            outside of the folder.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"load_hf: {str(folder)!r} is no folder; it reads local ones (huggingface_hub.snapshot_download "
            "brings one from the hub)"
        )
    if (folder / SINGLE).exists():
        return read_header(path_in(folder, SINGLE), SINGLE)
    if not (folder / INDEX).exists():
        there = sorted(path.name for path in folder.iterdir())[:10]
        raise CheckpointError(
            f"{folder} holds no {SINGLE} and no {INDEX}, which load_hf reads; it holds {there or 'nothing'}"
        )
    files = _index(folder)
    headers = {
        file: read_header(path_in(folder, file), file) for file in sorted(set(files.values()))
    }
    lacking = [name for name, file in files.items() if name not in headers[file]]
    if lacking:
        raise CorruptCheckpointError(
            f"{folder / INDEX} says that {files[lacking[0]]} holds {lacking[0]!r}, but it doesn't"
            + (f"; nor do the files {len(lacking) - 1} more" if len(lacking) > 1 else "")
        )
    return {name: headers[file][name] for name, file in files.items()}


def _index(folder: Path) -> Mapping[str, str]:
    path = path_in(folder, INDEX)
    try:
        with open(path, "rb", opener=open_regular) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > LONGEST:
                raise ValueError(f"it has {size} bytes")
            text = opened.read(LONGEST).decode()
        files = json.loads(text)["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise ValueError("its weight_map is no table of file names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is no index of safetensors files: {error}") from error
    return files


def path_in(folder: Path, name: str) -> Path:
    """Where ``name`` is in ``folder``.

    Raises:
        CorruptCheckpointError: outside of it, or nowhere. The hub's cache is inside: there a snapshot's
            files are links to ``../../blobs``.
    """
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or os.path.isabs(name) or "\\" in name or "\0" in name:
        raise CorruptCheckpointError(f"{folder} names a file {name!r}, which is outside of it")
    path = folder / name
    real, inside = path.resolve(), [folder.resolve()]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in inside):
        raise CorruptCheckpointError(f"{path} is a link to {real}, outside of its folder")
    if not real.is_file():
        raise CorruptCheckpointError(f"{path} is missing, or no file")
    return path
