"""Where the program asks for values or names a device: what a dry run answers, or why it can't."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from parallel3d.dryrun.result import UnknownRead
from parallel3d.dryrun.unknown import NOT_KNOWN, Unknown, caller
from parallel3d.errors import DryRunError

__all__ = ["ReadMode", "refuse_device"]

_DECIDING = {
    Tensor.__bool__: "the program decides by a tensor's value",
    Tensor.__int__: "an int is made of a tensor's value",
    Tensor.__index__: "an index is made of a tensor's value",
    Tensor.numpy: "a numpy array is made of a tensor",
    Tensor.__array__: "a numpy array is made of a tensor",
    torch.is_nonzero: "the program decides by a tensor's value",
    Tensor.is_nonzero: "the program decides by a tensor's value",
    torch.equal: "the program decides by tensors' values",
    Tensor.equal: "the program decides by tensors' values",
    torch.allclose: "the program decides by tensors' values",
    Tensor.allclose: "the program decides by tensors' values",
}
_HELP = (
    "which a dry run does not know. Decide by p3d.dryrun.assume(tensor.item(), value to take for it), or "
    "skip the lines with p3d.dryrun.active()"
)


class ReadMode(TorchFunctionMode):
    """Answers NaN (``Unknown``) where the program reads a tensor's value, and raises where it decides by it.

    Args:
        is_unknown: whether a plain tensor's values are not known.
        device_type: of the tensors of the dry run.

    Attributes:
        reads: (where, what) -> how often.
    """

    def __init__(self, is_unknown: Callable[[Tensor], bool], device_type: str) -> None:
        super().__init__()
        self._is_unknown = is_unknown
        self.device_type = device_type
        self.reads: Counter[tuple[str, str]] = Counter()
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], Tensor):
            tensor = args[0]
            if self.unknown(tensor):
                return handler(self, func, tensor, args[1:])
        self._check_device(func, args, kwargs)
        if func in _FROM_DATA and args:
            return self._from_data(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def _check_device(self, func: Any, args: Any, kwargs: Any) -> None:
        if "device" in kwargs:
            refuse_device(kwargs["device"], self.device_type)
        elif func in _TO_A_DEVICE:
            for argument in args[1:2]:
                refuse_device(argument, self.device_type)
        elif func in _TO_CUDA:
            refuse_device("cuda", self.device_type)

    def _from_data(self, func: Any, data: Any, rest: Any, kwargs: Any) -> Any:
        """``torch.tensor`` of numbers, some of which may be unknown: then the tensor is."""
        unknown: list[Any] = []
        known = self._known(data, unknown)
        if not unknown:
            return func(data, *rest, **kwargs)
        made = func(known, *rest, **kwargs)
        dtype = made.dtype
        if kwargs.get("dtype") is None:
            for each in unknown:
                dtype = torch.promote_types(dtype, getattr(each, "dtype", dtype))
        return torch.empty(made.shape).to(dtype).requires_grad_(made.requires_grad)

    def _known(self, data: Any, unknown: list[Any]) -> Any:
        """``data`` with something of the same kind in place of what is ``unknown``."""
        if isinstance(data, list | tuple):
            return [self._known(each, unknown) for each in data]
        if isinstance(data, Unknown):
            unknown.append(data)
            return 0.0
        if isinstance(data, Tensor) and not data.ndim and self.unknown(data):
            self._note("item")
            unknown.append(data)
            return False  # of the lowest dtype
        return data

    @property
    def found(self) -> tuple[UnknownRead, ...]:
        """The places, those with most reads first."""
        return tuple(UnknownRead(*key, count) for key, count in self.reads.most_common())

    def unknown(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor``, DTensor or not, are not known."""
        if isinstance(tensor, DTensor):
            return True
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            return any(self.unknown(getattr(tensor, name)) for name in flatten()[0])
        return self._is_unknown(tensor)

    def _item(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        if tensor.numel() != 1:
            raise RuntimeError(
                f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar"
            )
        self._note(func.__name__)
        if isinstance(tensor, DTensor):
            tensor.full_tensor()  # what it communicates
        return Unknown()

    def _float(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        self._item(func, tensor, rest)
        return NOT_KNOWN

    def _format(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        if tensor.ndim:
            return object.__format__(tensor, "")
        self._note("format")
        return format(Unknown(), *rest)

    def _list(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        self._note("tolist")
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()

        def nested(shape: tuple[int, ...]) -> Any:
            return [nested(shape[1:]) for _ in range(shape[0])] if shape else Unknown()

        return nested(tuple(tensor.shape))

    def _decide(self, func: Any, tensor: Tensor, rest: Any) -> Any:
        raise DryRunError(f"{caller()}: {_DECIDING[func]}, {_HELP}")

    def _note(self, what: str) -> None:
        self.reads[caller(), what] += 1


_HANDLERS: dict[Any, Any] = {
    Tensor.item: ReadMode._item,
    Tensor.__float__: ReadMode._float,
    Tensor.__format__: ReadMode._format,
    Tensor.tolist: ReadMode._list,
    **dict.fromkeys(_DECIDING, ReadMode._decide),
}
_TO_A_DEVICE = {Tensor.to}
_TO_CUDA = {Tensor.cuda}
_FROM_DATA = {torch.tensor, torch.as_tensor}


def refuse_device(device: Any, device_type: str) -> None:
    """Raises DryRunError if ``device`` names another one than the dry run's or meta.

    A number means the current accelerator's.
    """
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            return  # torch says what is wrong with it
    if isinstance(device, torch.device) and device.type not in (device_type, "meta", "cpu"):
        raise DryRunError(
            f"{caller()}: the device {str(device)!r} is hard-coded; this dry run has {device_type!r}. Take "
            "the mesh's, which is right on every machine: torch.device(mesh.device_type)"
        )
