"""save_hf: a parallel model as a Hugging Face safetensors folder."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.format.blocks import bytes_of
from parallel3d.checkpoint.format.dtypes import NAMES
from parallel3d.checkpoint.hf import target
from parallel3d.checkpoint.hf.entries import Names
from parallel3d.checkpoint.hf.exchange import exchange
from parallel3d.checkpoint.hf.export_plan import OutFile, OutTensor, as_bytes, plan_export
from parallel3d.checkpoint.hf.storage import bring_to_rest
from parallel3d.checkpoint.ranks import ranks_of
from parallel3d.errors import CheckpointError

__all__ = ["save_hf"]


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
    temporary = ranks.first(lambda: target.begin(path))
    done = False
    try:
        ranks.all(lambda: _check_seen(temporary))
        with _Files(temporary) as files:
            ranks.all(lambda: exchange(export, ranks, files.write))
        ranks.first(lambda: target.write_texts(model, export, dtype, temporary))
        ranks.first(lambda: target.finish(temporary, path))
        done = True
    finally:
        if not done and ranks.is_first:
            target.remove(temporary)


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
