"""Unknown: the number, a NaN, that stands for a value that a dry run can't know."""

from __future__ import annotations

import math
import struct
from typing import Any, NoReturn, TypeVar

from parallel3d._torch.fake import VALUE_ERRORS
from parallel3d._util.users_code import caller
from parallel3d.errors import DryRunError

_T = TypeVar("_T")

_BITS = 0x7FF8_0000_0D12_70AD  # no processor produces this NaN by itself; arithmetic propagates it
_SIGN = 1 << 63
NOT_KNOWN: float = struct.unpack("<d", struct.pack("<Q", _BITS))[0]
"""The plain NaN that ``float(tensor)`` returns, as ``float()`` can't return an ``Unknown``."""


class Undecided(DryRunError):
    """Raised where the program needs a value that a dry run doesn't know.

    Attributes:
        what: what the program does. where: ``file:line, in function``.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.where = what, caller()
        super().__init__(f"{self.where}: {what}{remedy if remedy[0] in ',(' else f'; {remedy}'}")


class Unknown(float):
    """A NaN that stands for a number that is not computed; arithmetic with it gives ``Unknown`` too.

    It is printed as ``unknown``. Comparing it, testing it or converting it to an int raises ``DryRunError``
    with the line: a dry run can't know which way the real run would go there.
    """

    def __new__(cls) -> Unknown:
        return super().__new__(cls, NOT_KNOWN)

    def __reduce__(self) -> Any:
        return Unknown, ()

    def __repr__(self) -> str:
        return "unknown"

    def __format__(self, spec: str) -> str:
        return "unknown"


def assume(value: _T, default: Any) -> _T:
    """Returns ``value``; in a dry run that doesn't know it, ``default``.

    For conditions of a program on a tensor's value: ``if assume(stopping, 0.0) > 0: break``.
    """
    return default if _is_unknown(value) else value


def _is_unknown(value: Any) -> bool:
    """Whether ``value`` is an ``Unknown``, or was made from one by ``float()``."""
    return isinstance(value, float) and (
        struct.unpack("<Q", struct.pack("<d", value))[0] & ~_SIGN == _BITS
    )


def _calculated(name: str) -> Any:
    exact = getattr(float, name)

    def method(self: Unknown, *others: Any) -> Any:
        result = exact(float("nan"), *others)
        return Unknown() if isinstance(result, float) else result

    return method


def _decided(what: str) -> Any:
    def method(self: Unknown, *others: Any) -> NoReturn:
        raise Undecided(
            f"{what} of a number that a dry run does not know (it comes from a tensor)",
            "give a value to use instead: parallel3d.tools.dryrun.assume(value, default)",
        )

    return method


def asking(name: str) -> Any:
    """Returns a replacement for the function ``name`` of ``math``, such as ``isnan``, that raises Undecided
    for an unknown number, instead of answering for the NaN."""
    exact = getattr(math, name)
    decided = _decided(f"the program asks math.{name}")

    def function(value: Any) -> bool:
        number = float(value) if hasattr(value, "__torch_function__") else value
        return decided(value) if _is_unknown(number) else exact(value)

    return function


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow"),
    *("floordiv", "rfloordiv", "mod", "rmod", "neg", "pos", "abs"),
):
    setattr(Unknown, f"__{_name}__", _calculated(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool"):
    setattr(Unknown, f"__{_name}__", _decided("the program decides by the value"))
for _name in ("int", "index", "trunc", "floor", "ceil"):
    setattr(Unknown, f"__{_name}__", _decided("an int is made"))
Unknown.__round__ = lambda self, digits=None: (  # type: ignore[method-assign, assignment]
    self.__int__() if digits is None else Unknown()
)
Unknown.__hash__ = float.__hash__  # type: ignore[method-assign]


# Errors that torch raises where a dry run can't continue.

_SKIP = "skip the lines with parallel3d.tools.dryrun.active()"
_ASSUME = "give a value to use instead: parallel3d.tools.dryrun.assume"
_REASONS = {
    f"the program needs a GPU here, and a dry run has none; use the mesh's device, "
    f"torch.device(mesh.device_type), or {_SKIP}": (
        "Torch not compiled with CUDA enabled",
        "Found no NVIDIA driver",
        "No CUDA GPUs are available",
        "CUDA driver version is insufficient",  # from a build for CUDA, without a driver
        "no CUDA-capable device is detected",
        "Cannot access accelerator device when none is available",
        "torch.cuda.Stream requires CUDA support",
        "Tried to instantiate dummy base class",
        "Cannot get CUDA generator without ATen_cuda library",
    ),
    f"an operation outside torch reads tensors' memory, which a dry run does not have; {_SKIP}": (
        "its data is not allocated yet",
        "Cannot access data pointer",
    ),
    "lazy modules, which take their shapes from data, are not possible in a dry run; give the layer its "
    "sizes": ("UninitializedParameter",),
    "FlexAttention has no backward on the CPU, where dry runs are; use scaled_dot_product_attention if "
    "parallel3d.tools.dryrun.active()": ("FlexAttention does not support backward on CPU",),
}
"""Reason -> parts of torch's messages."""


def why_not(error: BaseException) -> str | None:
    """Returns why a dry run can't do what raised ``error``; None if the error is the program's own."""
    if isinstance(error, DryRunError):
        return None
    text = str(error)
    if isinstance(error, VALUE_ERRORS):
        return (
            "an operation depends on tensors' values, which a dry run does not know "
            f"({type(error).__name__}: {text}); {_SKIP}"
        )
    if isinstance(error, ValueError) and text == "cannot convert float NaN to integer":
        return (
            "an int is made of NaN: float(tensor), which a dry run does not know; "
            f"{_ASSUME}(float(tensor), default)"
        )
    if isinstance(error, TypeError) and Unknown.__name__ in text:
        return (
            "an argument of an operation is a number that a dry run does not know, as it comes from a tensor "
            f"({text}); {_ASSUME}(value, default)"
        )
    for reason, parts in _REASONS.items():
        if any(part in text for part in parts):
            return f"{reason} ({text.splitlines()[0]})"
    return None
