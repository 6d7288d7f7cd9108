"""load_torch and save_torch: files of ``torch.save`` with a plain state dict."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from parallel3d._util import dry_run
from parallel3d.checkpoint.format.files import hidden_beside
from parallel3d.checkpoint.ranks import ranks_of
from parallel3d.checkpoint.torch_formats import loading
from parallel3d.checkpoint.torch_formats.names import MAX_NAME, shown, without_wrappers
from parallel3d.checkpoint.torch_formats.optimizer import (
    SavedGroup,
    SavedOptimizer,
    saved_in_dict,
    saved_in_names,
)
from parallel3d.checkpoint.torch_formats.sources import Archive, Budget, Memory
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.fsdp import model_state_dict, optim_state_dict

_MAX_ENTRIES, _MAX_DEPTH = 2_000_000, 20
_TWICE: Any = object()  # in place of values that several keys give one flat name


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
    """Loads a file that ``torch.save`` has written: a state dict of whole tensors, or a dict that contains
    one.

    Every rank of the model's mesh must call it, and reads what it holds, from the mapped file. An optimizer's
    state may be keyed by number, as ``optimizer.state_dict()`` is, or by name. Nothing in the file is
    executed: it may contain what ``torch.load(weights_only=True)`` takes. The ranks of a host verify the
    checksums of the whole file together.

    Args:
        file: its path, which every rank must be able to read.
        model: values are copied into its parameters and persistent buffers.
        model_prefix, optimizer_prefix: the keys that lead to the model's state dict and to the optimizer's,
            each followed by a dot: "checkpoint.model."; None: search for them.
        optimizer, strict, cast, checksums: as for ``load_dcp``.
        trusted: unpickle the file, which runs code that it contains. It is needed for files with objects of
            other classes, of another pickle protocol than 2, and from before torch 1.6: only for files you
            made.

    Raises:
        CheckpointError: on every rank, naming what is wrong; a CorruptCheckpointError if it is damaged. Model
            and optimizer are unchanged.
    """
    options = loading.LoadOptions(model_prefix, optimizer_prefix, strict, cast, checksums, trusted)
    loading.load("load_torch", model, optimizer, partial(_File, Path(file)), options)


class _File(loading.Checkpoint):
    """A file of ``torch.save``, opened for ``load_torch``."""

    def __init__(self, path: Path, options: loading.LoadOptions) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file; load_torch reads those of torch.save")
        self._what, real, size = str(path), path.resolve(), path.stat().st_size
        self._archive = Archive(real.parent, real.name, 0, size, self._what)
        self._budget, self._trusted = Budget(size, self._what), options.trusted
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        if not self._trusted:
            if not is_zip:
                raise CorruptCheckpointError(
                    f"{path} doesn't begin as a file of torch.save; if it is from before torch 1.6 and you "
                    "trust who made it: trusted=True"
                )
            if options.checksums:
                self._archive.verify(["data.pkl"])
                self.shared = self._archive
        content = self._archive.load(trusted=self._trusted, mmap=is_zip)
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{path} has a {type(content).__name__} in it; it must have a state dict"
            )
        leaves, self._dicts = _flat(content, self._what)
        self.names = without_wrappers(leaves)

    def value(self, name: str) -> Any:
        return self._converted(self.names[name], name)

    def _converted(self, value: Any, name: str) -> Any:
        self._check_unique(value, name)
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{self._what}: {name} is a DTensor: a rank's own part, not the whole; save whole tensors"
            )
        if isinstance(value, Tensor):
            self._check(value)
            return Memory(value, self._budget)
        return self._own(value)

    def _check(self, tensor: Tensor) -> None:
        if not self._trusted:
            self._archive.check(tensor)

    def _own(self, value: Any) -> Any:
        """Returns a copy whose tensors are not views of the mapped file."""
        for tensor in self._budget.count(value):
            self._check(tensor)
        return copy.deepcopy(value)

    def _check_unique(self, value: Any, name: str) -> None:
        if value is _TWICE:
            raise CheckpointError(
                f"{self._what} has {name!r} twice: by one key with dots in it, and by several keys; which is "
                "meant?"
            )

    def optimizer(self, prefix: str, params: Mapping[str, Any]) -> SavedOptimizer:
        if prefix not in self._dicts:
            raise CheckpointError(
                f"{self._what} has no optimizer at {prefix!r}; it has {shown(self._dicts)}"
            )
        content = self._dicts[prefix]
        self._check_unique(content, prefix)
        if "param_groups" in content:
            saved = saved_in_dict(content)
        else:  # flattened
            flat = {key: value for key, value in content.items() if isinstance(key, str)}
            saved = saved_in_names(flat, params)
        state = {
            name: {key: self._converted(v, f"{key} of {name}") for key, v in entry.items()}
            for name, entry in saved.state.items()
        }
        options = self._own([group.options for group in saved.groups])
        groups = [SavedGroup(o, g.params) for o, g in zip(options, saved.groups, strict=True)]
        return SavedOptimizer(state, tuple(groups))


def _flat(
    content: Mapping[Any, Any], what: str
) -> tuple[dict[str, Any], dict[str, Mapping[Any, Any]]]:
    """Returns (values that are no dicts, dicts) inside ``content``, by keys joined by dots; a dict's name
    ends with a dot. ``what`` names the file in errors."""
    leaves: dict[str, Any] = {}
    dicts: dict[str, Mapping[Any, Any]] = {"": content}
    waiting: list[tuple[str, Mapping[Any, Any], int]] = [("", content, 0)]
    described = len(content)  # entries, counted before there is a name for each
    while waiting:
        path, entries, depth = waiting.pop()
        for key, value in entries.items():
            long = isinstance(key, str) and len(path) + len(key) > MAX_NAME
            if long or not isinstance(key, (str, int, float, NoneType)):
                continue  # it is not the name of a model's tensor
            name = f"{path}{key}"
            nested = isinstance(value, Mapping) and not name.endswith(loading.EXTRA_STATE)
            if nested and depth < _MAX_DEPTH:
                dicts[f"{name}."] = _TWICE if f"{name}." in dicts else value
                waiting.append((f"{name}.", value, depth + 1))
                described += len(value)
            else:
                leaves[name] = _TWICE if name in leaves else value
            if described > _MAX_ENTRIES:
                raise CorruptCheckpointError(f"{what} has dicts within dicts without end")
    return leaves, dicts


def save_torch(file: str | os.PathLike[str], model: nn.Module, optimizer: Any = None) -> None:
    """Writes one file of whole tensors, which plain ``torch.load`` and ``load_state_dict`` read.

    Every rank of the model's mesh must call it. Tensors are gathered unit by unit; the first rank keeps them
    in host memory, which must have room for the whole model (and optimizer), and writes. The file gets its
    name when it is complete.

    Args:
        file: its path; an existing one is replaced.
        model: its parameters and persistent buffers are written.
        optimizer: with it the file is ``{"model": ..., "optimizer": ...}``, as the plain model's
            ``state_dict()`` and its optimizer's with parameters in the same order. None: the model's state
            dict alone.

    Raises:
        CheckpointError: on every rank; an existing file is unchanged.
    """
    if dry_run.active():  # nothing is written
        return
    ranks = ranks_of(model, "save_torch")
    path = Path(file)
    ranks.on_each(lambda: loading.state_at_rest(model, "saving a checkpoint"))
    kind = StateDictType.FULL_STATE_DICT
    whole: dict[str, Any] = {"type": kind, "offload_to_cpu": True, "rank0_only": True}

    def gather() -> dict[str, Any]:
        state: dict[str, Any] = model_state_dict(model, **whole)
        if optimizer is None:
            return state
        gathered = optim_state_dict(model, optimizer, **whole)
        return {"model": state, "optimizer": _by_number(gathered)} if state else {}

    state = ranks.on_each(gather)
    have = ranks.all(lambda: bool(state))
    if not any(have):
        raise CheckpointError("no rank has the whole model: its parameters are on several meshes")
    writes = ranks.rank == have.index(True)
    ranks.all(lambda: _write(path, _compact(state)) if writes else None)


def _by_number(gathered: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state dict with numbers in place of names, as plain ``state_dict()`` has it."""
    names = [name for group in gathered["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in gathered["param_groups"]
    ]
    state = {numbers.get(name, name): entry for name, entry in gathered["state"].items()}
    ordered = dict(sorted(state.items(), key=lambda item: str(item[0])))
    return {"state": ordered, "param_groups": groups}


def _compact(value: Any, known: dict[int, Tensor] | None = None) -> Any:
    """Returns ``value`` with tensors in storages of their own size, so that no more is saved; keeps ties."""
    known = {} if known is None else known
    if isinstance(value, dict):
        return {key: _compact(item, known) for key, item in value.items()}
    if isinstance(value, Tensor):
        if id(value) not in known:
            own = value.detach().resolve_conj().resolve_neg()
            exact = own.untyped_storage().nbytes() == own.nbytes
            known[id(value)] = own if exact else own.clone(memory_format=torch.contiguous_format)
        return known[id(value)]
    return value


def _write(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = hidden_beside(path, "tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
