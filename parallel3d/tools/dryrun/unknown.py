"""A value that a dry run can't know: NaN that does not let a program decide by it."""

from __future__ import annotations

import math
import struct
import sys
from typing import Any, NoReturn, TypeVar

from parallel3d._torch.fake import VALUE_ERRORS
from parallel3d.errors import DryRunError

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
            "say what to take for it: parallel3d.tools.dryrun.assume(value, default)"
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


# What torch raises where a dry run can't go on, in words of the program.

_NO_GPU = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "CUDA driver version is insufficient",  # of a build for CUDA, without a driver
    "no CUDA-capable device is detected",
    "Cannot access accelerator device when none is available",
    "torch.cuda.Stream requires CUDA support",
    "Tried to instantiate dummy base class",
    "Cannot get CUDA generator without ATen_cuda library",
)

_LIMITS = {
    "UninitializedParameter": "lazy modules, which learn their shapes from data, have no place in a dry run; "
    "give the layer its sizes",
    "FlexAttention does not support backward on CPU": "FlexAttention has no backward on the CPU, where dry "
    "runs are; use scaled_dot_product_attention where parallel3d.tools.dryrun.active()",
}


def why_not(error: BaseException) -> str | None:
    """Why a dry run can't do what raised ``error``; None if it is the program's own fault."""
    if isinstance(error, DryRunError):
        return None
    text = str(error)
    if isinstance(error, VALUE_ERRORS):
        return (
            "an operation depends on tensors' values, which a dry run does not know "
            f"({type(error).__name__}: {text}); skip the lines with parallel3d.tools.dryrun.active()"
        )
    if isinstance(error, ValueError) and text == "cannot convert float NaN to integer":
        return (
            "an int is made of NaN: float(tensor), which a dry run does not know; say what to take for it: "
            "parallel3d.tools.dryrun.assume(float(tensor), default)"
        )
    if isinstance(error, TypeError) and Unknown.__name__ in text:
        return (
            "an argument of an operation is a number that a dry run does not know, as it comes from a tensor "
            f"({text}); say what to take for it: parallel3d.tools.dryrun.assume(value, default)"
        )
    if any(each in text for each in _NO_GPU):
        return (
            f"the program needs a GPU here, and a dry run has none ({text.splitlines()[0]}); take the mesh's "
            "device, torch.device(mesh.device_type), or skip the lines with parallel3d.tools.dryrun.active()"
        )
    if "its data is not allocated yet" in text or "Cannot access data pointer" in text:
        return (
            "an operation outside torch reads tensors' memory, which a dry run does not have "
            f"({text.splitlines()[0]}); skip the lines with parallel3d.tools.dryrun.active()"
        )
    for part, reason in _LIMITS.items():
        if part in text:
            return f"{reason} ({text.splitlines()[0]})"
    return None
