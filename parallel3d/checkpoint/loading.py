"""load: reads a checkpoint into a model on any mesh, or changes nothing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._util import dry_run
from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format.folder import Index, TensorEntry
from parallel3d.checkpoint.format.storage import LoadPlanner, Reader, read_whole
from parallel3d.checkpoint.pieces import check_own_memory
from parallel3d.checkpoint.ranks import HALF_READ, Ranks, check_same, dcp_errors, ranks_of
from parallel3d.checkpoint.rng import loaded_rng
from parallel3d.checkpoint.saving import axes_of, mesh_of
from parallel3d.checkpoint.state import (
    PREFIX,
    Contents,
    LoadedOptimizers,
    ModelState,
    StoredNames,
    as_optimizers,
    extra_name,
    model_state,
    stored_extra_state,
)
from parallel3d.checkpoint.torch_formats.names import shown
from parallel3d.checkpoint.values import as_dict, decode, encode, keeper
from parallel3d.errors import CheckpointError, CorruptCheckpointError, DryRunError

_LOOKS = 30  # at a run whose checkpoints its job removes while they are read


@dataclass(frozen=True)
class Info:
    """What ``load`` has read besides tensors of the model and the optimizer.

    Attributes:
        path: the checkpoint's folder, absolute.
        step: how many steps had been done.
        extra: the argument of ``save``.
        mesh: axis -> size of the mesh that saved it; None for a plain model.
        versions: versions of torch, parallel3d and Python that saved it.
        rng: what was done with the random generators: ``"restored"`` (same ranks and mesh), ``"reseeded"``
            (from the arguments of ``seed_step``) or ``"left"`` unchanged.
        skipped: newer folders that are links or not complete checkpoints, and why.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    mesh: dict[str, int] | None
    versions: dict[str, str]
    rng: str
    skipped: list[tuple[Path, str]] = field(default_factory=list)


# Tensors allocated here must not be inference tensors; existing ones may be.
@torch.inference_mode(False)
@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Info:
    """Reads a checkpoint that ``save`` has written, on this mesh or another, into the existing tensors.

    All ranks must call it. Each rank verifies what it needs; when all have done so, they read. So if anything
    is wrong, on any rank, model and optimizer are unchanged.

    Args:
        path: a run's folder: the checkpoint saved last is read or, with a warning, an earlier one if that is
            damaged. Or the folder of one checkpoint. A relative path is resolved on the first rank.
        model: sharded, replicated or plain; with the names and global shapes of the model that was saved.
        optimizer: as given to ``save``; may be new, without state. None: stored state is not read.
        extra: tensors to read into, in the structure that was saved: sharded or large ones. Others are
            returned, whole on each rank; they and modules' extra state may have 1 GiB in all.

    Raises:
        CorruptCheckpointError: on all ranks: it is incomplete, damaged, or no checkpoint of this package.
        CheckpointError: on all ranks: it is of another model, by names, shapes or dtypes.
        DryRunError: in a dry run.
    """
    if dry_run.active():
        raise DryRunError(
            "checkpoint.load in a dry run: there are no values to read into; ask checkpoint.latest first, "
            "which finds none there, or skip it with parallel3d.tools.dryrun.active()"
        )
    ranks = ranks_of(model, "load")

    def checked() -> list[Optimizer]:
        folders.as_path(path)
        return as_optimizers(optimizer)

    optimizers = ranks.on_each(checked)
    skipped: list[tuple[Path, str]] = []
    half_read = ""  # a note, once a folder was removed while its values were read
    for _ in range(_LOOKS):
        run, candidates = ranks.first(lambda: _find(path))
        for folder, identity in candidates:
            if folder in (skipped_folder for skipped_folder, _ in skipped):
                continue
            try:
                index, info = ranks.first(partial(_open, folder, run))
                result = _Load(folder, index, info, ranks).run(model, optimizers, extra, skipped)
            except CheckpointError as error:
                if folder != run:
                    current = ranks.first(partial(folders.identity, folder))
                    if current is None or current != identity:
                        half_read = half_read or (HALF_READ if HALF_READ in str(error) else "")
                        break  # removed or replaced, because a newer one exists: look again
                if half_read and half_read not in str(error):
                    raise type(error)(f"{error}\n{half_read}") from error
                if folder == run or not isinstance(error, CorruptCheckpointError):
                    raise
                skipped.append((folder, str(error)))
                continue
            if skipped and ranks.is_first:
                why = "; ".join(text for _, text in skipped)
                # The caller is two decorators away.
                warnings.warn(f"loaded {folder.name}, not the newest, for: {why}", stacklevel=4)
            return result
        else:
            why = "\n".join(f"  {text}" for _, text in skipped)
            raise CorruptCheckpointError(f"no checkpoint in {run} can be read:\n{why}")
    raise CheckpointError(
        f"{_LOOKS} checkpoints of {run} were removed while they were read: another job saves there faster "
        f"than they can be read, with a small keep; let it keep more\n{half_read}"
    )


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Returns the absolute path of the checkpoint of a run that was saved last; None if there is none.

    All ranks must call it. In a dry run there is none.

    Args:
        path: the run's folder; a relative one is resolved on the first rank.
    """
    if dry_run.active():
        return None

    def find() -> Path | None:
        run = folders.as_path(path).absolute()
        if not run.is_dir():
            return None
        folders.note_newest(run)
        return next(iter(folders.complete(run)), None)

    return ranks_of(None, "latest").first(find)


_Candidates = list[tuple[Path, tuple[int, int, int] | None]]


def _find(given: str | os.PathLike[str]) -> tuple[Path, _Candidates]:
    """Returns (the absolute path, checkpoints to try in this order, each with its ``identity``)."""
    path = folders.as_path(given).absolute()
    if not path.exists():
        raise CheckpointError(f"there is nothing at {path}")
    if path.is_file():
        raise CorruptCheckpointError(
            f"{path} is a file; a checkpoint is a folder. Files of torch.save are read by "
            "parallel3d.checkpoint.load_torch"
        )
    if folders.is_checkpoint(path):
        return path, [(path, None)]
    candidates = folders.found_in(path)
    if not all(folder.is_symlink() for folder in candidates):
        folders.note_newest(path)
        return path, [(folder, folders.identity(folder)) for folder in candidates]
    hint = f"; {candidates[0].name} is a link, and links aren't followed" if candidates else ""
    if (path / ".metadata").exists():
        hint = "; torch.distributed.checkpoint wrote it: use parallel3d.checkpoint.load_dcp"
    elif any(path.glob("*.safetensors")):
        hint = "; it has safetensors: for a Hugging Face model use parallel3d.checkpoint.load_hf"
    raise CorruptCheckpointError(f"{path} has no checkpoint of parallel3d{hint}")


def _open(folder: Path, run: Path) -> tuple[Index, dict[str, Any]]:
    """As ``open_checkpoint``, but refuses a link, unless it is ``run``, the path that the user gave."""
    if folder != run and folder.is_symlink():
        raise CorruptCheckpointError(
            f"{folder} is a link, and those in a run's folder aren't followed; load it by its own path"
        )
    return folders.open_checkpoint(folder)


@dataclass
class _Load:
    """One attempt to load the checkpoint ``folder``; ``targets``: stored name -> tensor to read into."""

    folder: Path
    index: Index
    info: dict[str, Any]
    ranks: Ranks
    targets: dict[str, Tensor] = field(default_factory=dict)

    def run(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        extra: Mapping[str, Any] | None,
        skipped: list[tuple[Path, str]],
    ) -> Info:
        """Checks everything, reads tensors, then sets state of optimizers and generators. Collective."""
        check_same("load", self.ranks.all(lambda: self._prepare(model, optimizers, extra)))
        self.ranks.with_undo(self.extra_state.apply, self._read, self.extra_state.undo)
        self.optimizers.commit()
        return Info(
            path=self.folder,
            step=self.contents.step,
            extra=self.extra,
            mesh=self.contents.mesh,
            versions=self.contents.versions,
            rng=self.rng(),
            skipped=skipped,
        )

    def _read(self) -> None:
        """Reads into the target tensors, once all ranks have verified what they need. Collective."""
        with dcp_errors(self.ranks):
            dcp.load(
                {name: tensor.detach() for name, tensor in self.targets.items()},
                storage_reader=Reader(self.folder, self.index),
                planner=LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self.ranks.group,
                no_dist=self.ranks.group is None,
            )
        for tensor in self.targets.values():
            if not tensor.is_inference():
                increment_version(tensor)
                if isinstance(tensor, DTensor):
                    increment_version(get_local_tensor(tensor))

    def _prepare(
        self, model: nn.Module, optimizers: list[Optimizer], extra: Mapping[str, Any] | None
    ) -> dict[str, object]:
        """Finds the tensors to read into and checks that everything fits; reads what every rank reads whole
        (random states, extra state, extra). Returns the arguments that must be the same on all ranks."""
        contents = self.contents = Contents(self.folder, self.info, self.index)
        stored = StoredNames(self.folder, self.index)
        for alias, name in contents.ties.items():
            self.index.tensors[alias] = self.index.tensors[name]
        state = model_state(model, contents.only)
        self.targets |= _matched(self.folder, self.index, state, contents)
        self.extra_state = stored_extra_state(model, contents, stored)
        self.optimizers = LoadedOptimizers(model, optimizers, contents, stored)
        self.targets |= self.optimizers.tensors
        self._prepare_extra(extra, stored)
        mesh = mesh_of(model.parameters())
        same = contents.ranks == self.ranks.size and contents.mesh == axes_of(mesh)
        self.rng = loaded_rng(contents, stored, self.ranks, mesh, same)
        for name, target in self.targets.items():
            _check_fits(self.folder, name, self.index.tensors[name], target)
        return {"optimizers": len(optimizers)}

    def _prepare_extra(self, extra: Mapping[str, Any] | None, stored: StoredNames) -> None:
        targets: dict[str, Tensor] = {}
        if extra is not None:
            encode(as_dict("extra", extra), "extra", keeper(targets))
        read = stored.reader("extra[")

        def target(name: str) -> Tensor:
            if name not in targets:
                return read(name)
            stored.take(name, "extra[")
            self.targets[name] = targets.pop(name)
            return self.targets[name]

        self.extra = decode(self.contents.extra, target)
        if not isinstance(self.extra, dict):
            raise CorruptCheckpointError(f"{self.folder}: checkpoint.json is damaged: no extra")
        if targets:
            raise CheckpointError(
                f"{self.folder} has no tensor {next(iter(targets))}, which load was given to read into"
            )


def _matched(
    folder: Path, index: Index, state: ModelState, contents: Contents
) -> dict[str, Tensor]:
    """Returns the model's tensors by stored name; raises CheckpointError unless both have the same names."""
    stored = {name for name in index.tensors if name.startswith(PREFIX)}
    known = {*state.tensors, *state.ties}
    missing = [name for name in state.tensors if name not in stored]
    extra = tuple(map(extra_name, contents.extra_state))
    lost = [name for name in sorted(stored - known) if not name.startswith(extra)]
    if missing or lost:
        parts = [f"{folder} is not of this model"]
        if contents.only == "trainable":
            parts[0] += " (it was saved with only='trainable')"
        for names, among, what in (
            (missing, stored, "it doesn't have"),
            (lost, known, "the model doesn't have its"),
        ):
            if names:
                parts.append(f"{what} {shown(map(_short, names), map(_short, among))}")
        raise CheckpointError("; ".join(parts))
    if state.derived:
        raise CheckpointError(
            f"{state.derived[0]} holds something computed from its values (a precomputed scale), which "
            "a load would not update; load before the first step"
        )
    for alias, name in state.ties.items():
        if alias in index.tensors and not _same_values(folder, index, alias, name):
            raise CheckpointError(
                f"{_short(alias)} and {_short(name)} are one parameter of the model, but {folder} has "
                "different values for them"
            )
    return state.tensors


def _same_values(folder: Path, index: Index, first: str, second: str) -> bool:
    a, b = index.tensors[first], index.tensors[second]
    if a is b:
        return True
    same_boxes = [c.box for c in a.chunks] == [c.box for c in b.chunks]
    if (a.shape, a.dtype) == (b.shape, b.dtype) and same_boxes:
        return [c.crc for c in a.chunks] == [c.crc for c in b.chunks]
    return a.dtype == b.dtype and torch.equal(
        read_whole(folder, index, first), read_whole(folder, index, second)
    )


def _check_fits(folder: Path, name: str, entry: TensorEntry, target: Tensor) -> None:
    if entry.shape != tuple(target.shape) or entry.dtype != target.dtype:
        raise CheckpointError(
            f"{_short(name)} is {_kind(entry.dtype, entry.shape)} in {folder}, but here "
            f"{_kind(target.dtype, target.shape)}"
        )
    check_own_memory(_short(name), target)


def _short(name: str) -> str:
    return name.removeprefix(PREFIX)


def _kind(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
