"""save_hf: writes a parallel model as a Hugging Face safetensors folder."""

from __future__ import annotations

import copy
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, zip_longest
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from parallel3d._util import dry_run
from parallel3d.checkpoint.format.files import bytes_of, write_all
from parallel3d.checkpoint.format.safetensors_file import header_of, is_ours
from parallel3d.checkpoint.hf.conversion import (
    INDEX,
    SINGLE,
    Export,
    HeldParts,
    Names,
    OutTensor,
    check_dtype,
    is_transformers,
    plain_class,
    plan_export,
)
from parallel3d.checkpoint.hf.layout import Patch
from parallel3d.checkpoint.ranks import Ranks, new_folder, ranks_of
from parallel3d.checkpoint.state import bring_to_rest
from parallel3d.errors import CheckpointError

_TEXTS = {"config.json", "generation_config.json", INDEX}
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def save_hf(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    names: Names = None,
) -> None:
    """Writes ``model`` as a folder that ``from_pretrained`` loads; every rank must call it.

    Files are distributed over the ranks. Each assembles one tensor at a time, from pieces that the others
    send, so that no rank ever has more than its own shards and the largest tensor. Everything is written into
    a temporary folder, which is renamed when it is complete.

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
        check_dtype(dtype, "save_hf")
        bring_to_rest(model, "save_hf", meta_ok=True)
        return as_bytes(max_shard_size)

    limit = ranks.all(check)[0]
    export = plan_export(model, ranks, names, dtype, "save_hf")
    files = _files(export.outputs, ranks.size, limit)
    # What the config says, in which from_pretrained makes the model.
    own = next((t.dtype for t in export.tensors.values() if t.is_floating_point()), None)
    with new_folder(ranks, path, _check_only_export) as temporary:
        ranks.all(lambda: check_seen(temporary))
        ranks.all(lambda: exchange(export, files, ranks, temporary))
        ranks.first(lambda: _write_texts(model, files, dtype or own, temporary))


def _check_only_export(folder: Path) -> None:
    """Raises unless an existing ``folder`` is an earlier export."""
    foreign = [
        path.name
        for path in sorted(folder.iterdir())
        if path.name not in _TEXTS and not (_WEIGHTS.fullmatch(path.name) and is_ours(path))
    ]
    if foreign:
        raise CheckpointError(
            f"save_hf: {folder} holds {', '.join(foreign[:5])}, which save_hf did not write; it "
            "replaces only its own exports; give another folder"
        )


def check_seen(temporary: Path) -> None:
    if not temporary.is_dir():
        raise CheckpointError(
            f"save_hf: this rank doesn't see {temporary}, which the first has made; the folder must be on a "
            "file system that all ranks share"
        )


def _write_texts(
    model: nn.Module, files: list[OutFile], dtype: torch.dtype | None, folder: Path
) -> None:
    """Writes the index and the model's configs."""
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(file.nbytes for file in files)},
            "weight_map": {t.name: file.name for file in files for t in file.tensors},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if not is_transformers(model):
        return
    hf_model: Any = model
    config = copy.deepcopy(hf_model.config)
    config.architectures = [plain_class(model).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if hf_model.can_generate() and getattr(model, "generation_config", None) is not None:
        hf_model.generation_config.save_pretrained(folder)


def _write(folder: Path, file: OutFile, tensor: OutTensor, values: Tensor) -> None:
    """Appends the next tensor to a file of ``folder``; makes it, with the header, for the first one."""
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
    """A file of the export, written by the rank ``owner`` (its number among the Ranks)."""

    name: str
    header: bytes
    tensors: tuple[OutTensor, ...]
    owner: int = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def _files(outputs: Sequence[OutTensor], ranks: int, limit: int) -> list[OutFile]:
    """Distributes tensors, in their order, to files of at most ``limit`` bytes or one tensor, and files to
    ranks. Large models get at least one file per rank."""
    total = sum(output.nbytes for output in outputs)
    limit = min(limit, max(-(-total // ranks), _MIN_FILE))
    groups: list[list[OutTensor]] = [[]]
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
        files.append(OutFile(SINGLE if len(groups) == 1 else name, header, tuple(group)))
    loads = [0] * ranks
    for file in sorted(files, key=lambda file: -file.nbytes):
        file.owner = loads.index(min(loads))
        loads[file.owner] += file.nbytes
    return files


def as_bytes(size: int | str) -> int:
    """Converts ``"5GB"``, ``"200MiB"`` or a number to a number of bytes."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B\s*", str(size).upper())
    if not isinstance(size, str) or match is None or match[2] not in units:
        raise CheckpointError(f"max_shard_size is {size!r}; give bytes, or a text such as '5GB'")
    return max(1, int(float(match[1]) * units[match[2]]))


_MESSAGE = 4 << 20  # bytes of a message
_IN_FLIGHT = 8 << 20  # bytes of the messages that a rank has started and not completed
_TAGS = 1 << 30


@dataclass(frozen=True)
class _OutMessage:
    """A part of a tensor of the export, from a rank that holds it to the tensor's owner."""

    tag: int
    tensor: OutTensor
    patch: Patch
    sender: int
    owner: int

    @property
    def nbytes(self) -> int:
        return prod(self.patch.counts) * self.tensor.dtype.itemsize


def exchange(export: Export, files: list[OutFile], ranks: Ranks, folder: Path) -> None:
    """Writes each tensor that this rank owns into ``folder``, in the files' order. Collective.

    A rank assembles one tensor at a time, from messages of a few megabytes, each sent by one of the ranks
    that hold it. All ranks enumerate all messages in one order and process their own, with a bounded number
    in flight. The first message that is not complete is being processed by both its ranks, so there is no
    deadlock. An error on this rank is raised at the
    end; until then it continues to send, because others depend on it.
    """
    own = _owned(files, ranks.rank)
    # Agreed on, because a rank without memory for its tensor would leave the others waiting.
    work = ranks.on_each(lambda: _Work(export, ranks, own))
    for turn, messages in enumerate(_turns(export, files, ranks.size)):
        current = own[turn] if turn < len(own) else None
        if current is not None:
            memory = work.memory[: current[1].nbytes]
            work.values = memory.view(current[1].dtype).view(current[1].layout.shape)
        for message in messages:
            if ranks.rank in (message.sender, message.owner):
                work.process(message)
        if current is not None:
            work.finish_receiving()
            work.guarded(partial(_write, folder, *current, work.values))
    work.finish()


def _owned(files: list[OutFile], rank: int) -> list[tuple[OutFile, OutTensor]]:
    return [(file, t) for file in files if file.owner == rank for t in file.tensors]


def _turns(export: Export, files: list[OutFile], size: int) -> Iterator[Iterator[_OutMessage]]:
    """Yields the messages of each owner's first tensor, then those of each one's second, and so on."""
    tags, spread = count(), count()
    by_owner = [_owned(files, rank) for rank in range(size)]
    for turn in range(max(map(len, by_owner))):
        parts = [
            list(_parts(export, own[turn][1], owner, spread))
            for owner, own in enumerate(by_owner)
            if turn < len(own)
        ]
        together = chain.from_iterable(zip_longest(*parts))
        yield (_OutMessage(next(tags) % _TAGS, *part) for part in together if part is not None)


def _parts(
    export: Export, tensor: OutTensor, owner: int, spread: Iterator[int]
) -> Iterator[tuple[OutTensor, Patch, int, int]]:
    """Yields (tensor, patch, sender, owner) of the messages of one tensor."""
    for patch, holders in export.parts(tensor, _MESSAGE):
        sender = owner if owner in holders else holders[next(spread) % len(holders)]
        yield tensor, patch, sender, owner


class _Work:
    """What one rank sends and receives, in order."""

    values: Tensor  # that is being assembled

    def __init__(self, export: Export, ranks: Ranks, own: list[tuple[OutFile, OutTensor]]) -> None:
        self._ranks = ranks
        largest = max((tensor.nbytes for _, tensor in own), default=0)
        self.memory = torch.empty(largest, dtype=torch.uint8)
        self._held = HeldParts(export.tensors)
        # (work, bytes, what to do when it is complete, None when it sends)
        self._in_flight: deque[tuple[dist.Work, int, Callable[[], object] | None]] = deque()
        self._bytes = 0
        self._problem: Exception | None = None

    def process(self, message: _OutMessage) -> None:
        """Starts this rank's part of a message, after completing earlier ones if too much is in flight."""
        if message.sender == message.owner:
            self.guarded(lambda: self._copy_out(message, self._target(message)))
            return
        while self._in_flight and self._bytes + message.nbytes > _IN_FLIGHT:
            self._complete_first()
        sends = message.sender == self._ranks.rank
        target = None if sends else self._target(message)
        if target is not None and target.is_contiguous():
            staged = target
        else:
            staged = torch.zeros(message.patch.counts, dtype=message.tensor.dtype)
        if sends:
            self.guarded(lambda: self._copy_out(message, staged))
        then = None if target is None else partial(target.copy_, staged)
        start, peer = (dist.isend, message.owner) if sends else (dist.irecv, message.sender)
        flat = staged.view(-1).view(torch.uint8)
        work = start(flat, self._ranks.ranks[peer], group=self._ranks.group, tag=message.tag)
        assert work is not None
        self._in_flight.append((work, message.nbytes, then))
        self._bytes += message.nbytes

    def _target(self, message: _OutMessage) -> Tensor:
        return self.values[message.patch.slices()]

    @torch.no_grad()
    def _copy_out(self, message: _OutMessage, out: Tensor) -> None:
        """Copies the message's values, which this rank holds, to ``out``, and casts them."""
        out.copy_(self._held.of(message.patch))

    def guarded(self, action: Callable[[], object]) -> None:
        """Calls ``action`` and keeps its error for the end; after an error only messages are processed."""
        if self._problem is None:
            try:
                action()
            except Exception as error:
                self._problem = error

    def _complete_first(self) -> None:
        work, size, then = self._in_flight.popleft()
        work.wait()
        self._bytes -= size
        if then is not None:
            self.guarded(then)

    def finish_receiving(self) -> None:
        """Waits for all messages that this rank receives, so that its tensor is complete."""
        while any(then is not None for _, _, then in self._in_flight):
            self._complete_first()

    def finish(self) -> None:
        """Waits for the rest, and raises the error that was kept."""
        while self._in_flight:
            self._complete_first()
        if self._problem is not None:
            raise self._problem
