"""EMA: the exponential moving average of a sharded model's weights, on its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from parallel3d._layout.packed import packing_of
from parallel3d._torch.dtensor import get_local_tensor, make_dtensor, make_spec
from parallel3d._torch.kernels import foreach_copy_, foreach_lerp_
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp import chunk
from parallel3d.fsdp.inspect import owner_of, units_of
from parallel3d.optim.pieces import local_of

# Averaged: one parameter or buffer of a model, and this rank's part of its average.

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


class EMA:
    """``average = decay * average + (1 - decay) * weight`` of each weight; at first the weights themselves.

    Each rank averages its own shards: nothing is communicated, and the memory is that of one more set of
    shards (two while swapped in)::

        ema = p3d.optim.EMA(model, 0.999)
        for tokens in data:
            ...
            optimizer.step()
            ema.update()
        with ema.swapped():
            evaluate(model)

    Formula: Polyak & Juditsky 1992 in the exponential form of ``torch.optim.swa_utils.get_ema_multi_avg_fn``.

    Args:
        model: any module, sharded or not; not on meta. Make it parallel first.
        decay: in [0, 1]; or a function of the number of updates before (0 at the first), such as
            ``lambda n: min(0.999, (1 + n) / (10 + n))``.
        dtype: of the averages of floating-point tensors; by default their own. float32 for bfloat16 weights,
            which a small ``1 - decay`` would round to no change.
        average_buffers: False: floating-point buffers too are copied at each update, not averaged. Others,
            such as counters, always are. Buffers that are not persistent are left alone.

    Raises:
        Parallel3dError: bad ``decay`` or ``dtype``, no module, or one on meta.

    Attributes:
        updates: how many there were.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        dtype: torch.dtype | None = None,
        average_buffers: bool = False,
    ) -> None:
        _check_arguments(model, decay, dtype)
        self._decay = decay
        self._model = model
        self.updates = 0
        self._swapped = False
        _check_at_rest(model, "EMA")
        for unit in units_of(model, recurse=True):
            unit.show_shards()
        self._all = [
            Averaged(names, read, dtype, is_averaged=average or average_buffers)
            for names, read, average in tensors_of(model)
        ]

    # -- averaging -----------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self) -> None:
        """Takes the model's weights as they are into the average. After each optimizer step.

        Raises:
            StateError: while swapped in; or a weight has changed its shape, dtype or device.
            Parallel3dError: ``decay`` returned no number in [0, 1].
        """
        self._check_not_swapped("update")
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        _check_decay(decay)
        pairs = [(each, each.current()) for each in self._all]
        self.updates += 1
        by_kind: dict[tuple[torch.dtype, torch.dtype, torch.device], list] = {}
        for each, now in pairs:
            if not each.is_averaged:
                each.value.copy_(now)
            else:
                kind = (each.value.dtype, now.dtype, now.device)
                by_kind.setdefault(kind, []).append((each.value, now))
        for (kept, given, _), members in by_kind.items():
            if kept == given:
                foreach_lerp_([v for v, _ in members], [n for _, n in members], 1.0 - decay)
                continue
            for value, now in members:  # one cast copy at a time
                value.lerp_(now.to(kept), 1.0 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model holds the average within the body, and its own weights again after it, whatever happens.

        What the body writes to the weights is dropped, the dtype it converts them to stays. Parameters stay
        the same objects. Units that stay gathered (``reshard_after_forward=False``, ``unshard()``) gather
        anew at their next forward. A forward and its backward belong on the same side: in backward units
        gather what the weights are at that moment.

        Raises:
            StateError: within itself, or within a forward or backward.
        """
        self._check_not_swapped("swapped")
        _check_at_rest(self._model, "swapped")
        with torch.no_grad():
            now = [each.current() for each in self._all]
            saved = [tensor.clone() for tensor in now]
        self._swapped = True
        try:
            self._write([each.value for each in self._all])
            yield
        finally:
            self._swapped = False
            self._write(saved, converted=True)

    def _write(self, values: Sequence[torch.Tensor], converted: bool = False) -> None:
        """Into the model, seen by all that compares versions."""
        # Also around an evaluation in inference mode, whose writes no version would count.
        with torch.inference_mode(False), torch.no_grad():
            targets = [each.current(converted) for each in self._all]
            if targets:
                foreach_copy_(targets, list(values))
                increment_version(targets)

    # -- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``{"average": {name: tensor}, "updates": number}``, of the model's own names, for any checkpoint.

        Averages of DTensors are DTensors placed as these, and share memory with this object.
        ``model.load_state_dict(ema.state_dict()["average"])`` makes the average the model's weights.
        """
        average = {name: each.placed() for each in self._all for name in each.names}
        return {"average": average, "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict`` returned, here or on another mesh.

        DTensors must be on the model's mesh (``torch.distributed.checkpoint`` loads into what ``state_dict``
        returns), and communicate where they are placed otherwise; of whole tensors each rank takes its part.

        Raises:
            Parallel3dError: missing or unexpected names, other shapes. Nothing is loaded then.
            StateError: while swapped in.
        """
        self._check_not_swapped("load_state_dict")
        average, updates = _checked_state(state_dict)
        names = {name: each for each in self._all for name in each.names}
        wrong = sorted(names.keys() ^ average.keys())
        if wrong:
            which = "is missing" if wrong[0] in names else "is not in the model"
            raise Parallel3dError(
                f"load_state_dict: {wrong[0]} {which} ({len(wrong)} names differ); give what state_dict() of "
                "an EMA of this model returned"
            )
        for name, each in names.items():
            if average[name].shape != each.shape:
                raise Parallel3dError(
                    f"load_state_dict: {name} has shape {tuple(average[name].shape)}; it must have that of "
                    f"the model's, {tuple(each.shape)}"
                )
        for each in self._all:
            each.value.copy_(each.part_of(average[each.names[0]]))
        self.updates = updates

    # -- checks --------------------------------------------------------------------------------------

    def _check_not_swapped(self, what: str) -> None:
        if self._swapped:
            raise StateError(
                f"EMA: {what} within swapped(), where the model holds the average; leave the context first"
            )


def _check_at_rest(model: nn.Module, what: str) -> None:
    for unit in units_of(model, recurse=True):
        unit.come_to_rest()
        busy = unit.depth or unit.backward_begun
        if busy or (unit.context is not None and unit.context.running):
            raise StateError(f"{what}: unit {unit.label} is being used; call it between steps")


def _check_arguments(model: Any, decay: Any, dtype: torch.dtype | None) -> None:
    if not isinstance(model, nn.Module):
        raise Parallel3dError(f"EMA was given a {type(model).__name__}; it needs a module")
    if not callable(decay):
        _check_decay(decay)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise Parallel3dError(f"dtype is {dtype!r}; it must be of floating point, or None")


def _check_decay(decay: Any) -> None:
    number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if not number or not 0.0 <= decay <= 1.0:
        raise Parallel3dError(
            f"decay is {decay!r}; it must be a number from 0 to 1, or a function of the number of updates "
            "that returns one"
        )


def _checked_state(state_dict: Any) -> tuple[dict[str, torch.Tensor], int]:
    average = state_dict.get("average") if isinstance(state_dict, dict) else None
    if not isinstance(average, dict) or "updates" not in state_dict:
        raise Parallel3dError(
            'load_state_dict: the state must be {"average": {name: tensor}, "updates": number}, as '
            "state_dict() returns it; for a model's own state dict, load it into the model and make a new EMA"
        )
    for name, value in average.items():
        if not isinstance(value, torch.Tensor):
            raise Parallel3dError(f"load_state_dict: {name} is a {type(value).__name__}, no tensor")
    try:
        return average, int(state_dict["updates"])
    except (TypeError, ValueError) as error:
        raise Parallel3dError(
            f"load_state_dict: updates is {state_dict['updates']!r}; it must be a number of updates"
        ) from error
