"""read_pickle: a pickle's values, by an interpreter that knows few opcodes and calls nothing of the file's.

``pickle.Unpickler`` imports and calls what the file names, and even with a ``find_class`` that refuses names
it can be made to allocate and to hash without end. Here a name stands for a value or a function of ours, or
is an error; whatever else the file does is making dicts, lists, tuples, numbers and strings, in time and
memory that its size bounds.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pickletools import opcodes
from typing import Any

from parallel3d.errors import CheckpointError, CorruptCheckpointError

__all__ = ["PROTO", "Maker", "Names", "Record", "read_pickle"]


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
_MARK = object()


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
    machine = _Machine(data, names, what, persistent, most_keys)
    try:
        return machine.run()
    except CheckpointError:
        raise
    except Exception as error:  # of any kind: what the file says is arbitrary
        raise CorruptCheckpointError(
            f"{what} is no whole pickle: {type(error).__name__} at byte {machine.at} of {len(data)} ({error})"
        ) from None


class _Machine:
    """The interpreter: a stack of values, marks among them, and the memo."""

    def __init__(
        self,
        data: bytes,
        names: Names,
        what: str,
        persistent: Callable[[Any], Any] | None,
        most_keys: int,
    ) -> None:
        self.data, self.names, self.what, self.persistent = data, names, what, persistent
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.allowance = 8 * len(data) + 10_000  # elements that calls may be given, in all
        self.scattered = _MOST_SCATTERED
        self.keys = most_keys

    def run(self) -> Any:
        data, opcodes = self.data, _OPCODES
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                break
            step = opcodes.get(code)
            if step is None:
                self.refuse(code)
            else:
                step(self)
        (value,) = self.stack
        return self._value(value)

    def refuse(self, code: int) -> None:
        name = next((each.name for each in opcodes if each.code == chr(code)), None)
        if name is None:
            raise ValueError(f"no opcode is 0x{code:02x}")
        raise CheckpointError(
            f"{self.what} has the pickle opcode {name} at byte {self.at - 1}, which none that torch "
            "writes for values has; it is not read. If you trust who made it: trusted=True"
        )

    # -- reading ---------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise EOFError(f"{count} bytes are asked for")
        found = self.data[self.at : end]
        self.at = end
        return found

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        found = self.take(end - self.at)
        self.at += 1
        return found.decode("utf-8")

    # -- the stack -------------------------------------------------------------------------------------

    def _value(self, value: Any) -> Any:
        if value is _MARK or (isinstance(value, Maker) and not value.is_value):
            raise ValueError("a mark or a class where a value must be")
        return value

    def pop(self) -> Any:
        return self._value(self.stack.pop())

    def since_mark(self) -> list[Any]:
        stack = self.stack
        start = len(stack) - 1
        while stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise ValueError("no mark")
        found = stack[start + 1 :]
        del stack[start:]
        for value in found:
            if isinstance(value, Maker):
                raise ValueError("a class where a value must be")
        return found

    def tuple_of(self, count: int) -> None:
        stack = self.stack
        if len(stack) < count:
            raise ValueError("too few values")
        found = tuple(map(self._value, stack[len(stack) - count :]))
        del stack[len(stack) - count :]
        stack.append(found)

    def set_items(self, items: list[Any]) -> None:
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

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("elements of no list")
        self.stack[-1].extend(items)

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def remember(self, index: int) -> None:
        if self.stack[-1] is _MARK:
            raise ValueError("a mark is to be remembered")
        self.memo[index] = self.stack[-1]

    # -- names and calls -------------------------------------------------------------------------------

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no string")
        value = self.names.get((module, name))
        if value is None:
            raise CheckpointError(
                f"{self.what} names {module[:80]}.{name[:80]}, which is not among what such a file needs; "
                "nothing of it was called. If you trust who made it: trusted=True"
            )
        self.stack.append(value)

    def call(self) -> None:
        arguments = self.pop()
        function = self.stack.pop()
        if type(arguments) is not tuple or not isinstance(function, Maker):
            raise ValueError("a call of no class")
        for argument in arguments:
            if isinstance(argument, (str, bytes, tuple, list, dict)):
                self.allowance -= len(argument)
        if self.allowance < 0:
            raise ValueError("more work than a file of its size has")
        self.stack.append(function.make(*arguments))

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if type(target) is OrderedDict:
            return  # a state dict's _metadata
        if type(target) is not Record or target.state is not None:
            raise ValueError("a state of nothing that has one")
        target.state = state

    def persistent_id(self) -> None:
        value = self.pop()
        if self.persistent is None:
            raise CheckpointError(f"{self.what} refers to objects outside of it; it is not read")
        self.stack.append(self.persistent(value))

    def frozen(self, value: Any) -> None:
        self.stack.append(value)


def _integer(machine: _Machine) -> int:
    count = machine.number(1)
    if count > 32:
        raise ValueError(f"an integer of {count} bytes")
    return int.from_bytes(machine.take(count), "little", signed=True)


def _pair(machine: _Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


def _stack_name(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.name(module, name)


def _text(size: int) -> Callable[[_Machine], None]:
    return lambda m: m.frozen(m.take(m.number(size)).decode("utf-8"))


def _bytes(size: int) -> Callable[[_Machine], None]:
    return lambda m: m.frozen(m.take(m.number(size)))


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.frozen(value)


def _skip(count: int) -> Callable[[_Machine], Any]:
    return lambda m: m.take(count)


_STOP = ord(".")
PROTO = b"\x80"
"""What torch's pickles begin with."""

_OPCODES: dict[int, Callable[[_Machine], Any]] = {
    0x80: _skip(1),  # PROTO
    0x95: _skip(8),  # FRAME
    ord("("): _constant(_MARK),
    ord("N"): _constant(None),
    0x88: _constant(True),
    0x89: _constant(False),
    ord("J"): lambda m: m.frozen(int.from_bytes(m.take(4), "little", signed=True)),
    ord("K"): lambda m: m.frozen(m.number(1)),
    ord("M"): lambda m: m.frozen(m.number(2)),
    0x8A: lambda m: m.frozen(_integer(m)),  # LONG1
    ord("G"): lambda m: m.frozen(struct.unpack(">d", m.take(8))[0]),
    0x8C: _text(1),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord("C"): _bytes(1),
    ord("B"): _bytes(4),
    0x8E: _bytes(8),
    ord(")"): _constant(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.frozen(tuple(m.since_mark())),
    ord("]"): lambda m: m.frozen([]),
    ord("a"): lambda m: m.extend([m.pop()]),
    ord("e"): lambda m: m.extend(m.since_mark()),
    ord("}"): lambda m: m.frozen({}),
    ord("s"): _pair,
    ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("h"): lambda m: m.recall(m.number(1)),
    ord("j"): lambda m: m.recall(m.number(4)),
    ord("q"): lambda m: m.remember(m.number(1)),
    ord("r"): lambda m: m.remember(m.number(4)),
    0x94: lambda m: m.remember(len(m.memo)),  # MEMOIZE
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: _stack_name,
    ord("R"): _Machine.call,
    0x81: _Machine.call,  # NEWOBJ
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent_id,
}
