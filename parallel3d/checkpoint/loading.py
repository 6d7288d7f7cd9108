"""load: reads a checkpoint into a model on any mesh, or changes nothing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
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
from parallel3d.checkpoint.dcp import HALF_READ, dcp_errors
from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format.folder import looked
from parallel3d.checkpoint.format.index import Index, TensorEntry
from parallel3d.checkpoint.format.reader import LoadPlanner, Reader, read_whole
from parallel3d.checkpoint.model_state import (
    PREFIX,
    Contents,
    LoadedExtraState,
    ModelState,
    model_state,
    read_contents,
)
from parallel3d.checkpoint.optimizer_state import LoadedOptimizers, as_optimizers
from parallel3d.checkpoint.pieces import shares_memory_within
from parallel3d.checkpoint.ranks import Ranks, check_same, ranks_of
from parallel3d.checkpoint.rng import LoadedRng
from parallel3d.checkpoint.saving import axes_of, mesh_of
from parallel3d.checkpoint.stored import Stored
from parallel3d.checkpoint.values import as_dict, decode, encode, keeper
from parallel3d.errors import CheckpointError, CorruptCheckpointError, DryRunError

# What of a checkpoint is which tensor of a model; if names, shapes and dtypes agree.


def matched(folder: Path, index: Index, state: ModelState, contents: Contents) -> dict[str, Tensor]:
    """The model's tensors by the names they are stored under.

    Raises:
        CheckpointError: the stored ones have other names, or different values for what is one tensor here.
    """
    stored = {name for name in index.tensors if name.startswith(PREFIX)}
    known = {*state.tensors, *state.ties}
    missing = [name for name in state.tensors if name not in stored]
    extra = tuple(
        f"{PREFIX}{m}._extra_state" if m else f"{PREFIX}_extra_state" for m in contents.extra_state
    )
    lost = [name for name in sorted(stored - known) if not name.startswith(extra)]
    if missing or lost:
        trainable = contents.only == "trainable"
        raise CheckpointError(_mismatch(folder, missing, lost, known, stored, trainable))
    if state.derived:
        raise CheckpointError(
            f"{state.derived[0]} holds something computed from its values (a precomputed scale), which "
            "would be that of the old ones after a load; load before the first step"
        )
    for alias, name in state.ties.items():
        if alias in index.tensors:
            _check_tied(folder, index, alias, name)
    return state.tensors


def _check_tied(folder: Path, index: Index, alias: str, name: str) -> None:
    a, b = index.tensors[alias], index.tensors[name]
    if a is b:
        return
    boxes = [[(c.offsets, c.sizes) for c in entry.chunks] for entry in (a, b)]
    if (a.shape, a.dtype) == (b.shape, b.dtype) and boxes[0] == boxes[1]:
        same = [c.crc for c in a.chunks] == [c.crc for c in b.chunks]
    else:
        values = [read_whole(folder, index, which) for which in (alias, name)]
        same = values[0].dtype == values[1].dtype and torch.equal(*values)
    if not same:
        raise CheckpointError(
            f"{_short(alias)} and {_short(name)} are one parameter of the model, but {folder} has "
            "different values for them"
        )


def check_alike(folder: Path, name: str, entry: TensorEntry, target: Tensor) -> None:
    """Raises CheckpointError unless it can hold the stored tensor: shape and dtype are its, and each element
    has a place of its own."""
    if entry.shape != tuple(target.shape) or entry.dtype != target.dtype:
        raise CheckpointError(
            f"{_short(name)} is {_kind(entry.dtype, entry.shape)} in {folder}, but here "
            f"{_kind(target.dtype, target.shape)}"
        )
    if shares_memory_within(target):
        raise CheckpointError(
            f"{_short(name)} can't be read into: its elements share memory, as after expand(); make it "
            "contiguous first"
        )


def _mismatch(
    folder: Path,
    missing: list[str],
    lost: list[str],
    known: set[str],
    stored: set[str],
    trainable: bool,
) -> str:
    parts = [f"{folder} is not of this model"]
    if trainable:
        parts[0] += " (it was saved with only='trainable')"
    for names, others, what in (
        (missing, stored, "it doesn't have"),
        (lost, known, "the model doesn't have its"),
    ):
        if names:
            near = get_close_matches(names[0], others, n=1, cutoff=0.6)
            like = f" (nearest: {_short(near[0])})" if near else ""
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{what} {', '.join(map(_short, names[:3]))}{more}{like}")
    return "; ".join(parts)


def _short(name: str) -> str:
    return name.removeprefix(PREFIX)


def _kind(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


_LOOKS = (
    30  # at a run whose checkpoints are removed, by the job that saves there, while they are read
)


@dataclass(frozen=True)
class Info:
    """What ``load`` has read beside tensors of the model and the optimizer.

    Attributes:
        path: the checkpoint's folder, absolute.
        step: how many steps had been done.
        extra: what ``save`` was given.
        mesh: axis -> size, where it was saved; None for a plain model.
        versions: of torch, parallel3d and Python, where it was saved.
        rng: what became of the random generators: ``"restored"`` (same ranks and mesh), ``"reseeded"`` (from
            the integers of ``seed_step``) or ``"left"`` as they are.
        skipped: newer folders that are no whole checkpoints, or links, and why.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    mesh: dict[str, int] | None
    versions: dict[str, str]
    rng: str
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Info:
    """Reads a checkpoint that ``save`` has written, on this mesh or another, into the tensors that are there.

    Each rank reads what it holds and verifies it first; when all have, they read. So if anything is wrong,
    on any rank, model and optimizer are as they were. All ranks must call it.

    Args:
        path: a run's folder: the checkpoint saved last is read, or, with a warning, the one before if that
            is damaged. Or the folder of one checkpoint. A relative one is the first rank's.
        optimizer: as given to ``save``; may be new, without state. None: what was saved of it is not read.
        extra: tensors to read into, in the structure that was saved: sharded ones, or large ones. Others
            are returned, whole on each rank; of these, and of what modules keep, 1 GiB in all.

    Raises:
        CorruptCheckpointError: on all ranks: torn, changed, or no checkpoint of this package.
        CheckpointError: on all ranks: it is another model's, by names, shapes or dtypes.
        DryRunError: in a dry run.
    """
    if dry_run.active():
        raise DryRunError(
            "checkpoint.load in a dry run: there are no values to read into; ask checkpoint.latest first, "
            "which finds none there, or skip it with parallel3d.tools.dryrun.active()"
        )
    # What is made here must not be inference tensors, and what is there may not be one.
    with torch.inference_mode(False), torch.no_grad():
        return _load(path, model, optimizer, extra)


def _load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None,
    extra: Mapping[str, Any] | None,
) -> Info:
    ranks = ranks_of(model, "load")
    try:
        folders.as_path(path)
        optimizers = as_optimizers(optimizer)
        wrong = None
    except CheckpointError as error:  # told to the other ranks, who are on their way
        optimizers, wrong = [], error
    skipped: list[tuple[Path, str]] = []
    torn = ""  # by a try whose folder was removed while it was read
    for _ in range(_LOOKS):
        run, found = ranks.first(lambda: _find(path))
        for folder, identity in found:
            if folder in (each for each, _ in skipped):
                continue
            try:
                index, info = ranks.first(partial(_open, folder, run))
                work = _Load(folder, index, info, ranks, wrong)
                result = work.run(model, optimizers, extra, skipped)
            except CheckpointError as error:
                now = None if folder == run else ranks.first(partial(folders.identity, folder))
                if folder != run and (now is None or now != identity):
                    torn = torn or (HALF_READ if HALF_READ in str(error) else "")
                    break  # removed, or replaced, as a newer one is there: look again
                if torn and torn not in str(error):
                    raise type(error)(f"{error}\n{torn}") from error
                if folder == run or not isinstance(error, CorruptCheckpointError):
                    raise
                skipped.append((folder, str(error)))
                continue
            if skipped and ranks.is_first:
                why = "; ".join(text for _, text in skipped)
                warnings.warn(f"loaded {folder.name}, not the newest, for: {why}", stacklevel=3)
            return result
        else:
            why = "\n".join(f"  {text}" for _, text in skipped)
            raise CorruptCheckpointError(f"no checkpoint in {run} can be read:\n{why}")
    raise CheckpointError(
        f"{_LOOKS} checkpoints of {run} were removed while they were read: another job saves there faster "
        f"than they can be read, with a small keep; let it keep more\n{torn}"
    )


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of a run that was saved last, if there is one; absolute, and by the first rank's
    working directory. All ranks must call it. In a dry run there is none: it begins at the beginning."""
    if dry_run.active():
        return None

    def find() -> Path | None:
        run = folders.as_path(path).absolute()
        if not run.is_dir():
            return None
        looked(run)
        return next(iter(folders.whole(run)), None)

    return ranks_of(None, "latest").first(find)


_Found = list[tuple[Path, tuple[int, int, int] | None]]


def _find(given: str | os.PathLike[str]) -> tuple[Path, _Found]:
    """(``given``, the folders to try, in this order, each with its identity); absolute."""
    path = folders.as_path(given).absolute()
    if not path.exists():
        raise CheckpointError(f"there is nothing at {path}")
    if path.is_file():
        raise CorruptCheckpointError(
            f"{path} is a file; a checkpoint is a folder. What torch.save wrote is read by "
            "parallel3d.checkpoint.load_torch"
        )
    if folders.is_checkpoint(path):
        return path, [(path, None)]
    found = folders.found_in(path)
    if not all(folder.is_symlink() for folder in found):
        looked(path)
        return path, [(folder, folders.identity(folder)) for folder in found]
    hint = f"; {found[0].name} is a link, and those aren't followed" if found else ""
    if (path / ".metadata").exists():
        hint = "; torch.distributed.checkpoint wrote it: use parallel3d.checkpoint.load_dcp"
    elif any(path.glob("*.safetensors")):
        hint = (
            "; it has safetensors: for a model of Hugging Face's use parallel3d.checkpoint.load_hf"
        )
    raise CorruptCheckpointError(f"{path} has no checkpoint of parallel3d{hint}")


def _open(folder: Path, run: Path) -> tuple[Index, dict[str, Any]]:
    """As ``open_checkpoint``; not through a link, which may lead anywhere, unless the user has given it."""
    if folder != run and folder.is_symlink():
        raise CorruptCheckpointError(
            f"{folder} is a link, and those of a run aren't followed; load it by its own path"
        )
    return folders.open_checkpoint(folder)


class _Load:
    """One folder, one try."""

    def __init__(
        self,
        folder: Path,
        index: Index,
        info: dict[str, Any],
        ranks: Ranks,
        wrong: CheckpointError | None,
    ) -> None:
        self.folder, self.index, self.info, self.ranks = folder, index, info, ranks
        self.wrong = wrong  # with the arguments, on this rank
        self.targets: dict[str, Tensor] = {}

    def run(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        extra: Mapping[str, Any] | None,
        skipped: list[tuple[Path, str]],
    ) -> Info:
        """Verifies, reads, and only then gives optimizers and generators their state. Collective."""
        given = self.ranks.all(lambda: self._prepare(model, optimizers, extra))
        check_same("load", given)
        if self.extra_state.any:
            self.ranks.undone_unless(self.extra_state.apply, self._read, self.extra_state.undo)
        else:
            self._read()
        self.optimizers.commit()
        return Info(
            path=self.folder,
            step=self.contents.step,
            extra=self.extra,
            mesh=self.contents.mesh,
            versions=self.contents.versions,
            rng=self.rng.apply(),
            skipped=skipped,
        )

    def _read(self) -> None:
        """Into the tensors that are there, when all ranks have verified what they read. Collective."""
        with dcp_errors(alone=self.ranks.group is None, size=self.ranks.size):
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
        """Finds what is to be read where to; raises if anything doesn't fit. Changes nothing. Returns what
        must be the same on all ranks.

        What each rank has whole for itself (random states, values of modules, extra) is read here, so that
        it has been looked at before anything changes.
        """
        if self.wrong is not None:
            raise self.wrong
        contents = self.contents = read_contents(self.folder, self.info, self.index)
        stored = Stored(self.folder, self.index)
        for alias, name in contents.ties.items():
            self.index.tensors[alias] = self.index.tensors[name]
        state = model_state(model, contents.only)
        self.targets |= matched(self.folder, self.index, state, contents)
        self.extra_state = LoadedExtraState(model, contents, stored)
        self.optimizers = LoadedOptimizers(model, optimizers, contents, stored)
        self.targets |= self.optimizers.tensors
        self._prepare_extra(extra, stored)
        mesh = mesh_of(model)
        same = contents.ranks == self.ranks.size and contents.mesh == axes_of(mesh)
        self.rng = LoadedRng(contents, stored, self.ranks, mesh, same)
        for name, target in self.targets.items():
            check_alike(self.folder, name, self.index.tensors[name], target)
        return {"optimizers": len(optimizers)}

    def _prepare_extra(self, given: Mapping[str, Any] | None, stored: Stored) -> None:
        targets: dict[str, Tensor] = {}
        if given is not None:
            encode(as_dict("extra", given), "extra", keeper(targets))
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
