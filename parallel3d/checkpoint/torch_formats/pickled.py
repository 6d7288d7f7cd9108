"""Pickles of torch's files, read by the standard library's unpickler with few opcodes and names.

An unpickler imports and calls what a file names. With a ``find_class`` that refuses names, as with torch's
weights-only unpickler, a file can still make it allocate and hash without end. Here a name stands for a value
or a function of this module, or is an error; and the time and memory for the dicts, lists, tuples, numbers
and strings that a file describes are bounded by its size.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pickletools import opcodes
from typing import Any

import torch

from parallel3d.checkpoint.format.files import numbers_of, shape_of
from parallel3d.errors import CheckpointError, CorruptCheckpointError


@dataclass(frozen=True)
class Maker:
    """What a class or function named in a file stands for: the file's call becomes ``make(*arguments)``."""

    make: Callable[..., Any]


@dataclass(slots=True, eq=False)  # hashed by identity
class Record:
    """An object in a file: the name of its class, and its state. No code belongs to it."""

    kind: str
    state: Any = None


Names = Mapping[tuple[str, str], Any]
"""(module, name) -> a Maker, or the value itself."""

PROTO = pickle.PROTO
"""The first byte of torch's pickles."""
_KEY_TYPES = (str, int, float, bool, bytes, type(None), Record)  # their hash takes no time
_MAX_KEYS = 1_000_000  # of all dicts of a file together
_MAX_SPARSE_KEYS = 10_000  # numbers as keys other than 0, 1, 2, ...
_MAX_NUMBER = 1 << 60  # as a key; the hash of an integer is the remainder by 2 ** 61 - 1

_PLAIN_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE "
    "BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE "
    "EMPTY_LIST EMPTY_DICT BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL BINPERSID"
)
"""Opcodes executed as the library's unpickler does: they push values, or names by ``find_class``."""


def read_pickle(
    data: bytes,
    names: Names,
    *,
    what: str,
    persistent: Callable[[Any], Any] | None = None,
    max_keys: int = _MAX_KEYS,
) -> Any:
    """Returns the value of the pickle ``data``, of a file called ``what`` in errors.

    It may contain ``names``, opcodes that such files need, ``max_keys`` keys of dicts in all, and persistent
    ids if ``persistent`` returns the value of one.
    """
    reader = _Reader(data, names, what, persistent, max_keys)
    try:
        value = reader.load()
        if reader.stack or reader.metastack:
            raise ValueError("more than one value")
        _check_values(value)
        return value
    except CheckpointError:
        raise
    except Exception as error:  # of any type, because the file's content is arbitrary
        raise CorruptCheckpointError(
            f"{what} is not a complete pickle: {type(error).__name__} at byte {reader.file.tell()} "
            f"of {len(data)} ({error})"
        ) from None


class _Opcodes(dict):
    """Opcode -> its implementation; all others are refused."""

    def __missing__(self, code: int) -> Any:
        name = next((opcode.name for opcode in opcodes if opcode.code == chr(code)), None)
        if name is None:
            raise ValueError(f"no opcode is 0x{code:02x}")

        def refuse(reader: _Reader) -> None:
            raise CheckpointError(
                f"{reader.what} has the pickle opcode {name} at byte {reader.file.tell() - 1}, which torch "
                "doesn't write for values; it is not read. If you trust who made it: trusted=True"
            )

        return refuse


class _Reader(pickle._Unpickler):
    """The standard library's unpickler written in Python, whose opcodes can be replaced.

    It calls ``Maker`` objects only, and the work that it does is bounded.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self, data: bytes, names: Names, what: str, persistent: Any, max_keys: int
    ) -> None:
        self.file = io.BytesIO(data)
        super().__init__(self.file)
        self.names, self.what, self.persistent = names, what, persistent
        self.elements_left = 8 * len(data) + 10_000  # in arguments of calls, in all
        self.sparse_left = _MAX_SPARSE_KEYS
        self.keys_left = max_keys

    def find_class(self, module: str, name: str) -> Any:
        value = self.names.get((module, name))
        if value is None:
            raise CheckpointError(
                f"{self.what} names {module[:80]}.{name[:80]}, which such a file doesn't need; nothing of it "
                "was called. If you trust who made it: trusted=True"
            )
        return value

    def persistent_load(self, pid: Any) -> Any:
        if self.persistent is None:
            raise CheckpointError(f"{self.what} refers to objects outside of it; it is not read")
        return self.persistent(pid)

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or not isinstance(function, Maker):
            raise ValueError("a call of something other than a class")
        for argument in arguments:
            if isinstance(argument, (str, bytes, tuple, list, dict)):
                self.elements_left -= len(argument)
        if self.elements_left < 0:
            raise ValueError("more work than a file of its size needs")
        self.append(function.make(*arguments))

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is OrderedDict:
            return  # a state dict's _metadata
        if type(target) is not Record or target.state is not None:
            raise ValueError("a state of something that has none")
        target.state = state

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("elements of something other than a list")
        self.stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise ValueError("items of something other than a dict")
        self.keys_left -= len(items) // 2
        if self.keys_left < 0:
            raise ValueError("more keys of dicts than a checkpoint has")
        for key, value in zip(items[::2], items[1::2], strict=True):
            kind = type(key)
            if kind not in _KEY_TYPES:
                raise ValueError(f"a dict with a {kind.__name__} as a key")
            if kind is float or (kind is int and not 0 <= key <= len(target)):
                # The hash of a string depends on a secret of this process, that of a number does not: with
                # numbers of one hash each insertion takes time proportional to the size of the dict. Keys
                # that count from 0 have different hashes, and of others there are few.
                if not -_MAX_NUMBER < key < _MAX_NUMBER:
                    raise ValueError("a dict with a huge number as a key")
                self.sparse_left -= 1
                if self.sparse_left < 0:
                    raise ValueError(
                        f"dicts with more than {_MAX_SPARSE_KEYS} numbers as keys that don't count from 0"
                    )
            target[key] = value

    dispatch = _Opcodes(
        {
            code[0]: pickle._Unpickler.dispatch[code[0]]
            for code in (getattr(pickle, name) for name in _PLAIN_OPCODES.split())
        }
    )
    dispatch |= {
        pickle.APPEND[0]: lambda r: r._extend([r.stack.pop()]),
        pickle.APPENDS[0]: lambda r: r._extend(r.pop_mark()),
        pickle.SETITEM[0]: lambda r: r._set_items([r.stack.pop(-2), r.stack.pop()]),
        pickle.SETITEMS[0]: lambda r: r._set_items(r.pop_mark()),
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.BUILD[0]: _build,
    }


def _check_values(value: Any) -> None:
    """Raises ValueError if ``value`` contains a class, or a string that cannot be encoded."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if not item.isascii():
                item.encode()  # raises for lone surrogates, which cannot be printed
        elif isinstance(item, Maker):
            raise ValueError("a class instead of a value")
        elif isinstance(item, (dict, list, tuple, Record)) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                waiting += item
                waiting += item.values()
            else:
                waiting += (item.state,) if isinstance(item, Record) else item


# The names in pickles of torch's files, and what they stand for.

MAX_NAME = 2000
"""Characters of a name: searching it for prefixes takes time that grows with its square."""


sizes_of = partial(numbers_of, what="sizes or offsets")


def check_name(name: Any) -> None:
    """Raises ValueError if ``name`` is not a string, or too long for a name."""
    if type(name) is not str:
        raise ValueError("a name that is not a string")
    if len(name) > MAX_NAME:
        raise ValueError(f"a name of {len(name)} characters, {name[:40]!r}...")


@dataclass(frozen=True)
class _StorageType:
    dtype: torch.dtype | None


@dataclass(frozen=True)
class StorageId:
    """A storage that a pickle refers to."""

    key: str  # name of its record
    dtype: torch.dtype | None  # of its elements; None: bytes
    elements: int

    @classmethod
    def of(cls, value: Any) -> StorageId:
        """Parses the persistent id ``("storage", type, key, location, elements)``."""
        if type(value) is tuple and len(value) == 5 and value[0] == "storage":
            _, kind, key, _, elements = value
            if (type(kind), type(key), type(elements)) == (_StorageType, str, int):
                return cls(key, kind.dtype, elements)
        raise ValueError("a persistent id that is not of a storage")


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a pickle describes; ``start`` and ``stride``, in elements, are those in its storage."""

    storage: StorageId
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all its values, also of those that share memory in the storage."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The element after its last one in the storage."""
        return self.start + self.span((0,) * len(self.shape), self.shape)[1]

    def span(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
        """Returns (first element, the one after the last) of a box, counted from ``start``."""
        first = sum(o * s for o, s in zip(offsets, self.stride, strict=True))
        if not prod(sizes):
            return first, first
        return first, first + 1 + sum((n - 1) * s for n, s in zip(sizes, self.stride, strict=True))


def _tensor_v3(*arguments: Any) -> SavedTensor:
    storage, start, shape, stride, _requires_grad, _hooks, dtype, *bits = arguments
    if type(storage) is not StorageId or type(dtype) is not torch.dtype:
        raise ValueError("a tensor without a typed storage")
    shape, stride, (start,) = (
        shape_of(shape, "shape of a tensor"),
        sizes_of(stride),
        sizes_of((start,)),
    )
    if len(shape) != len(stride):
        raise ValueError("a tensor with more sizes than strides, or fewer")
    if any(bits):
        raise ValueError("a tensor with a conjugate or negative bit, whose values are not stored")
    return SavedTensor(storage, start, shape, stride, dtype)


def _tensor_v2(*arguments: Any) -> SavedTensor:
    storage = arguments[0]
    return _tensor_v3(*arguments[:6], getattr(storage, "dtype", None), *arguments[6:])


def _parameter(data: Any, _requires_grad: Any, _hooks: Any) -> SavedTensor:
    if type(data) is not SavedTensor:
        raise ValueError("a parameter without a tensor")
    return data


def _encoded(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("bytes of another encoding")
    return text.encode("latin1")


_MEMORY_FORMAT = Maker(lambda number: Record("memory format"))
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


def _memory_format(kind: Any, name: Any) -> Record:
    """A member of the enum as Python 3.11.0 to 3.11.3 pickles it: ``getattr`` of the class and its name."""
    if kind is not _MEMORY_FORMAT or name not in _MEMORY_FORMATS:
        raise ValueError("an attribute that is not a memory format")
    return Record("memory format")


def _no_arguments(make: Callable[[], Any]) -> Maker:
    """A class that is called without arguments."""
    return Maker(lambda: make())


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

_COMMON: Names = {
    **{("torch", n): dtype for n, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    ("torch", "Size"): Maker(sizes_of),
    ("collections", "OrderedDict"): _no_arguments(OrderedDict),
}

SAVED_VALUES: Names = {
    **_COMMON,
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _StorageType(None),
    ("torch", "UntypedStorage"): _StorageType(None),
    ("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Maker(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Maker(_parameter),
    ("_codecs", "encode"): Maker(_encoded),
}
"""Names in what ``torch.save`` writes for tensors, dicts, lists, tuples, numbers and strings."""

_METADATA, _FILESYSTEM = (f"torch.distributed.checkpoint.{n}" for n in ("metadata", "filesystem"))
_RECORDS = {
    _METADATA: "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata",
    _FILESYSTEM: "_StorageInfo _StoragePrefix",
}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")

DCP_METADATA: Names = {
    **_COMMON,
    **{
        (module, name): _no_arguments(partial(Record, name))
        for module, names in _RECORDS.items()
        for name in names.split()
    },
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    ("builtins", "getattr"): Maker(_memory_format),
    ("torch.serialization", "_get_layout"): Maker(lambda name: Record("layout")),
    **{
        (module, name): Maker(lambda *parts: Record("path"))
        for module in ("pathlib", "pathlib._local")
        for name in _PATHS
    },
}
"""Names in the ``.metadata`` that ``torch.distributed.checkpoint`` writes (2.11 to 2.13)."""
