"""What of a checkpoint is which tensor of a model; if names, shapes and dtypes agree."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.contents import Contents
from parallel3d.checkpoint.format.index import Index, TensorEntry
from parallel3d.checkpoint.format.whole import read_whole
from parallel3d.checkpoint.model_state import PREFIX, ModelState
from parallel3d.checkpoint.pieces import shares_memory_within
from parallel3d.errors import CheckpointError

__all__ = ["check_alike", "matched"]


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
