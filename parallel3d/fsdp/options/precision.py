"""Mixed precision's options: full precision in eval mode, modules that keep their precision, cast buffers.

With ``full_precision_in_eval`` a bucket computes in one of two dtypes. Once it has been in both, it has
buffers and unsharded parameters for both; those that it does not use have no storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from parallel3d._util.forwards import as_if, wrap_forward
from parallel3d._util.trees import map_tensors
from parallel3d.errors import StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.comm import Comm
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.group import ParamGroup, Retain
from parallel3d.fsdp.members import units_modules
from parallel3d.fsdp.unit import BackwardPass, Call, Observer, Unit


def switch_precision(bucket: Bucket, full: bool) -> None:
    """Lets ``bucket``, which is sharded, compute in its parameters' own dtype, or in the policy's again."""
    if bucket.own_dtype is full:
        return
    bucket.leave_precision()
    bucket.own_dtype = full
    before = {name: getattr(bucket, name) for name in bucket.by_precision}
    # Also during inference: tensors made in inference mode could not be trained with later.
    with torch.inference_mode(False), torch.no_grad():
        if bucket.other_precision is not None:
            vars(bucket).update(bucket.other_precision)
            bucket.enter_precision()
        else:
            bucket.set_dtypes()
            if bucket.compute_dtype != before["compute_dtype"]:
                bucket.post_forward = None
                bucket.build_unsharded()
    bucket.other_precision = before


def use_precision(group: ParamGroup, own: bool, comm: Comm) -> None:
    """Lets ``group`` compute in the parameters' own dtype, or in the policy's again."""
    if own is group.own_dtype:
        return
    retain = group.retain
    group.register_sharded()
    group.reshard(comm)
    for bucket in group.buckets:
        switch_precision(bucket, own)
    group.own_dtype = own
    group.refresh()
    if retain is Retain.USER:
        group.retain = retain


class FollowMode(Observer):
    """A unit in eval mode computes in its parameters' own dtype."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Call, bool] = weakref.WeakKeyDictionary()

    def prepare(self, unit: Unit, context: RunContext) -> None:
        """Full precision if the unit's modules are in eval mode."""
        # What is recomputed within the unit's own backward is in the precision that this has.
        if not unit.backward_begun:
            own = not any(module.training for module in unit.modules)
            use_precision(unit.group, own, context.comm)

    def note_call(self, call: Call) -> None:
        """Notes which precision it has."""
        self._calls[call] = call.unit.group.own_dtype

    def reach_call(self, call: Call, context: RunContext) -> None:
        """Its backward is in the same."""
        own = self._calls[call]
        if own is not call.unit.group.own_dtype:
            go_back_to(call.unit, call, own, context)


def set_up_precision(unit: Unit) -> None:
    """What the policy of ``unit``, which is new, asks for beside its buckets' dtypes."""
    policy = unit.policy
    if policy.full_precision_in_eval:
        unit.observers.append(FollowMode())
    if policy.buffer_dtype is not None:
        unit.group.beside.append(
            BufferCasts(outside_full(unit.modules, policy), policy.buffer_dtype)
        )


def go_back_to(unit: Unit, call: Call, own: bool, context: RunContext) -> None:
    """Before the backward of a ``call`` in another precision than that of the unit's last forward.

    Where one backward comes to both, it comes to the later call first, and is through with it when all
    gradients have arrived.

    Raises:
        StateError: it is not, or a forward of the unit is under way.
    """
    backward = unit.backward
    if backward is not None and backward.has_begun and backward.arrived >= unit.group.trainable:
        unit.finish_backward(context)
        unit.backward = BackwardPass(calls={id(call)})
    if unit.backward_begun or unit.depth:
        raise StateError(
            f"unit {unit.label} has full_precision_in_eval, and one backward came to a forward in train mode "
            "and to one in eval mode before either was over; call backward for each on its own"
        )
    use_precision(unit.group, own, context.comm)


# Modules that keep their own precision within a unit of a lower one: ``full_precision_modules``.

_KEY = "full_precision"  # of the wrapped forward


def kept_in_full(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> set[int]:
    """Ids of the modules of one unit that ``policy`` keeps in full precision, and of all inside them.

    Args:
        modules: those given to ``fully_shard``.
    """
    classes = policy.full_precision_modules
    return {
        id(inner)
        for module in units_modules(modules)
        if isinstance(module, classes)
        for inner in units_modules([module])
    }


def outside_full(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> Iterator[nn.Module]:
    """The other modules of the unit."""
    kept = kept_in_full(modules, policy)
    return (module for module in units_modules(modules) if id(module) not in kept)


def cast_around(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> None:
    """Lets the unit's full-precision modules cast what comes in, and back what goes out."""
    if policy.param_dtype is None:
        return
    for module in units_modules(modules):
        if isinstance(module, policy.full_precision_modules):
            wrap_forward(module, _in_own_precision, _KEY)


def _in_own_precision(inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = _dtype_of(self)
        before: torch.dtype | None = None

        def cast_in(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal before
            wanted = own or torch.promote_types(tensor.dtype, torch.float32)
            if not tensor.is_floating_point() or tensor.dtype == wanted:
                return tensor
            before = before or tensor.dtype
            return tensor.to(wanted)

        # One by one: torch.compile can't trace what compares the tuple of all.
        args = tuple(map_tensors(cast_in, each) for each in args)
        kwargs = {key: map_tensors(cast_in, each) for key, each in kwargs.items()}
        output = inner(self, *args, **kwargs)
        if before is None:
            return output
        dtype = before
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    return as_if(forward, inner)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """What the module computes in: the dtype of its first parameter or buffer with numbers in it."""
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return None


# BufferCasts: a unit's floating-point buffers in another dtype during its forwards and backwards.
#
# At rest each module has its own buffer. While the unit's parameters are shown it has a cast copy
# instead, and what was written into the copy meanwhile is written back when they are hidden. A
# copy is kept as long as the buffer's version counter stands still; modules that hold one buffer
# share one copy.

# F.batch_norm writes them behind the version counter's back.
_WRITTEN_UNSEEN = ("running_mean", "running_var")


class _Cast:
    """A copy of one buffer.

    Attributes:
        copy: the buffer in another dtype.
        of_version: the buffer's version that it holds; None where it is to be made anew.
        version: its own version since.
    """

    __slots__ = ("copy", "of_version", "version")

    def __init__(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        # Not in inference mode: a copy made there could not be trained with later.
        with torch.inference_mode(False), torch.no_grad():
            self.copy = buffer.to(dtype)
        self.note(buffer)

    def note(self, buffer: torch.Tensor) -> None:
        """The two hold the same."""
        self.of_version = _version(buffer)
        self.version = self.copy._version

    def is_of(self, buffer: torch.Tensor) -> bool:
        """Whether it is still ``buffer``'s copy."""
        version = self.of_version
        return (
            version is not None
            and version == _version(buffer)
            and self.copy.device == buffer.device
            and self.copy.shape == buffer.shape
        )


class _Place:
    """One name in a module, where a copy stands for its buffer.

    Attributes:
        units: how many have put it there: a module without parameters may be of several.
    """

    __slots__ = ("buffer", "cast", "units")

    def __init__(self, buffer: torch.Tensor, cast: _Cast) -> None:
        self.buffer, self.cast, self.units = buffer, cast, 0


_casts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # buffer -> dtype -> _Cast
_places: weakref.WeakKeyDictionary[nn.Module, dict[str, _Place]] = weakref.WeakKeyDictionary()


class BufferCasts:
    """Registers cast copies of a unit's buffers together with its unsharded parameters.

    Args:
        modules: the unit's, those of inner units left out.
        dtype: what their floating-point buffers are cast to.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._dtype = dtype
        self._shown: list[tuple[weakref.ref[nn.Module], str, _Place]] = []

    def register(self, group: ParamGroup) -> None:
        """Puts the copies into the modules, unless the group computes in its own dtype."""
        for ref in () if group.own_dtype else self._modules:
            module = ref()
            if module is None or not module._buffers:
                continue
            places = _places.setdefault(module, {})
            for name, buffer in list(module._buffers.items()):
                place = places.get(name)
                if place is None or buffer is not place.cast.copy:
                    if buffer is None or not self._concerns(buffer):
                        continue
                    place = places[name] = _Place(buffer, _cast_of(buffer, self._dtype))
                    module._buffers[name] = place.cast.copy
                place.units += 1
                self._shown.append((ref, name, place))

    def _concerns(self, buffer: torch.Tensor) -> bool:
        return buffer.is_floating_point() and buffer.dtype != self._dtype

    def unregister(self) -> None:
        """Puts the buffers back, with what was written into the copies."""
        shown, self._shown = self._shown, []
        for ref, name, place in shown:
            place.units -= 1
            module = ref()
            if module is None or place.units or _places[module].get(name) is not place:
                continue
            del _places[module][name]
            if name in module._buffers:  # not deleted meanwhile
                _put_back(module, name, place)


def _put_back(module: nn.Module, name: str, place: _Place) -> None:
    current, buffer = module._buffers[name], place.buffer
    if current is place.cast.copy:
        _write_back(module, name, buffer, place.cast)
        module._buffers[name] = buffer
    elif current is not None and current.is_floating_point():
        module._buffers[name] = current.to(buffer.dtype)  # another tensor was assigned


def _cast_of(buffer: torch.Tensor, dtype: torch.dtype) -> _Cast:
    by_dtype = _casts.setdefault(buffer, {})
    cast = by_dtype.get(dtype)
    if cast is None or not cast.is_of(buffer):
        cast = by_dtype[dtype] = _Cast(buffer, dtype)
    return cast


def _write_back(module: nn.Module, name: str, buffer: torch.Tensor, cast: _Cast) -> None:
    unseen = module.training and name in _WRITTEN_UNSEEN
    if cast.copy._version == cast.version and not unseen:
        return
    with torch.no_grad():
        if cast.copy._version == cast.version:
            # Maybe nothing was: what has not changed keeps the digits that the copy lacks.
            same = cast.copy == buffer.to(cast.copy.dtype)
            buffer.copy_(torch.where(same, buffer, cast.copy.to(buffer.dtype)))
        else:
            buffer.copy_(cast.copy)
    cast.note(buffer)
    if torch.promote_types(buffer.dtype, cast.copy.dtype) != buffer.dtype:
        cast.of_version = None  # the buffer has been rounded: what comes next begins with that


def _version(buffer: torch.Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version
