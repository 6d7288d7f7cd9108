"""A value that a dry run can't know: NaN that does not let a program decide by it."""

from __future__ import annotations

import math
import struct
import sys
from typing import Any, NoReturn, TypeVar

from parallel3d.errors import DryRunError

__all__ = ["NOT_KNOWN", "Unknown", "asking", "assume", "caller", "raised_at"]

_T = TypeVar("_T")

_BITS = 0x7FF8_0000_0D12_70AD  # no processor makes this NaN by itself; arithmetic hands it on
_SIGN = 1 << 63
NOT_KNOWN: float = struct.unpack("<d", struct.pack("<Q", _BITS))[0]
"""The plain NaN that ``float(tensor)`` gives: ``float()`` makes a plain number of an ``Unknown``."""


class Unknown(float):
    """NaN that stands for a number nobody has computed; what is calculated from it is unknown too.

    It prints and is logged as ``nan``. To compare it, to test it or to make an int of it raises
    ``DryRunError``, which names the line: the real run would go one way there, a dry run can't know which.
    """

    def __new__(cls) -> Unknown:
        return super().__new__(cls, NOT_KNOWN)

    def __reduce__(self) -> Any:
        return Unknown, ()

    def __repr__(self) -> str:
        return "nan"


def assume(value: _T, default: Any) -> _T:
    """``value``, or ``default`` where a dry run does not know it.

    For the places where a program decides by a number: ``if assume(stopping, 0.0) > 0: break``. Outside a dry
    run it returns ``value``.
    """
    return default if _is_unknown(value) else value


def _is_unknown(value: Any) -> bool:
    """Whether it is an ``Unknown``, or was made of one by ``float()``."""
    if not isinstance(value, float):
        return False
    return bool(struct.unpack("<Q", struct.pack("<d", value))[0] & ~_SIGN == _BITS)


def _calculated(name: str) -> Any:
    exact = getattr(float, name)

    def method(self: Unknown, *others: Any) -> Any:
        result = exact(float("nan"), *others)
        return Unknown() if isinstance(result, float) else result

    method.__name__ = name
    return method


def _decided(name: str, what: str) -> Any:
    def method(self: Unknown, *others: Any) -> NoReturn:
        raise DryRunError(
            f"{caller()}: {what} of a number that a dry run does not know (it comes from a tensor); "
            "say what to take for it: parallel3d.dryrun.assume(value, default)"
        )

    method.__name__ = name
    return method


def asking(name: str) -> Any:
    """``math.isnan`` and the like, which would answer for NaN what is not so of the number."""
    exact = getattr(math, name)
    decided = _decided(name, f"the program asks math.{name}")

    def function(value: Any) -> bool:
        number = float(value) if hasattr(value, "__torch_function__") else value
        return decided(value) if _is_unknown(number) else exact(value)

    return function


def caller() -> str:
    """``file:line, in function`` of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def raised_at(error: BaseException) -> str:
    """``file:line, in function`` of the user's innermost line that ``error`` went through."""
    where = "?"
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if not _is_ours(frame.f_globals.get("__name__", "")):
            where = f"{frame.f_code.co_filename}:{traceback.tb_lineno}, in {frame.f_code.co_name}"
        traceback = traceback.tb_next
    return where


def _is_ours(module: str) -> bool:
    """Also Python's own library, to which the user's code may have given a number."""
    package = module.partition(".")[0]
    return package in ("parallel3d", "torch") or package in sys.stdlib_module_names


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow"),
    *("floordiv", "rfloordiv", "mod", "rmod", "neg", "pos", "abs"),
):
    setattr(Unknown, f"__{_name}__", _calculated(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool"):
    setattr(Unknown, f"__{_name}__", _decided(f"__{_name}__", "the program decides by the value"))
Unknown.__round__ = lambda self, digits=None: (  # type: ignore[method-assign, assignment]
    self.__int__() if digits is None else Unknown()
)
for _name in ("int", "index", "trunc", "floor", "ceil"):
    setattr(Unknown, f"__{_name}__", _decided(f"__{_name}__", "an int is made"))
Unknown.__hash__ = float.__hash__  # type: ignore[method-assign]
