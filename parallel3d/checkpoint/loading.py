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

from parallel3d._compat import get_local_tensor
from parallel3d.checkpoint.dcp_errors import dcp_errors
from parallel3d.checkpoint.describe import describe, mesh_of
from parallel3d.checkpoint.format import folder as folders
from parallel3d.checkpoint.format.index import Index
from parallel3d.checkpoint.format.planners import LoadPlanner
from parallel3d.checkpoint.format.reader import Reader
from parallel3d.checkpoint.model_state import PREFIX, ModelState, model_state
from parallel3d.checkpoint.optimizer_state import LoadedOptimizers, as_optimizers
from parallel3d.checkpoint.ranks import Ranks, ranks_of
from parallel3d.checkpoint.rng import RngTarget
from parallel3d.checkpoint.values import decode, encode
from parallel3d.errors import CheckpointError, CorruptCheckpointError

__all__ = ["Info", "latest", "load"]


@dataclass(frozen=True)
class Info:
    """What ``load`` has read beside tensors of the model and the optimizer.

    Attributes:
        path: the checkpoint's folder.
        step: how many steps had been done.
        extra: what ``save`` was given.
        mesh: axis -> size, where it was saved; None for a plain model.
        versions: of torch, parallel3d and Python, where it was saved.
        rng: what became of the random generators: ``"restored"`` (same ranks and mesh), ``"reseeded"`` (from
            the integers of ``seed_step``) or ``"left"`` as they are.
        skipped: newer folders that are no whole checkpoints, and why.
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
            is damaged. Or the folder of one checkpoint.
        optimizer: as given to ``save``; may be new, without state. None: what was saved of it is not read.
        extra: tensors to read into, in the structure that was saved: sharded ones, or large ones. Others
            are returned, whole on each rank.

    Raises:
        CorruptCheckpointError: on all ranks: torn, changed, or no checkpoint of this package.
        CheckpointError: on all ranks: it is another model's, by names, shapes or dtypes.
    """
    ranks = ranks_of(model)
    run = Path(path)
    found = ranks.first(lambda: _find(run))
    skipped: list[tuple[Path, str]] = []
    for folder in found:
        try:
            index, info = ranks.first(partial(folders.open_checkpoint, folder))
            work = _Load(folder, index, info, ranks)
            result = work.run(model, as_optimizers(optimizer), extra, skipped)
        except CorruptCheckpointError as error:
            if folder == run:
                raise
            skipped.append((folder, str(error)))
            continue
        if skipped and ranks.is_first:
            why = "; ".join(text for _, text in skipped)
            warnings.warn(f"loaded {folder.name}, not the newest, for: {why}", stacklevel=2)
        return result
    why = "\n".join(f"  {text}" for _, text in skipped)
    raise CorruptCheckpointError(f"no checkpoint in {run} can be read:\n{why}")


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The checkpoint of a run that was saved last, if there is one. All ranks must call it."""
    run = Path(path)

    def find() -> Path | None:
        return next(iter(folders.candidates(run)), None) if run.is_dir() else None

    return ranks_of().first(find)


def _find(path: Path) -> list[Path]:
    """The folders to try, in this order."""
    if not path.exists():
        raise CheckpointError(f"there is nothing at {path}")
    if path.is_file():
        raise CorruptCheckpointError(
            f"{path} is a file; a checkpoint is a folder. What torch.save wrote is read by "
            "parallel3d.checkpoint.load_torch"
        )
    if folders.is_checkpoint(path):
        return [path]
    found = folders.candidates(path)
    if found:
        return found
    hint = ""
    if (path / ".metadata").exists():
        hint = "; torch.distributed.checkpoint wrote it: use parallel3d.checkpoint.load_dcp"
    elif any(path.glob("*.safetensors")):
        hint = (
            "; it has safetensors: for a model of Hugging Face's use parallel3d.checkpoint.load_hf"
        )
    raise CorruptCheckpointError(f"{path} has no checkpoint of parallel3d{hint}")


class _Load:
    """One folder, one try."""

    def __init__(self, folder: Path, index: Index, info: dict[str, Any], ranks: Ranks) -> None:
        self.folder, self.index, self.info, self.ranks = folder, index, info, ranks
        self.targets: dict[str, Tensor] = {}

    def run(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        extra: Mapping[str, Any] | None,
        skipped: list[tuple[Path, str]],
    ) -> Info:
        """Verifies, reads, and only then gives optimizers and generators their state. Collective."""
        self.ranks.all(lambda: self._prepare(model, optimizers, extra))
        with dcp_errors(alone=self.ranks.group is None):
            dcp.load(
                dict(self.targets),
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
        self.optimizers.commit()
        for module, value in self.extra_state:
            module.set_extra_state(value)
        return Info(
            path=self.folder,
            step=self.info["step"],
            extra=self.extra,
            mesh=self.info.get("mesh"),
            versions=self.info.get("versions", {}),
            rng=self.rng.apply(mesh_of(model)),
            skipped=skipped,
        )

    def _prepare(
        self, model: nn.Module, optimizers: list[Optimizer], extra: Mapping[str, Any] | None
    ) -> None:
        """Finds what is to be read where to; raises if it doesn't fit. Changes nothing."""
        stored = _dict(self.info.get("model"), "model")
        if type(self.info.get("step")) is not int:
            raise CorruptCheckpointError(f"{self.folder}: checkpoint.json has no step")
        trainable = stored.get("only") == "trainable"
        for alias, name in _dict(stored.get("ties"), "ties").items():
            if name in self.index.tensors:
                self.index.tensors.setdefault(alias, self.index.tensors[name])
        self._match(model_state(model, stored.get("only")), model, trainable)
        modules = dict(model.named_modules())
        self.extra_state = [
            (modules[name], decode(value, self._whole))
            for name, value in _dict(stored.get("extra_state"), "extra_state").items()
            if name in modules
        ]
        state = self.info.get("optimizer")
        if optimizers and state is None:
            raise CheckpointError(
                f"{self.folder} was saved without an optimizer; load it without one"
            )
        self.optimizers = LoadedOptimizers(
            model,
            optimizers,
            state or {"state": {}, "groups": []},
            self.index,
            partial=not optimizers,
        )
        self.targets |= self.optimizers.tensors
        self._prepare_extra(extra)
        same = self.info.get("ranks") == self.ranks.size
        same = same and self.info.get("mesh") == describe(model)["mesh"]
        self.rng = RngTarget(self.info, self.index, self.ranks, same)
        self.targets |= self.rng.tensors
        self._check_targets()

    def _match(self, state: ModelState, model: nn.Module, trainable: bool) -> None:
        """The model's tensors, if they and the stored ones have the same names."""
        stored = {name for name in self.index.tensors if name.startswith(PREFIX)}
        extra = {f"{PREFIX}{m}." if m else PREFIX for m, _ in model.named_modules()}
        known = {*state.tensors, *state.ties}
        missing = [name for name in state.tensors if name not in stored]
        lost = [
            name
            for name in sorted(stored - known)
            if not any(name.startswith(f"{at}_extra_state") for at in extra)
        ]
        if missing or lost:
            raise CheckpointError(_mismatch(self.folder, missing, lost, known, stored, trainable))
        for alias, name in state.ties.items():
            if alias in self.index.tensors:
                self._check_tied(alias, name)
        self.targets |= {name: t.detach() for name, t in state.tensors.items()}

    def _check_tied(self, alias: str, name: str) -> None:
        a, b = self.index.tensors[alias], self.index.tensors[name]
        if a is not b and [c.crc for c in a.chunks] != [c.crc for c in b.chunks]:
            raise CheckpointError(
                f"{_short(alias)} and {_short(name)} are one parameter of the model, but {self.folder} has "
                "different values for them"
            )

    def _prepare_extra(self, given: Mapping[str, Any] | None) -> None:
        targets: dict[str, Tensor] = {}

        def collect(tensor: Tensor, where: str) -> str:
            targets[where] = tensor.detach()
            return where

        if given is not None:
            encode(dict(given), "extra", collect)

        def target(name: str) -> Tensor:
            if name in targets and name in self.index.tensors:
                self.targets[name] = targets[name]
                return targets[name]
            return self._whole(name)

        self.extra = _dict(decode(self.info.get("extra"), target), "extra")

    def _whole(self, name: Any) -> Tensor:
        """Memory on the CPU for a stored tensor."""
        entry = self.index.tensors.get(name) if isinstance(name, str) else None
        if entry is None:
            raise CorruptCheckpointError(
                f"checkpoint.json names the tensor {name!r:.80}, which isn't stored"
            )
        self.targets[name] = torch.empty(entry.shape, dtype=entry.dtype)
        return self.targets[name]

    def _check_targets(self) -> None:
        for name, target in self.targets.items():
            entry = self.index.tensors[name]
            if entry.shape != tuple(target.shape) or entry.dtype != target.dtype:
                raise CheckpointError(
                    f"{_short(name)} is {_kind(entry.dtype, entry.shape)} in {self.folder}, but here "
                    f"{_kind(target.dtype, target.shape)}"
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


def _dict(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"checkpoint.json is damaged: {what} is {value!r:.80}")
    return value
