"""Averaged: one parameter or buffer of a model, and this rank's part of its average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d._compat import get_local_tensor, make_dtensor, make_spec
from parallel3d._packed import packing_of
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.param import owner_of
from parallel3d.fsdp.whole.transforms import chunk
from parallel3d.optim.pieces import local_of

__all__ = ["Averaged", "tensors_of"]

Read = Callable[[], torch.Tensor]


def tensors_of(model: nn.Module) -> Iterator[tuple[list[str], Read, bool]]:
    """(all its names, how to read it, whether it is a parameter) of each tensor in ``model.state_dict()``.

    A unit's Parameter is the same object for the model's life; others, and buffers, are whatever their
    modules have at the moment (``load_state_dict(assign=True)`` replaces them).
    """
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    for key, param in params.items():
        prefix, _, name = names[key][0].rpartition(".")
        read = partial(getattr, model.get_submodule(prefix), name)
        yield names[key], read if owner_of(param) is None else partial(_itself, param), True
    buffers: dict[int, tuple[nn.Module, str]] = {}
    names = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            buffers.setdefault(id(buffer), (module, name))
            names.setdefault(id(buffer), []).append(f"{prefix}.{name}" if prefix else name)
    for key, (module, name) in buffers.items():
        yield names[key], partial(getattr, module, name), False


# With ``partial`` and not closures: a copy of the EMA together with its model reads the model's copy.


def _itself(param: nn.Parameter) -> nn.Parameter:
    return param


class Averaged:
    """One tensor's average.

    Attributes:
        names: in the model; several where it is tied.
        shape: the global one.
        value: this rank's part of the average.
        is_averaged: False: copied.
    """

    def __init__(
        self, names: list[str], read: Read, dtype: torch.dtype | None, *, is_averaged: bool
    ) -> None:
        self.names = names
        self._read = read
        tensor = read()
        if tensor.is_meta:
            raise Parallel3dError(
                f"EMA: {names[0]} is on meta; give the model values first (parallel3d.materialize)"
            )
        floating = tensor.is_floating_point()
        self.is_averaged = is_averaged and floating
        self.shape = tensor.shape
        local = local_of(tensor)
        self._kind = _kind_of(tensor)
        kept = dtype if dtype is not None and floating else local.dtype
        self.value = local.detach().to(kept, copy=True)

    def current(self, converted: bool = False) -> torch.Tensor:
        """This rank's part of the model's tensor, the very memory.

        Raises:
            StateError: its shape is no longer what it was; or, unless ``converted``, dtype or device.
        """
        tensor = self._read()
        local = local_of(tensor)
        kind = _kind_of(tensor)
        if kind != self._kind and not (converted and kind[:2] == self._kind[:2]):
            raise StateError(
                f"EMA: {self.names[0]} was {_shown(self._kind)} and is {_shown(kind)} now; "
                "shard or convert the model first, and then make the EMA"
            )
        return local

    def placed(self) -> torch.Tensor:
        """The average as the model's tensor is: a DTensor of the same placements, or plain."""
        tensor = self._read()
        if not isinstance(tensor, DTensor):
            return self.value
        spec = make_spec(tensor.device_mesh, tensor.placements, self.shape, self.value.dtype)
        return make_dtensor(self.value, spec)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``whole``, which is a DTensor of any placements, or whole."""
        tensor = self._read()
        if not isinstance(tensor, DTensor):
            return whole.full_tensor() if isinstance(whole, DTensor) else whole
        owner = owner_of(tensor)
        if owner is not None:
            return owner.local_part(whole)
        if packing_of(tensor) is not None:
            return get_local_tensor(chunk(whole, tensor.device_mesh, tensor.placements))
        if isinstance(whole, DTensor):
            return get_local_tensor(whole.redistribute(tensor.device_mesh, tensor.placements))
        replicated = DTensor.from_local(whole, tensor.device_mesh, run_check=False)
        return get_local_tensor(replicated.redistribute(placements=tensor.placements))


_Kind = tuple[torch.Size, bool, torch.dtype, torch.device]


def _kind_of(tensor: torch.Tensor) -> _Kind:
    local = local_of(tensor)
    return tensor.shape, isinstance(tensor, DTensor), local.dtype, local.device


def _shown(kind: _Kind) -> str:
    shape, sharded, dtype, device = kind
    return f"{'a DTensor of ' if sharded else ''}{dtype} {tuple(shape)} on {device}"
