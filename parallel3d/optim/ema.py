"""EMA: the exponential moving average of a sharded model's weights, on its shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from parallel3d._torch.kernels import foreach_copy_, foreach_lerp_
from parallel3d._util.arguments import counted
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.inspect import check_at_rest, owner_of, refuse_torch_units, units_of
from parallel3d.optim.pieces import local_of, part_of, placed_as

Read = Callable[[], torch.Tensor]


def tensors_of(model: nn.Module) -> Iterator[tuple[list[str], Read, bool]]:
    """Yields (names, function that returns it, whether it is a parameter) for each tensor of the state dict;
    a tied tensor comes once, with all its names.

    A unit's Parameter is the same object for the model's life; other parameters, and buffers, are read from
    their modules at each call (``load_state_dict(assign=True)`` replaces them).
    """
    for is_param in (True, False):
        names: defaultdict[int, list[str]] = defaultdict(list)
        readers: dict[int, Read] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, tensor in (module._parameters if is_param else module._buffers).items():
                if tensor is None or name in module._non_persistent_buffers_set:
                    continue
                names[id(tensor)].append(f"{prefix}.{name}" if prefix else name)
                # ``partial``, not a closure: an EMA copied together with its model reads the copied model.
                read: Read = partial(getattr, module, name)
                if is_param and owner_of(tensor) is not None:
                    read = partial(_itself, tensor)
                readers.setdefault(id(tensor), read)
        for key, read in readers.items():
            yield names[key], read, is_param


def _itself(param: torch.Tensor) -> torch.Tensor:
    return param


class Averaged:
    """The average of one tensor.

    Attributes:
        names: names of the tensor in the model; several if it is tied.
        read: returns the model's tensor.
        shape: its global shape.
        value: this rank's part of the average.
        is_averaged: whether it is averaged; else it is copied.
    """

    def __init__(
        self, names: list[str], read: Read, dtype: torch.dtype | None, *, is_averaged: bool
    ) -> None:
        self.names = names
        self.read = read
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
        self.value = local.detach().to(dtype if dtype and floating else local.dtype, copy=True)

    def current(self, converted: bool = False) -> torch.Tensor:
        """Returns this rank's part of the model's tensor as it is now, without a copy.

        StateError if its shape has changed, or, unless ``converted``, its dtype or device.
        """
        tensor = self.read()
        kind = _kind_of(tensor)
        if kind != self._kind and not (converted and kind[:2] == self._kind[:2]):
            raise StateError(
                f"EMA: {self.names[0]} was {_shown(self._kind)} and is {_shown(kind)} now; "
                "shard or convert the model first, and then make the EMA"
            )
        return local_of(tensor)


_Kind = tuple[torch.Size, bool, torch.dtype, torch.device]


def _kind_of(tensor: torch.Tensor) -> _Kind:
    local = local_of(tensor)
    return tensor.shape, isinstance(tensor, DTensor), local.dtype, local.device


def _shown(kind: _Kind) -> str:
    shape, sharded, dtype, device = kind
    return f"{'a DTensor of ' if sharded else ''}{dtype} {tuple(shape)} on {device}"


class EMA:
    """The average ``decay * average + (1 - decay) * weight`` of each weight; it begins with the weights.

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
        model: any module, sharded or not, that is not on meta. Parallelize it first.
        decay: in [0, 1]; or a function of the number of earlier updates, such as
            ``lambda n: min(0.999, (1 + n) / (10 + n))``.
        dtype: dtype of the averages of floating-point tensors; by default that of the tensor. Use float32
            for bfloat16 weights, where a small ``1 - decay`` would round to no change.
        average_buffers: whether floating-point buffers are averaged; by default they are copied at each
            update, as other buffers always are. Non-persistent buffers are left alone.

    Raises:
        Parallel3dError: ``decay`` or ``dtype`` is invalid, ``model`` is no module, or it is on meta.

    Attributes:
        updates: number of updates so far.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        dtype: torch.dtype | None = None,
        average_buffers: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise Parallel3dError(f"EMA was given a {type(model).__name__}; it needs a module")
        if not callable(decay):
            _check_decay(decay)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise Parallel3dError(f"dtype is {dtype!r}; it must be of floating point, or None")
        refuse_torch_units(model, "EMA")
        self._decay = decay
        self._model = model
        self.updates = 0
        self._swapped = False
        for unit in units_of(model, recurse=True):
            check_at_rest(unit, "EMA")
            unit.show_shards()
        self._all = [
            Averaged(names, read, dtype, is_averaged=is_param or average_buffers)
            for names, read, is_param in tensors_of(model)
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Adds the model's present weights to the average. Call it after each optimizer step.

        Raises:
            StateError: within ``swapped``; or a weight has changed its shape, dtype or device.
            Parallel3dError: ``decay`` returned no number in [0, 1].
        """
        self._check_not_swapped("update")
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        _check_decay(decay)
        pairs = [(averaged, averaged.current()) for averaged in self._all]
        self.updates += 1
        by_kind: defaultdict[Any, tuple[list, list]] = defaultdict(lambda: ([], []))
        for averaged, weight in pairs:
            if not averaged.is_averaged:
                averaged.value.copy_(weight)
            elif averaged.value.dtype == weight.dtype:
                values, weights = by_kind[weight.dtype, weight.device]
                values.append(averaged.value)
                weights.append(weight)
            else:  # one cast copy at a time
                averaged.value.lerp_(weight.to(averaged.value.dtype), 1.0 - decay)
        for values, weights in by_kind.values():
            foreach_lerp_(values, weights, 1.0 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Gives the model the average in the body, and its own weights again afterwards.

        Values that the body writes to the weights are dropped; a dtype it converts them to stays. Parameters
        stay the same objects. Units that stay unsharded (``reshard_after_forward=False``, ``unshard()``)
        are gathered again in their next forward. Run a forward and its backward on the same side of the
        context: backward gathers the weights of that moment.

        Raises:
            StateError: within itself, or within a forward or backward.
        """
        self._check_not_swapped("swapped")
        for unit in units_of(self._model, recurse=True):
            check_at_rest(unit, "swapped")
        with torch.no_grad():
            saved = [weight.clone() for weight in [each.current() for each in self._all]]
        self._swapped = True
        try:
            self._write([averaged.value for averaged in self._all])
            yield
        finally:
            self._swapped = False
            self._write(saved, converted=True)

    def _write(self, values: Sequence[torch.Tensor], converted: bool = False) -> None:
        """Writes ``values`` (local tensors) into the model, so that units which are unsharded count as stale.
        ``converted``: the model's dtype or device may have changed."""
        # Also where the body is in inference mode, in which writes don't count as versions.
        with torch.inference_mode(False), torch.no_grad():
            targets = [averaged.current(converted) for averaged in self._all]
            if targets:
                foreach_copy_(targets, list(values))
                increment_version(targets)

    def state_dict(self) -> dict[str, Any]:
        """Returns ``{"average": {name: tensor}, "updates": number}`` under the model's names.

        Averages of DTensors are DTensors with the same placements, and share memory with this object.
        ``model.load_state_dict(ema.state_dict()["average"])`` makes the average the model's weights.
        """
        placed = [placed_as(averaged.read(), averaged.value) for averaged in self._all]
        average = {n: t for a, t in zip(self._all, placed, strict=True) for n in a.names}
        return {"average": average, "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` returned, here or on another mesh.

        DTensors must be on the model's mesh (``torch.distributed.checkpoint`` loads into what ``state_dict``
        returns), and communicate if their placements differ; of whole tensors each rank takes its part.

        Raises:
            Parallel3dError: names are missing or unexpected, or shapes differ. Nothing is loaded then.
            StateError: within ``swapped``.
        """
        self._check_not_swapped("load_state_dict")
        average = state_dict.get("average") if isinstance(state_dict, dict) else None
        if not isinstance(average, dict) or "updates" not in state_dict:
            raise Parallel3dError(
                'load_state_dict: the state must be {"average": {name: tensor}, "updates": number}, as '
                "state_dict() returns it; load a model's own state dict into the model and make a new EMA"
            )
        try:
            updates = int(state_dict["updates"])
        except (TypeError, ValueError) as error:
            raise Parallel3dError(
                f"load_state_dict: updates is {state_dict['updates']!r}; it must be a number of updates"
            ) from error
        by_name = {name: averaged for averaged in self._all for name in averaged.names}
        wrong = sorted(by_name.keys() ^ average.keys())
        if wrong:
            problem = "is missing" if wrong[0] in by_name else "is not in the model"
            raise Parallel3dError(
                f"load_state_dict: {wrong[0]} {problem} ({counted(len(wrong), 'name')} in all); "
                "give what state_dict() of an EMA of this model returned"
            )
        for name, averaged in by_name.items():
            value = average[name]
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise Parallel3dError(f"load_state_dict: {name} is a {kind}, not a tensor")
            if value.shape != averaged.shape:
                raise Parallel3dError(
                    f"load_state_dict: {name} has shape {tuple(value.shape)}; it must have that of the "
                    f"model's, {tuple(averaged.shape)}"
                )
        for averaged in self._all:
            averaged.value.copy_(part_of(averaged.read(), average[averaged.names[0]]))
        self.updates = updates

    def _check_not_swapped(self, what: str) -> None:
        if self._swapped:
            raise StateError(
                f"EMA: {what} was called within swapped(), where the model holds the average; "
                "leave the context first"
            )


def _check_decay(decay: Any) -> None:
    number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
    if not number or not 0.0 <= decay <= 1.0:
        raise Parallel3dError(
            f"decay is {decay!r}; it must be a number from 0 to 1, or a function of the number of updates "
            "that returns one"
        )
