"""What of a model a Hugging Face checkpoint holds: parameters and persistent buffers, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parallel3d.errors import CheckpointError

__all__ = ["Entry", "Names", "entries_of", "file_names", "listed", "plain_class"]

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
