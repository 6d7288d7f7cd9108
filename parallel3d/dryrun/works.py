"""Collectives that send nothing: what torch's operations return, and a handle that notes who waits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from parallel3d._compat_dry import boxed

__all__ = ["DryWork", "answer", "inputs_and_outputs"]


class DryWork(dist.Work):
    """A collective that is over at once; the first ``wait`` calls ``on_wait`` with its ``index``.

    Whoever makes it must keep it: what c10d gives the program refers to the C++ part alone, whose own
    ``wait`` would wait for ever. So it does not keep the outputs alive.
    """

    def __init__(self, on_wait: Callable[[int], None], outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.on_wait: Callable[[int], None] | None = on_wait
        self.outputs = [weakref.ref(tensor) for tensor in outputs]
        self.index = -1

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        on_wait, self.on_wait = self.on_wait, None
        if on_wait is not None:
            on_wait(self.index)
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """Nothing fails here."""
        return True

    def get_future(self) -> Any:
        """Complete, with the outputs."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result([t for each in self.outputs if (t := each()) is not None])
        return future


_WRITTEN = ("output_tensor", "output_tensors", "output", "outputs", "tensors")
_READ = ("input_tensor", "input_tensors", "input", "inputs", "tensors", "tensor")


def inputs_and_outputs(values: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of a collective's arguments by name: the tensors it reads, and those it writes."""
    read = [t for name in _READ for t in _flat(values.get(name))]
    written = [t for name in _WRITTEN for t in _flat(values.get(name))]
    return read, written


def answer(func: Any, values: dict[str, Any], work: dist.Work) -> Any:
    """What ``func``, an operation of c10d, returns: its outputs as far as it does, and ``work``."""
    given = next((values[name] for name in _WRITTEN if values.get(name) is not None), None)
    returned: list[Any] = []
    for each in func._schema.returns:
        returned.append(boxed(work) if "Work" in str(each.type) else given)
    if not returned:
        return None
    return returned[0] if len(returned) == 1 else tuple(returned)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return []
