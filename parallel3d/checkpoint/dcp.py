"""Folders of ``torch.distributed.checkpoint``, as torch's own FSDP2 and torchtitan write them, in and out."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.fsdp import StateDictType

from parallel3d.checkpoint.ranks import Ranks, as_checkpoint_error, ranks_of
from parallel3d.checkpoint.torch_formats.folder import (
    DcpFolder,
    DcpTensor,
    StoredAt,
    archive_at,
    blob_of,
    small,
)
from parallel3d.checkpoint.torch_formats.loading import Contents, load
from parallel3d.checkpoint.torch_formats.model_target import (
    cleaned,
    find_model,
    find_optimizer,
    others,
    state_at_rest,
)
from parallel3d.checkpoint.torch_formats.optimizer_target import saved_in_names
from parallel3d.errors import CheckpointError
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

    Every rank of the model's mesh must call it. Read are the usual forms:
    ``{"model": ..., "optimizer": ...}`` of ``get_model_state_dict`` and ``get_optimizer_state_dict`` (or of
    the ``state_dict()`` of both), a model's state dict at the top, ``{"app": ...}`` as in torch's tutorial,
    torchtitan's, and flattened optimizers.

    Each rank reads the chunks that it holds something of, twice, one at a time: first all ranks see that
    everything is there, fits and has the checksum it was written with; then values are copied. Nothing in the
    folder is executed. State that the optimizer doesn't have yet is made, laid out as its parameters are.

    Args:
        optimizer: one over parameters of ``model``, also of ``parallel3d.optim``; None: the model alone.
        model_prefix, optimizer_prefix: what the folder's names have before the model's and before
            "param_groups", "app.model." say. None: found out.
        strict: all of the model's names must be there, and no other ones beside them.
        cast: convert values of another dtype.
        checksums: compare them. False: for what was written under
            ``torch.serialization.set_crc32_options(False)``.
        trusted: read values of classes that torch doesn't write, by ``pickle``, which runs whatever
            the folder says: only for folders you made.

    Raises:
        CheckpointError: on every rank, naming what is wrong; a CorruptCheckpointError if it is damaged. Model
            and optimizer are unchanged.
    """
    read = partial(
        _read,
        Path(folder),
        with_optimizer=optimizer is not None,
        prefixes=(model_prefix, optimizer_prefix),
        checksums=checksums,
        trusted=trusted,
    )
    load(model, optimizer, read, strict=strict, cast=cast, share=False)


def _read(
    path: Path,
    state: dict[str, Any],
    *,
    with_optimizer: bool,
    prefixes: tuple[str | None, str | None],
    checksums: bool,
    trusted: bool,
) -> Contents:
    """What the folder has for a model with the state dict ``state``."""
    folder = DcpFolder.read(path, trusted=trusted)
    tensors = {n: DcpTensor(n, folder, s, checksums) for n, s in folder.tensors.items()}
    stored = cleaned({**tensors, **folder.blobs})
    value = partial(_value, folder, checksums=checksums, trusted=trusted)
    before = find_model(list(state), stored, given=prefixes[0])
    mine = {name.removeprefix(before): name for name in stored if name.startswith(before)}
    unexpected = others(mine, state, beside=not before)
    found = {name: value(stored[mine[name]], mine[name]) for name in state if name in mine}
    if not with_optimizer:
        return Contents(found, unexpected, None)
    at = find_optimizer(stored, given=prefixes[1], model=before)
    parts = tuple(f"{at}{part}" for part in ("state.", "param_groups"))
    flat = {
        name.removeprefix(at): value(each, name)
        for name, each in stored.items()
        if name.startswith(parts)
    }
    flat = {
        name: small(each, at + name)
        if isinstance(each, DcpTensor) and name.startswith("param_groups")
        else each
        for name, each in flat.items()
    }
    unexpected = [name for name in unexpected if not mine[name].startswith(parts)]
    return Contents(found, unexpected, saved_in_names(flat, state))


def _value(folder: DcpFolder, stored: Any, name: str, *, checksums: bool, trusted: bool) -> Any:
    """A tensor's source, or the value of a blob."""
    if not isinstance(stored, StoredAt):
        return stored
    archive = archive_at(folder, stored, f"{folder.path}: {name}", checksums=checksums)
    if not trusted:
        return blob_of(archive)
    for entry in archive.entries.values():
        entry.verify()
    return torch.load(io.BytesIO(archive.raw()), map_location="cpu", weights_only=False)


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
        folder: must not be there, or be empty; it appears under its name when everything is written.
        optimizer: one over parameters of ``model``; None: the model alone. It is saved as it is: one that has
            taken no step has no state, and torch's loading, which first makes some, doesn't find it.
        model_prefix, optimizer_prefix: what stands before the names; "" puts a model at the top, as
            torchtitan does.
        flatten_optimizer: as the option ``flatten_optimizer_state_dict`` does.

    Raises:
        CheckpointError: on every rank; nothing is left of what was written.
    """
    ranks = ranks_of(model, "save_dcp")
    path = Path(folder)
    written = ranks.first(lambda: _begin(path))
    try:
        ranks.all(
            lambda: _write(
                written,
                _nested(
                    model, optimizer, model_prefix, optimizer_prefix, flatten=flatten_optimizer
                ),
                ranks,
            )
        )
        ranks.first(lambda: os.replace(written, path))
    finally:
        if ranks.is_first:
            shutil.rmtree(written, ignore_errors=True)


def _begin(path: Path) -> Path:
    """A new folder beside ``path``, for what is to become it."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path} is there already, and no folder")
    if path.is_dir() and any(path.iterdir()):
        raise CheckpointError(
            f"{path} is there already, with files in it; give another, or remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
    made.mkdir()
    return made


def _write(path: Path, state: dict[str, Any], ranks: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a process is alone
        torch_checkpoint.save(
            state,
            storage_writer=torch_checkpoint.FileSystemWriter(path),
            planner=_Planner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )


class _Planner(torch_checkpoint.DefaultSavePlanner):
    """torch's, of tensors whose memory holds their values: with the conjugate bit, or the negative one,
    it would hold others, and what torch writes then isn't read by all."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.resolve_conj().resolve_neg() if isinstance(found, torch.Tensor) else found


def _nested(
    model: nn.Module, optimizer: Any, model_at: str, optimizer_at: str, *, flatten: bool
) -> dict[str, Any]:
    """What is saved, as nested as the prefixes say."""
    state: dict[str, Any] = {}
    _put(state, model_at, state_at_rest(model, "saving a checkpoint"))
    if optimizer is not None:
        found = optim_state_dict(
            model, optimizer, type=StateDictType.SHARDED_STATE_DICT, offload_to_cpu=False
        )
        for group in found["param_groups"]:
            group.pop("param_names", None)  # params are names already
        _put(state, optimizer_at, _flattened(found) if flatten else found)
    return state


def _put(state: dict[str, Any], at: str, values: dict[str, Any]) -> None:
    for part in filter(None, at.split(".")):
        state = state.setdefault(part, {})
    state.update(values)


def _flattened(found: dict[str, Any]) -> dict[str, Any]:
    flat = {
        f"state.{name}.{key}": value
        for name, state in found["state"].items()
        for key, value in state.items()
    }
    for group in found["param_groups"]:
        for name in group["params"]:
            for key, value in group.items():
                if key != "params":
                    flat[f"param_groups.{name}.{key}"] = value
    return flat


# What DCP raises when a rank fails, as errors of this package.

HALF_READ = (
    "This came while values were read in: some are the checkpoint's now, others not. "
    "Load again before you go on"
)


@contextmanager
def dcp_errors(*, alone: bool, size: int = 1) -> Iterator[None]:
    """Turns a CheckpointException, which DCP raises on all ranks, into one CheckpointError.

    Args:
        alone: for one process, where DCP warns that it is.
        size: how many ranks there are, to name those that failed if not all did.
    """
    try:
        if alone:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
        else:
            yield
    except CheckpointException as error:
        problems = {rank: problem for rank, (problem, _) in error.failures.items()}
        for problem in problems.values():
            if not isinstance(problem, Exception):  # a KeyboardInterrupt
                raise problem from error
        found = as_checkpoint_error(problems, size)  # type: ignore[arg-type]
        if error.args[0] == "read":
            found = CheckpointError(f"{found}\n{HALF_READ}")
        raise found from error
