"""Loads and saves folders of ``torch.distributed.checkpoint``, as FSDP2 and torchtitan write them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.fsdp import StateDictType

from parallel3d._torch.fully_shard import plain_name
from parallel3d._util import dry_run
from parallel3d.checkpoint.optimizer_state import stateful
from parallel3d.checkpoint.ranks import new_folder, ranks_of
from parallel3d.checkpoint.torch_formats.dcp_folder import (
    DcpTensor,
    StoredAt,
    read_folder,
    read_small,
)
from parallel3d.checkpoint.torch_formats.loading import Checkpoint, LoadOptions, load, state_at_rest
from parallel3d.checkpoint.torch_formats.names import without_wrappers
from parallel3d.checkpoint.torch_formats.optimizer import SavedOptimizer, saved_in_names
from parallel3d.checkpoint.torch_formats.sources import Budget
from parallel3d.checkpoint.values import refuse_wrapper
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
