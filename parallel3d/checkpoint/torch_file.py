"""Files of ``torch.save``: a plain state dict in and out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from parallel3d.checkpoint.ranks import ranks_of
from parallel3d.checkpoint.torch_formats.archive import Archive
from parallel3d.checkpoint.torch_formats.folder import FileTensor, Memory, blob_in
from parallel3d.checkpoint.torch_formats.loading import Contents, load
from parallel3d.checkpoint.torch_formats.model_target import (
    EXTRA_STATE,
    cleaned,
    find_model,
    find_optimizer,
    others,
    shown,
    state_at_rest,
)
from parallel3d.checkpoint.torch_formats.optimizer_target import (
    SavedOptimizer,
    saved_in_dict,
    saved_in_names,
)
from parallel3d.checkpoint.torch_formats.pickled import MAX_NAME, SavedTensor
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.fsdp import model_state_dict, optim_state_dict

_FULL = StateDictType.FULL_STATE_DICT
_MAX_VALUES, _MAX_DEPTH = 1_000_000, 20
_TWICE: Any = object()  # in place of what is there under one name in several dicts


def load_torch(
    file: str | os.PathLike[str],
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
    """Loads a file that ``torch.save`` has written: a state dict of whole tensors, or a dict with one in it.

    Every rank of the model's mesh must call it, and copies what it holds out of the file. An optimizer's
    state may be keyed by number, as ``optimizer.state_dict()`` is, or by name. Nothing in the file is
    executed: it may have tensors, dicts, lists, tuples, numbers and strings in it. The ranks of a host verify
    the checksums together.

    Args:
        model_prefix, optimizer_prefix: the keys that lead to the model's state dict and to the optimizer's,
            joined and ended by dots: "checkpoint.model.". None: found out.
        optimizer, strict, cast, checksums: as for ``load_dcp``.
        trusted: unpickle the file, which runs whatever it says, as it must be for files with objects of other
            classes and for those from before torch 1.6: only for files you made.

    Raises:
        CheckpointError: on every rank, naming what is wrong; a CorruptCheckpointError if it is damaged. Model
            and optimizer are unchanged.
    """
    read = partial(
        _read,
        Path(file),
        with_optimizer=optimizer is not None,
        prefixes=(model_prefix, optimizer_prefix),
        checksums=checksums,
        trusted=trusted,
    )
    load(model, optimizer, read, strict=strict, cast=cast, share=True)


def _read(
    path: Path,
    state: dict[str, Any],
    *,
    with_optimizer: bool,
    prefixes: tuple[str | None, str | None],
    checksums: bool,
    trusted: bool,
) -> Contents:
    """What the file has for a model with the state dict ``state``."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is no file; load_torch reads one that torch.save has written"
        )
    archive = Archive(path, 0, path.stat().st_size, what=str(path), checksums=checksums)
    if trusted:
        content = torch.load(path, map_location="cpu", weights_only=False, mmap=_is_zip(path))
    else:
        _check_is_zip(path)
        content = archive.value
    leaves, dicts = _flat(content, str(path))
    stored = cleaned(leaves)
    before = find_model(list(state), stored, given=prefixes[0])
    mine = {name.removeprefix(before): name for name in stored if name.startswith(before)}
    found = {name: _value(archive, stored[mine[name]], name) for name in state if name in mine}
    unexpected = others(mine, state, beside=not before)
    if not with_optimizer:
        return Contents(found, unexpected, None)
    at = find_optimizer(leaves, given=prefixes[1], model=before)
    if at not in dicts:
        raise CheckpointError(f"{path} has no optimizer at {at!r}; it has {shown(dicts)}")
    _check_once(archive, dicts[at], at)
    parts = tuple(f"{at}{part}" for part in ("state.", "param_groups"))
    unexpected = [name for name in unexpected if not mine[name].startswith(parts)]
    return Contents(found, unexpected, _optimizer(archive, dicts[at], state))


def _optimizer(
    archive: Archive, value: Mapping[Any, Any], names: Mapping[str, Any]
) -> SavedOptimizer:
    if "param_groups" in value:
        saved = saved_in_dict(value)
    else:  # flattened
        saved = saved_in_names({k: v for k, v in value.items() if isinstance(k, str)}, names)
    state = {
        name: {key: _value(archive, each, f"{key} of {name}") for key, each in entry.items()}
        for name, entry in saved.state.items()
    }
    groups = tuple(
        type(group)({k: blob_in(archive, v) for k, v in group.options.items()}, group.params)
        for group in saved.groups
    )
    return SavedOptimizer(state, groups)


def _value(archive: Archive, value: Any, name: str) -> Any:
    """A tensor's source, or any other value."""
    if isinstance(value, SavedTensor):
        return FileTensor(archive, value)
    _check_once(archive, value, name)
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"{archive.what}: {name} is a DTensor: a rank's own part, not the whole; save whole tensors"
        )
    if isinstance(value, Tensor):
        return Memory(value.detach())
    return blob_in(archive, value)


def _check_once(archive: Archive, value: Any, name: str) -> None:
    if value is _TWICE:
        raise CheckpointError(
            f"{archive.what} has {name!r} twice: by one key with dots in it, and by several; which is meant?"
        )


def _flat(content: Any, what: str) -> tuple[dict[str, Any], dict[str, Mapping[Any, Any]]]:
    """(what is no dict, dicts), by their keys, joined by dots; a dict's path ends with one."""
    leaves: dict[str, Any] = {}
    dicts: dict[str, Mapping[Any, Any]] = {"": content}
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{what} has a {type(content).__name__} in it; it must have a state dict"
        )
    waiting: list[tuple[str, Mapping[Any, Any], int]] = [("", content, 0)]
    while waiting:
        path, entries, depth = waiting.pop()
        for key, value in entries.items():
            if isinstance(key, (str, bytes)) and len(path) + len(key) > MAX_NAME:
                continue  # no name of a model's
            name = f"{path}{key}"
            nested = isinstance(value, Mapping) and not name.endswith(EXTRA_STATE)
            if nested and depth < _MAX_DEPTH:
                dicts[f"{name}."] = _TWICE if f"{name}." in dicts else value
                waiting.append((f"{name}.", value, depth + 1))
            else:
                leaves[name] = _TWICE if name in leaves else value
        if len(leaves) + len(waiting) > _MAX_VALUES or len(dicts) > _MAX_VALUES:
            raise CorruptCheckpointError(f"{what} has dicts within dicts without end")
    return leaves, dicts


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _check_is_zip(path: Path) -> None:
    if not _is_zip(path):
        raise CorruptCheckpointError(
            f"{path} doesn't begin as what torch.save writes; if it is from before torch 1.6 and you trust "
            "who made it: trusted=True"
        )


# -- out ---------------------------------------------------------------------------------------------------


def save_torch(file: str | os.PathLike[str], model: nn.Module, optimizer: Any = None) -> None:
    """Writes one file of whole tensors that plain ``torch.load`` and ``load_state_dict`` take.

    Every rank of the model's mesh must call it. Tensors are gathered unit by unit; the first rank keeps
    them, on its host, which must have room for the whole model (and optimizer), and writes. The file appears
    under its name when it is complete.

    Args:
        file: what is there is replaced.
        optimizer: with it the file is ``{"model": ..., "optimizer": ...}``, as of the plain model's
            ``state_dict()`` and its optimizer's, which has parameters in the same order. None: the model's
            state dict alone.

    Raises:
        CheckpointError: on every rank; what was there under the name still is.
    """
    ranks = ranks_of(model, "save_torch")
    path = Path(file)
    ranks.all(lambda: state_at_rest(model, "saving a checkpoint") and None)
    whole = {"type": _FULL, "offload_to_cpu": True, "rank0_only": True}
    state: dict[str, Any] = {}

    def gather() -> bool:
        state.update(model_state_dict(model, **whole))  # type: ignore[arg-type]
        if optimizer is not None:
            found = optim_state_dict(model, optimizer, **whole)  # type: ignore[arg-type]
            both = {"model": dict(state), "optimizer": _by_number(found) if state else {}}
            state.clear()
            state.update(both if both["model"] else {})
        return bool(state)

    have = ranks.all(gather)
    if not any(have):
        raise CheckpointError("no rank has the whole model: its parameters are on several meshes")
    writes = ranks.rank == have.index(True)
    ranks.all(lambda: _write(path, _compact(state)) if writes else None)


def _by_number(found: dict[str, Any]) -> dict[str, Any]:
    """As the plain optimizer's ``state_dict()``."""
    names = [name for group in found["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in found["param_groups"]
    ]
    state = {numbers.get(name, name): entry for name, entry in found["state"].items()}
    return {
        "state": dict(sorted(state.items(), key=lambda each: str(each[0]))),
        "param_groups": groups,
    }


def _compact(value: Any, known: dict[int, Tensor] | None = None) -> Any:
    """``value`` with tensors whose memory holds their values and nothing else; tied ones stay tied."""
    known = {} if known is None else known
    if isinstance(value, dict):
        return {key: _compact(each, known) for key, each in value.items()}
    if isinstance(value, Tensor):
        if id(value) not in known:
            own = value.detach().resolve_conj().resolve_neg()
            small = own.untyped_storage().nbytes() == own.nbytes
            known[id(value)] = own if small else own.clone(memory_format=torch.contiguous_format)
        return known[id(value)]
    return value


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
    try:
        with open(made, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
