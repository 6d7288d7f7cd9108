"""DCP folders made by hand, whole ones and all kinds of broken and hostile ones."""

import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

FILES = ("__0_0.distcp", "__1_0.distcp")
Box = tuple[Any, Any]  # offsets, sizes


class Small(nn.Module):
    """(5, 3) and (5,), in two chunks each; a number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 5)
        self.register_buffer("count", torch.tensor(7))


def small(seed: int) -> tuple[Small, torch.optim.Optimizer]:
    """With a step taken, so that there is state that could change."""
    torch.manual_seed(seed)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model.lin(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.count += seed
    return model, optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[Any, ...], Any]:
    """What is saved, by path."""
    found: dict[tuple[Any, ...], Any] = {
        ("model", name): value for name, value in model.state_dict().items()
    }
    raw = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    for number, state in raw["state"].items():
        for key, value in state.items():
            found["optimizer", "state", names[number], key] = value
    for key, value in raw["param_groups"][0].items():
        found["optimizer", "param_groups", 0, key] = names if key == "params" else value
    return found


@dataclass
class Folder:
    """One that is being made.

    Attributes:
        files: bytes by name.
    """

    metadata: Metadata
    files: dict[str, bytearray] = field(default_factory=lambda: {n: bytearray() for n in FILES})

    def write(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (path / name).write_bytes(content)
        (path / ".metadata").write_bytes(pickle.dumps(self.metadata))

    def append(self, value: Any, file: str = FILES[0]) -> _StorageInfo:
        """``value`` as torch.save writes it, or bytes as they are."""
        content = value if isinstance(value, bytes) else saved(value)
        start = len(self.files[file])
        self.files[file] += content
        return _StorageInfo(file, start, len(content))

    def describe(self, name: str, dtype: torch.dtype, shape: Any, chunks: list[Box]) -> None:
        """Lists a tensor in ``chunks``, (offsets, sizes) each."""
        listed = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(dtype), torch.Size(shape), listed
        )

    def tensor(self, name: str) -> TensorStorageMetadata:
        found = self.metadata.state_dict_metadata[name]
        assert isinstance(found, TensorStorageMetadata)
        return found

    def place(self, name: str, chunk: int = 0) -> _StorageInfo:
        return self.metadata.storage_data[self.index(name, chunk)]

    def index(self, name: str, chunk: int = 0) -> MetadataIndex:
        mine = [index for index in self.metadata.storage_data if index.fqn == name]
        return mine[chunk]


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def make(values: dict[tuple[Any, ...], Any]) -> Folder:
    """A whole one."""
    folder = Folder(Metadata({}, {}, {}, StorageMeta("x", "y", None, []), "1.0.0"))
    for path, value in values.items():
        name = ".".join(map(str, path))
        folder.metadata.planner_data[name] = path
        if not isinstance(value, torch.Tensor):
            folder.metadata.state_dict_metadata[name] = BytesStorageMetadata()
            folder.metadata.storage_data[MetadataIndex(name)] = folder.append(value)
            continue
        halves = list(_halves(value.detach()))
        for number, (offsets, part) in enumerate(halves):
            index = MetadataIndex(name, offsets, number)
            folder.metadata.storage_data[index] = folder.append(part.clone(), FILES[number])
        folder.describe(name, value.dtype, value.shape, [(o, p.shape) for o, p in halves])
    return folder


def _halves(value: torch.Tensor) -> Iterable[tuple[list[int], torch.Tensor]]:
    if not value.ndim:
        return [([], value)]
    first = (len(value) + 1) // 2
    rest = [0] * (value.ndim - 1)
    return [([0, *rest], value[:first]), ([first, *rest], value[first:])]


# -- pickles -----------------------------------------------------------------------------------------------


class Calls:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.what


def text(value: str | Path) -> bytes:
    """A string's opcode."""
    encoded = str(value).encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded
