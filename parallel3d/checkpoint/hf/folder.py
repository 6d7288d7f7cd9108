"""A folder in Hugging Face's form: which tensors it has, and in which of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel3d.checkpoint.format.safetensors_file import LONGEST, Stored, open_regular, read_header
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.fsdp.inspect import check_at_rest, units_of
from parallel3d.materialize import check_can_initialise, give_memory

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the model in ``folder``, by name; headers are read, no values.

    Raises:
        CheckpointError: no such folder, or no safetensors model in it.
        CorruptCheckpointError: an index or a header that can't be right, a file that is missing, cut short or
            outside of the folder.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"load_hf: {str(folder)!r} is no folder; it reads local ones (huggingface_hub.snapshot_download "
            "brings one from the hub)"
        )
    if (folder / SINGLE).exists():
        return read_header(path_in(folder, SINGLE), SINGLE)
    if not (folder / INDEX).exists():
        there = sorted(path.name for path in folder.iterdir())[:10]
        raise CheckpointError(
            f"{folder} holds no {SINGLE} and no {INDEX}, which load_hf reads; it holds {there or 'nothing'}"
        )
    files = _index(folder)
    headers = {
        file: read_header(path_in(folder, file), file) for file in sorted(set(files.values()))
    }
    lacking = [name for name, file in files.items() if name not in headers[file]]
    if lacking:
        raise CorruptCheckpointError(
            f"{folder / INDEX} says that {files[lacking[0]]} holds {lacking[0]!r}, but it doesn't"
            + (f"; nor do the files {len(lacking) - 1} more" if len(lacking) > 1 else "")
        )
    return {name: headers[file][name] for name, file in files.items()}


def _index(folder: Path) -> Mapping[str, str]:
    path = path_in(folder, INDEX)
    try:
        with open(path, "rb", opener=open_regular) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > LONGEST:
                raise ValueError(f"it has {size} bytes")
            text = opened.read(LONGEST).decode()
        files = json.loads(text)["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise ValueError("its weight_map is no table of file names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is no index of safetensors files: {error}") from error
    return files


def path_in(folder: Path, name: str) -> Path:
    """Where ``name`` is in ``folder``.

    Raises:
        CorruptCheckpointError: outside of it, or nowhere. The hub's cache is inside: there a snapshot's
            files are links to ``../../blobs``.
    """
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or os.path.isabs(name) or "\\" in name or "\0" in name:
        raise CorruptCheckpointError(f"{folder} names a file {name!r}, which is outside of it")
    path = folder / name
    real, inside = path.resolve(), [folder.resolve()]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in inside):
        raise CorruptCheckpointError(f"{path} is a link to {real}, outside of its folder")
    if not real.is_file():
        raise CorruptCheckpointError(f"{path} is missing, or no file")
    return path


# What of a model a Hugging Face checkpoint holds: parameters and persistent buffers, by name.

Names = Mapping[str, str] | Callable[[str], str] | None

_WRAPPED = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Entry:
    """A parameter or persistent buffer.

    Attributes:
        names: all that it has, the first to be found first; several where weights are tied.
        tensor: as it is at rest.
        is_buffer: it is a buffer.
    """

    names: tuple[str, ...]
    tensor: Tensor
    is_buffer: bool

    @property
    def name(self) -> str:
        return self.names[0]


def entries_of(model: nn.Module) -> list[Entry]:
    """Each once, in the order of the modules; names as the plain model's."""
    found: dict[int, tuple[Tensor, bool]] = {}
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = (
            (key, buffer)
            for key, buffer in module._buffers.items()
            if key not in module._non_persistent_buffers_set
        )
        parts: Iterable[tuple[bool, Iterable[tuple[str, Tensor | None]]]] = (
            (False, module._parameters.items()),
            (True, persistent),
        )
        for is_buffer, items in parts:
            for key, tensor in items:
                if tensor is None:
                    continue
                found.setdefault(id(tensor), (tensor, is_buffer))
                names.setdefault(id(tensor), []).append(_plain_name(prefix, key))
    return [
        Entry(tuple(dict.fromkeys(names[key])), tensor, is_buffer)
        for key, (tensor, is_buffer) in found.items()
    ]


def _plain_name(prefix: str, key: str) -> str:
    name = f"{prefix}.{key}" if prefix else key
    for wrapper in _WRAPPED:
        name = name.replace(wrapper, "")
    return name


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module`` before a ``fully_shard`` extended it, or one of the same name and module."""
    for cls in type(module).__mro__:
        extended = issubclass(cls, FSDPModule) or cls.__module__.startswith("parallel3d.")
        if issubclass(cls, nn.Module) and not extended:
            return cls
    return type(module)


def file_names(entries: Iterable[Entry], names: Names) -> dict[str, str]:
    """The model's names -> those in the file, as ``names`` says; one that it doesn't have stays.

    Raises:
        CheckpointError: ``names`` is or returns something else, has a name the model hasn't, or gives two
            tensors one name.
    """
    own = [name for entry in entries for name in entry.names]
    if isinstance(names, Mapping):
        foreign = [name for name in names if name not in own]
        if foreign:
            raise CheckpointError(f"names has what the model hasn't: {listed(foreign, own)}")
        result: dict[str, Any] = {name: names.get(name, name) for name in own}
    elif callable(names):
        result = {name: names(name) for name in own}
    else:
        raise CheckpointError(
            f"names is {names!r}; give a mapping or a function, model's name -> file's"
        )
    for name, given in result.items():
        if not isinstance(given, str) or not given:
            raise CheckpointError(f"names gives {given!r} for {name!r}; it must give a name")
    taken: dict[str, Entry] = {}
    for entry in entries:
        for name in entry.names:
            other = taken.setdefault(result[name], entry)
            if other is not entry:
                raise CheckpointError(
                    f"names gives {other.name!r} and {name!r} the same name {result[name]!r}"
                )
    return result


def listed(names: Iterable[str], among: Iterable[str], most: int = 8) -> str:
    """``names`` with the nearest of ``among`` to each, the first few of them."""
    names, among = list(names), list(among)
    parts = []
    for name in names[:most]:
        nearest = get_close_matches(name, among[:5000], n=1, cutoff=0.6)
        parts.append(f"{name!r}" + (f" (nearest: {nearest[0]!r})" if nearest else ""))
    more = len(names) - most
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


# Before values are written into a model: its shards in their places, and memory for what is on
# meta.


def bring_to_rest(model: nn.Module, what: str) -> None:
    """Nothing is gathered, and the modules hold their sharded Parameters.

    Raises:
        StateError: within a forward, backward or ``full_params``.
    """
    units = list(units_of(model, recurse=True))
    for unit in units:
        check_at_rest(unit, what)
    for unit in units:
        group = unit.group
        if unit.context is not None:
            group.register_sharded()
            group.reshard(unit.context.comm)
        group.adopt()


def without_values(model: nn.Module, loaded: Collection[int]) -> list[tuple[str, nn.Module]]:
    """Name and module of those that have something on meta which will not be loaded.

    Args:
        loaded: ids of the tensors that will be.

    Raises:
        Parallel3dError: one of them has no way to initialise itself.
    """
    found = []
    for name, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(t is not None and t.is_meta and id(t) not in loaded for t in own):
            found.append((name, module))
    check_can_initialise(model, found)
    return found


def memory_for(model: nn.Module, initialised: list[tuple[str, nn.Module]]) -> None:
    """Memory for all that is on meta, if anything is; initial values for the modules ``initialised``."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        give_memory(model, initialised)


def mark_changed(tensor: Tensor) -> None:
    """Tells autograd, and what has gathered it, that values were written into its memory."""
    with torch.no_grad():
        tensor.as_strided((0,), (1,)).zero_()
