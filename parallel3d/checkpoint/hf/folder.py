"""A Hugging Face folder, and the entries of a model that it contains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel3d.checkpoint.format.files import file_in, loads, read_json_object
from parallel3d.checkpoint.format.safetensors_file import MAX_HEADER, Stored, read_header
from parallel3d.checkpoint.model_state import plain_name
from parallel3d.errors import CheckpointError, CorruptCheckpointError
from parallel3d.fsdp.inspect import check_at_rest, units_of
from parallel3d.materialize import check_can_initialise, give_memory

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Returns the tensors of the model in ``folder``, by name. Reads headers only.

    Raises CheckpointError if there is no safetensors model, or it is damaged.
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
            + (f"; nor do the files hold {len(lacking) - 1} more" if len(lacking) > 1 else "")
        )
    return {name: headers[file][name] for name, file in files.items()}


def _index(folder: Path) -> Mapping[str, str]:
    path = path_in(folder, INDEX)
    try:
        files = loads(read_json_object(path.resolve(), MAX_HEADER), "it")["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise ValueError("its weight_map is not a table of file names")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is no index of safetensors files: {error}") from error
    return files


def path_in(folder: Path, name: str) -> Path:
    """As ``file_in``; the files of a snapshot in the hub's cache may be links to ``../../blobs``."""
    cache = folder.resolve().parent
    return file_in(folder, name, cache.parent / "blobs" if cache.name == "snapshots" else None)


Names = Mapping[str, str] | Callable[[str], str] | None
"""The model's names -> the file's, as the user gives them."""


@dataclass(frozen=True)
class Entry:
    """A parameter or persistent buffer at rest, and its names in the order of the modules."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def entries_of(model: nn.Module) -> list[Entry]:
    """Returns each entry once, in the order of the modules, with the plain model's names."""
    tensors: dict[int, Tensor] = {}
    names: dict[int, dict[str, None]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None and key not in module._non_persistent_buffers_set:
                name = plain_name(f"{prefix}.{key}" if prefix else key)
                tensors[id(tensor)] = tensor
                names.setdefault(id(tensor), {})[name] = None
    return [Entry(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that ``module`` had before ``fully_shard``."""
    for cls in type(module).__mro__:
        extended = issubclass(cls, FSDPModule) or cls.__module__.startswith("parallel3d.")
        if issubclass(cls, nn.Module) and not extended:
            return cls
    return type(module)


def file_names(entries: Iterable[Entry], names: Names) -> dict[str, str]:
    """Returns the model's names -> the file's, by the user's ``names``, which are checked; names that it does
    not have are unchanged."""
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
            first = taken.setdefault(result[name], entry)
            if first is not entry:
                raise CheckpointError(
                    f"names gives {first.name!r} and {name!r} the same name {result[name]!r}"
                )
    return result


def listed(names: Iterable[str], among: Iterable[str], most: int = 8) -> str:
    """Returns the first few ``names`` with the nearest of ``among`` to each, for an error."""
    names, among = list(names), list(among)
    parts = []
    for name in names[:most]:
        nearest = get_close_matches(name, among[:5000], n=1, cutoff=0.6)
        parts.append(f"{name!r}" + (f" (nearest: {nearest[0]!r})" if nearest else ""))
    more = len(names) - most
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def bring_to_rest(model: nn.Module, what: str) -> None:
    """Reshards all units and registers their sharded parameters; raises StateError if one is in use."""
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
    """Returns (name, module) of modules with tensors on meta that are not among ``loaded``, by id.

    Raises Parallel3dError if one of them cannot initialise itself.
    """
    modules = []
    for name, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if any(t is not None and t.is_meta and id(t) not in loaded for t in own):
            modules.append((name, module))
    check_can_initialise(model, modules)
    return modules


def allocate(model: nn.Module, initialised: list[tuple[str, nn.Module]]) -> None:
    """Allocates memory for all tensors on meta, and initialises the modules ``initialised``."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        give_memory(model, initialised)


def mark_changed(tensor: Tensor) -> None:
    """Tells autograd, and the unit that has gathered it, that its memory was written to."""
    with torch.no_grad():
        tensor.as_strided((0,), (1,)).zero_()
