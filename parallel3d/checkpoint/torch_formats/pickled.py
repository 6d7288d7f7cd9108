"""read_pickle: a pickle's values, by the standard library's unpickler with few opcodes and names.

An unpickler imports and calls what the file names, and even with a ``find_class`` that refuses names it can
be made to allocate and to hash without end. Here a name stands for a value or a function of ours, or is an
error; whatever else the file does is making dicts, lists, tuples, numbers and strings, in time and memory
that its size bounds.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pickletools import opcodes
from typing import Any

import torch

from parallel3d.errors import CheckpointError, CorruptCheckpointError


@dataclass(frozen=True)
class Maker:
    """What a name of the file stands for where the file calls it: ``make(*arguments)``."""

    make: Callable[..., Any]
    is_value: bool = False


class Record:
    """An object of the file: its class's name, and what the file says is in it. No code belongs to it."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, state: Any = None) -> None:
        self.kind, self.state = kind, state


Names = Mapping[tuple[str, str], Any]
"""(module, name) -> a Maker, or the value itself."""

_KEYS = (str, int, float, bool, bytes, type(None), Record)  # whose hash takes no time
_MOST_KEYS = 1_000_000  # of all dicts of a file together
_MOST_SCATTERED = 10_000  # numbers as keys, other than 0, 1, 2, ...
_LARGEST_KEY = 1 << 60  # the hash of an integer is the remainder by 2 ** 61 - 1


def read_pickle(
    data: bytes,
    names: Names,
    *,
    what: str,
    persistent: Callable[[Any], Any] | None = None,
    most_keys: int = _MOST_KEYS,
) -> Any:
    """The value of the pickle ``data``.

    Args:
        names: all that it may name.
        what: what it is, for errors.
        persistent: makes the value of a persistent id; None: there may be none.
        most_keys: that its dicts may have together.

    Raises:
        CheckpointError: it names something else, or does what such a file has no need of.
        CorruptCheckpointError: it is no whole pickle.
    """
    reader = _Reader(data, names, what, persistent, most_keys)
    try:
        return reader.read_all()
    except CheckpointError:
        raise
    except Exception as error:  # of any kind: what the file says is arbitrary
        raise CorruptCheckpointError(
            f"{what} is no whole pickle: {type(error).__name__} at byte {reader.file.tell()} of {len(data)} "
            f"({error})"
        ) from None


PROTO = pickle.PROTO
"""What torch's pickles begin with."""

_PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE),
    *(pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8, pickle.EMPTY_TUPLE, pickle.TUPLE1),
    *(pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT),
    *(pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),
)
"""Opcodes that the library's unpickler may do as it does them: values, and names by ``find_class``."""


class _Steps(dict):
    """Opcode -> what is done; all others are refused."""

    def __missing__(self, code: int) -> Any:
        name = next((each.name for each in opcodes if each.code == chr(code)), None)
        if name is None:
            raise ValueError(f"no opcode is 0x{code:02x}")

        def refuse(reader: _Reader) -> None:
            raise CheckpointError(
                f"{reader.what} has the pickle opcode {name} at byte {reader.file.tell() - 1}, which none "
                "that torch writes for values has; it is not read. If you trust who made it: trusted=True"
            )

        return refuse


class _Reader(pickle._Unpickler):
    """The standard library's unpickler, the one in Python, whose steps can be replaced: it calls ``Maker`` s
    only, and what it does is bounded."""

    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        data: bytes,
        names: Names,
        what: str,
        persistent: Callable[[Any], Any] | None,
        most_keys: int,
    ) -> None:
        self.file = io.BytesIO(data)
        super().__init__(self.file)
        self.names, self.what, self.persistent = names, what, persistent
        self.allowance = 8 * len(data) + 10_000  # elements that calls may be given, in all
        self.scattered = _MOST_SCATTERED
        self.keys = most_keys

    def read_all(self) -> Any:
        """The value."""
        value = self.load()
        if self.stack or self.metastack:
            raise ValueError("more than one value")
        _check_values(value)
        return value

    def find_class(self, module: str, name: str) -> Any:
        """What the name stands for here."""
        value = self.names.get((module, name))
        if value is None:
            raise CheckpointError(
                f"{self.what} names {module[:80]}.{name[:80]}, which is not among what such a file needs; "
                "nothing of it was called. If you trust who made it: trusted=True"
            )
        return value

    def persistent_load(self, pid: Any) -> Any:
        """The value of a persistent id."""
        if self.persistent is None:
            raise CheckpointError(f"{self.what} refers to objects outside of it; it is not read")
        return self.persistent(pid)

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or not isinstance(function, Maker):
            raise ValueError("a call of no class")
        for argument in arguments:
            if isinstance(argument, (str, bytes, tuple, list, dict)):
                self.allowance -= len(argument)
        if self.allowance < 0:
            raise ValueError("more work than a file of its size has")
        self.append(function.make(*arguments))

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is OrderedDict:
            return  # a state dict's _metadata
        if type(target) is not Record or target.state is not None:
            raise ValueError("a state of nothing that has one")
        target.state = state

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("elements of no list")
        self.stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise ValueError("items of no dict")
        self.keys -= len(items) // 2
        if self.keys < 0:
            raise ValueError("more keys of dicts than a checkpoint has")
        for key, value in zip(items[::2], items[1::2], strict=True):
            kind = type(key)
            if kind not in _KEYS:
                raise ValueError(f"a dict with a {kind.__name__} as a key")
            if kind is float or (kind is int and not 0 <= key <= len(target)):
                # The hash of a string is a secret of this process; that of a number is not, and whoever
                # chooses numbers of one hash makes each key cost as much as there are keys. Those that are
                # counted from 0 have different ones, and of others there are few.
                if not -_LARGEST_KEY < key < _LARGEST_KEY:
                    raise ValueError("a dict with a huge number as a key")
                self.scattered -= 1
                if self.scattered < 0:
                    raise ValueError(
                        f"dicts with more than {_MOST_SCATTERED} numbers as keys that don't count from 0"
                    )
            target[key] = value

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    dispatch = _Steps({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN})
    dispatch |= {
        pickle.APPEND[0]: lambda r: r._extend([r.stack.pop()]),
        pickle.APPENDS[0]: lambda r: r._extend(r.pop_mark()),
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: lambda r: r._set_items(r.pop_mark()),
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.BUILD[0]: _build,
    }


def _check_values(value: Any) -> None:
    """Raises ValueError if there is a class where a value must be, or text that is none."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            if not each.isascii():
                each.encode()  # no half of a pair, which nobody could print
        elif isinstance(each, Maker):
            if not each.is_value:
                raise ValueError("a class where a value must be")
        elif isinstance(each, (dict, list, tuple, Record)) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, dict):
                waiting += each
                waiting += each.values()
            else:
                waiting += (each.state,) if isinstance(each, Record) else each


# The names that torch's files may have in their pickles, and what they stand for here.

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
