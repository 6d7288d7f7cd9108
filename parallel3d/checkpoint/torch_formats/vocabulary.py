"""The names that torch's files may have in their pickles, and what they stand for here."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from parallel3d.checkpoint.torch_formats.pickled import Maker, Names, Record

__all__ = [
    "DCP_METADATA",
    "MAX_NAME",
    "SAVED_VALUES",
    "SavedTensor",
    "StorageId",
    "check_name",
    "shape_of",
    "sizes_of",
]

_MAX_DIMS = 64
_MAX_ELEMENTS = 1 << 60
MAX_NAME = 2000
"""Characters of a name: what looks for prefixes takes time that grows with the square of it."""


def sizes_of(value: Any, *, signed: bool = False) -> tuple[int, ...]:
    """``value``, if it is a sequence of sizes or offsets; a ValueError if not."""
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_DIMS:
        raise ValueError("sizes that are no short tuple")
    if any(type(n) is not int or (n < 0 and not signed) or abs(n) >= 2**62 for n in value):
        raise ValueError("sizes or offsets that can't be: negative, huge or no numbers")
    return tuple(value)


def shape_of(value: Any) -> tuple[int, ...]:
    """``value``, if it is the shape of a tensor that can be; a ValueError if not."""
    shape = sizes_of(value)
    if prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise ValueError("a shape of more elements than there can be")
    return shape


def check_name(name: str) -> None:
    """A ValueError if it is longer than names are."""
    if len(name) > MAX_NAME:
        raise ValueError(f"a name of {len(name)} characters, {name[:40]!r}...")


@dataclass(frozen=True)
class StorageId:
    """A storage that a file's pickle refers to.

    Attributes:
        key: names its record. elements: of ``dtype``; None as dtype: bytes.
    """

    key: str
    dtype: torch.dtype | None
    elements: int

    @classmethod
    def of(cls, value: Any) -> StorageId:
        """From the persistent id ``("storage", type, key, location, elements)``."""
        if type(value) is not tuple or len(value) != 5 or value[0] != "storage":
            raise ValueError("a persistent id of no storage")
        _, kind, key, _, elements = value
        if type(kind) is not _StorageType or type(key) is not str or type(elements) is not int:
            raise ValueError("a persistent id of no storage")
        return cls(key, kind.dtype, elements)


@dataclass(frozen=True)
class _StorageType:
    dtype: torch.dtype | None


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a file's pickle describes.

    Attributes:
        storage: where its values are. start, stride: in elements.
    """

    storage: StorageId
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its values, each counted, also where several are one in the storage."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The element after its last one in the storage."""
        return self.start + self.span((0,) * len(self.shape), self.shape)[1]

    def span(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
        """(first element, the one after the last) that a box of it takes, counted from ``start``."""
        first = sum(o * s for o, s in zip(offsets, self.stride, strict=True))
        if not prod(sizes):
            return first, first
        return first, first + 1 + sum((n - 1) * s for n, s in zip(sizes, self.stride, strict=True))


def _tensor_v2(
    storage: Any, start: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, *rest: Any
) -> SavedTensor:
    if type(storage) is not StorageId or storage.dtype is None:
        raise ValueError("a tensor without a storage of its type")
    return _tensor(storage, start, shape, stride, storage.dtype, rest)


def _tensor_v3(
    storage: Any,
    start: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    *rest: Any,
) -> SavedTensor:
    if type(storage) is not StorageId or type(dtype) is not torch.dtype:
        raise ValueError("a tensor without a storage")
    return _tensor(storage, start, shape, stride, dtype, rest)


def _tensor(
    storage: StorageId, start: Any, shape: Any, stride: Any, dtype: torch.dtype, rest: Any
) -> SavedTensor:
    shape, stride, (start,) = shape_of(shape), sizes_of(stride), sizes_of((start,))
    if len(shape) != len(stride):
        raise ValueError("a tensor with more sizes than strides, or fewer")
    if any(rest):
        raise ValueError(
            "a tensor with a conjugate or negative bit, which has other values than are stored"
        )
    return SavedTensor(storage, start, shape, stride, dtype)


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> SavedTensor:
    if type(data) is not SavedTensor:
        raise ValueError("a parameter without a tensor")
    return data


def _ordered_dict() -> OrderedDict:
    return OrderedDict()


def _encoded(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("bytes of another encoding")
    return text.encode("latin1")


def _all_dtypes() -> dict[tuple[str, str], torch.dtype]:
    found = {name: getattr(torch, name) for name in dir(torch) if not name.startswith("_")}
    return {("torch", n): value for n, value in found.items() if isinstance(value, torch.dtype)}


_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}

_SIZE = {("torch", "Size"): Maker(lambda sizes: sizes_of(sizes))}

SAVED_VALUES: Names = {
    **_all_dtypes(),
    **_SIZE,
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _StorageType(None),
    ("torch", "UntypedStorage"): _StorageType(None),
    ("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Maker(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Maker(_parameter),
    ("collections", "OrderedDict"): Maker(_ordered_dict),
    ("_codecs", "encode"): Maker(_encoded),
}
"""Of what ``torch.save`` writes for tensors, dicts, lists, tuples, numbers and strings."""


def _record(kind: str) -> Maker:
    def make() -> Record:
        return Record(kind)

    return Maker(make)


def _path(*parts: Any) -> Record:
    return Record("path")


_MEMORY_FORMAT = Maker(lambda number: Record("memory format"), is_value=True)
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


def _member(kind: Any, name: Any) -> Record:
    """A member of the enum, as Python 3.11.0 to 3.11.3 writes it: ``getattr`` of the class and its name."""
    if kind is not _MEMORY_FORMAT or name not in _MEMORY_FORMATS:
        raise ValueError("an attribute that is no memory format")
    return Record("memory format")


_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
)

DCP_METADATA: Names = {
    **_all_dtypes(),
    **_SIZE,
    **{(_METADATA, name): _record(name) for name in _RECORDS},
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    ("builtins", "getattr"): Maker(_member),
    ("torch.serialization", "_get_layout"): Maker(lambda name: Record("layout")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _record("_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _record("_StoragePrefix"),
    ("collections", "OrderedDict"): Maker(_ordered_dict),
    **{
        (module, name): Maker(_path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""Of the ``.metadata`` that ``torch.distributed.checkpoint`` writes (2.11 to 2.13)."""
