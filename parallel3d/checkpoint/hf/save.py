"""save_hf: writes a parallel model as a Hugging Face safetensors folder."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d._util import dry_run
from parallel3d.checkpoint.format.files import bytes_of, header_of, is_ours, write_all
from parallel3d.checkpoint.hf import conversion as hf
from parallel3d.checkpoint.hf.tensors import Assembly, Memories
from parallel3d.checkpoint.ranks import Ranks, new_folder, ranks_of
from parallel3d.checkpoint.state import bring_to_rest
from parallel3d.errors import CheckpointError

_TEXTS = {"config.json", "generation_config.json", hf.INDEX}
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def save_hf(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    names: hf.Names = None,
) -> None:
    """Writes ``model`` as a folder that ``from_pretrained`` loads; every rank must call it.

    Files are distributed over the ranks. Each assembles one tensor at a time, or several small ones, from
    pieces that the others send, so that no rank ever has more than its own shards and the largest tensor.
    Everything is written into a temporary folder, which is renamed when it is complete.

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
    if dry_run.active():  # nothing is written
        return
    ranks = ranks_of(model, "save_hf")
    path = Path(os.path.abspath(folder))

    def check() -> int:
        hf.check_dtype(dtype, "save_hf")
        bring_to_rest(model, "save_hf", meta_ok=True)
        return as_bytes(max_shard_size)

    limit = ranks.all(check)[0]
    export = hf.plan_export(model, ranks, names, dtype, "save_hf")
    files = _files(export.outputs, ranks.size, limit)
    # What the config says, in which from_pretrained makes the model.
    own = next((t.dtype for t in export.tensors.values() if t.is_floating_point()), None)
    with new_folder(ranks, path, _is_export) as temporary:
        ranks.all(lambda: exchange(export, files, ranks, temporary))
        ranks.first(lambda: _write_texts(model, files, dtype or own, temporary))


def _is_export(path: Path) -> bool:
    return path.name in _TEXTS or (_WEIGHTS.fullmatch(path.name) is not None and is_ours(path))


def _write_texts(
    model: nn.Module, files: list[OutFile], dtype: torch.dtype | None, folder: Path
) -> None:
    """Writes JSON files: the index, if there are several ``files``, and a transformers model's configs."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(file.nbytes for file in files)},
            "weight_map": {t.name: file.name for file in files for t in file.tensors},
        }
        (folder / hf.INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if not hf.is_transformers(model):
        return
    hf_model: Any = model
    config = copy.deepcopy(hf_model.config)
    config.architectures = [hf.plain_class(model).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if hf_model.can_generate() and getattr(model, "generation_config", None) is not None:
        hf_model.generation_config.save_pretrained(folder)


def _write(folder: Path, file: OutFile, tensor: hf.OutTensor, values: Tensor) -> None:
    """Appends ``values`` of ``tensor`` to ``file``, which is made, with its header, for its first tensor."""
    is_first, is_last = tensor is file.tensors[0], tensor is file.tensors[-1]
    with open(folder / file.name, "xb" if is_first else "ab", buffering=0) as opened:
        if is_first:
            write_all(opened.fileno(), memoryview(file.header))
        write_all(opened.fileno(), bytes_of(values))
        if is_last:
            os.fsync(opened.fileno())


_MIN_FILE = 256 << 20  # bytes; smaller files are not made to give more ranks one to write


@dataclass
class OutFile:
    """A file of the export, written by the rank ``owner``, its number in ``Ranks``."""

    name: str
    header: bytes
    tensors: tuple[hf.OutTensor, ...]
    owner: int = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def _files(outputs: Sequence[hf.OutTensor], ranks: int, limit: int) -> list[OutFile]:
    """Divides tensors, in their order, into files of at most ``limit`` bytes (or one larger tensor), and the
    files evenly among ``ranks`` ranks. Large models get at least one file per rank."""
    total = sum(output.nbytes for output in outputs)
    limit = min(limit, max(-(-total // ranks), _MIN_FILE))
    groups: list[list[hf.OutTensor]] = [[]]
    size = 0  # of the last group
    for output in outputs:
        if groups[-1] and size + output.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.nbytes
    files = []
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header = header_of({t.name: (t.dtype, t.layout.shape) for t in group})
        files.append(OutFile(hf.SINGLE if len(groups) == 1 else name, header, tuple(group)))
    loads = [0] * ranks
    for file in sorted(files, key=lambda file: -file.nbytes):
        file.owner = loads.index(min(loads))
        loads[file.owner] += file.nbytes
    return files


def as_bytes(size: int | str) -> int:
    """Returns a size such as ``"5GB"``, ``"200MiB"`` or a number as a number of bytes."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B\s*", str(size).upper())
    if not isinstance(size, str) or match is None or match[2] not in units:
        raise CheckpointError(f"max_shard_size is {size!r}; give bytes, or a text such as '5GB'")
    return max(1, int(float(match[1]) * units[match[2]]))


_AT_ONCE = 16 << 20
"""Bytes of small tensors that an owner assembles together, and of messages."""


def exchange(export: hf.Export, files: list[OutFile], ranks: Ranks, folder: Path) -> None:
    """Assembles each tensor on the rank that owns its file, which writes it into ``folder``. Collective.

    In each turn every owner assembles its next tensor, or several small ones, from messages of about a
    megabyte, each sent by one of the ranks that hold it.
    """
    held = ranks.on_each(lambda: hf.HeldParts(export.tensors))
    by_owner: list[list[list[tuple[OutFile, hf.OutTensor]]]] = [[] for _ in range(ranks.size)]
    for file in files:
        turns = by_owner[file.owner]
        for tensor in file.tensors:
            if turns and sum(t.nbytes for _, t in turns[-1]) + tensor.nbytes <= _AT_ONCE:
                turns[-1].append((file, tensor))
            else:
                turns.append([(file, tensor)])
    memories: Memories = {}
    for turn in range(max(map(len, by_owner))):
        owned = [
            (r, each) for r, own in enumerate(by_owner) if turn < len(own) for each in own[turn]
        ]
        owners, outputs = [rank for rank, _ in owned], [tensor for _, (_, tensor) in owned]
        # Agreed on, because a rank without memory for its tensor would leave the others waiting.
        given = export, outputs, owners, held, ranks, torch.device("cpu"), memories, _AT_ONCE
        batch = ranks.on_each(partial(Assembly, *given))
        batch.exchange()
        for number in batch.values:
            batch.guarded(partial(_write, folder, *owned[number][1], batch.values[number]))
        ranks.all(batch.finish)
        del batch  # before there is memory for the next
