"""Options of MixedPrecisionPolicy: full precision in eval mode, modules in full precision, cast buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from parallel3d._torch.saved import WRITTEN_WITHOUT_VERSION
from parallel3d._util.forwards import as_if, wrap_forward
from parallel3d._util.trees import map_tensors
from parallel3d.errors import StateError
from parallel3d.fsdp.api import MixedPrecisionPolicy
from parallel3d.fsdp.bucket import Bucket
from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.events import Option
from parallel3d.fsdp.group import ParamGroup, Retain
from parallel3d.fsdp.members import units_modules, units_of
from parallel3d.fsdp.reduction import Comm
from parallel3d.fsdp.unit import BackwardPass, Call, Unit

# ``full_precision_in_eval``: a bucket computes in one of two dtypes. Once it has used both, it has buffers
# and unsharded parameters for both; those that are not in use have no storage.


def _switch_bucket(bucket: Bucket, own: bool) -> None:
    before, other = bucket.precision, bucket.other_precision
    if before.own is own:
        return
    bucket.leave_precision()
    # Not in inference mode: tensors made there could not be trained with later.
    with torch.inference_mode(False), torch.no_grad():
        if other is not None:
            bucket.precision = other
            bucket.enter_precision()
        else:
            bucket.set_precision(own=own)
            if bucket.precision.compute_dtype != before.compute_dtype:
                bucket.build_unsharded()
            else:
                bucket.precision = before.with_dtypes_of(bucket.precision)
    bucket.other_precision = before


def _switch_group(group: ParamGroup, own: bool, comm: Comm) -> None:
    """Makes ``group`` compute in its parameters' own dtypes (``own``) or in the policy's; reshards it."""
    if own is group.own_dtype:
        return
    retain = group.retain
    group.register_sharded()
    group.reshard(comm)
    for bucket in group.buckets:
        _switch_bucket(bucket, own)
    group.own_dtype = own
    group.refresh()
    if retain is Retain.USER:
        group.retain = retain


class FollowMode(Option):
    """Switches a unit to its parameters' own dtypes when its modules are in eval mode, and back."""

    def __init__(self) -> None:
        self._calls: weakref.WeakKeyDictionary[Call, bool] = weakref.WeakKeyDictionary()

    def prepare(self, unit: Unit, context: RunContext) -> None:
        # A recomputation within the unit's backward keeps the precision.
        if not unit.backward_begun:
            own = not any(module.training for module in unit.modules)
            _switch_group(unit.group, own, context.comm)

    def note_call(self, call: Call) -> None:
        self._calls[call] = call.unit.group.own_dtype

    def reach_call(self, call: Call, context: RunContext) -> None:
        """Switches to the dtypes that the forward ``call`` used, if a later forward has used others.

        A backward through both forwards reaches the later one first; that part of it must be over.

        Raises:
            StateError: that part is not over, or a forward of the unit is running.
        """
        unit, own = call.unit, self._calls[call]
        if own is unit.group.own_dtype:
            return
        backward = unit.backward
        if backward is not None and backward.has_begun and backward.arrived >= unit.group.trainable:
            unit.finish_backward(context)
            unit.backward = BackwardPass(calls={id(call)})
        if unit.backward_begun or unit.depth:
            raise StateError(
                f"unit {unit.label} has full_precision_in_eval, and one backward runs through a forward in "
                "train mode and one in eval mode; call backward for each on its own"
            )
        _switch_group(unit.group, own, context.comm)


def set_up_precision(unit: Unit) -> None:
    """Adds the options that the policy of ``unit`` asks for, when the unit is made."""
    policy = unit.policy
    if policy.full_precision_in_eval:
        unit.options.append(FollowMode())
    if policy.buffer_dtype is not None:
        kept = kept_in_full(unit.modules, policy)
        modules = [module for module in units_modules(unit.modules) if id(module) not in kept]
        unit.group.beside.append(BufferCasts(modules, policy.buffer_dtype))


# ``full_precision_modules``: modules that keep their own precision in a unit of a lower one.


def kept_in_full(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> set[int]:
    """Returns the ids of modules in the unit that are, or are inside, ``full_precision_modules``."""
    classes = policy.full_precision_modules
    full = [module for module in units_modules(modules) if isinstance(module, classes)]
    return {id(inner) for module in full for inner in units_modules([module])}


def cast_around(modules: Sequence[nn.Module], policy: MixedPrecisionPolicy) -> None:
    """Makes the unit's full-precision modules cast their inputs to their own dtype and outputs back."""
    if policy.param_dtype is None:
        return
    for module in units_modules(modules):
        if isinstance(module, policy.full_precision_modules):
            wrap_forward(module, _in_own_precision, "full_precision")


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

        # One by one: torch.compile can't trace the comparison of all as one tuple.
        args = tuple(map_tensors(cast_in, arg) for arg in args)
        kwargs = {key: map_tensors(cast_in, arg) for key, arg in kwargs.items()}
        output = inner(self, *args, **kwargs)
        if before is None:
            return output
        dtype = before
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    return as_if(forward, inner)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return None


# ``buffer_dtype``: while a unit's unsharded parameters are registered, cast copies of its floating-point
# buffers are registered too. What was written to a copy is written back to the buffer when they are
# unregistered. A copy is reused while the buffer's version counter doesn't change; modules that share a
# buffer share its copy.


def buffer_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """Returns {id of a module: dtype in which forward sees its buffers}, if that is not their own."""
    found: dict[int, torch.dtype] = {}
    for unit in units_of(model, recurse=True):
        if model.training or not unit.policy.full_precision_in_eval:
            for beside in unit.group.beside:
                found |= beside.dtypes if isinstance(beside, BufferCasts) else {}
    return found


class _Cast:
    """A copy of one buffer in another dtype.

    Attributes:
        of_version: version counter of the buffer when both last had the same values; None: make it again.
        version: version counter of the copy at that time.
    """

    __slots__ = ("copy", "of_version", "version")

    def __init__(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.copy = buffer.to(dtype)
        self.note(buffer)

    def note(self, buffer: torch.Tensor) -> None:
        """Records the version counters when copy and ``buffer`` have the same values."""
        self.of_version = _version(buffer)
        self.version = self.copy._version

    def is_of(self, buffer: torch.Tensor) -> bool:
        return (
            self.of_version is not None
            and self.of_version == _version(buffer)
            and self.copy.device == buffer.device
            and self.copy.shape == buffer.shape
        )

    def write_back(self, buffer: torch.Tensor, *, unnoticed: bool) -> None:
        """Copies to ``buffer`` what forward has written to the copy. ``unnoticed``: it may have been written
        without an increment of its version counter."""
        written = self.copy._version != self.version
        if not written and not unnoticed:
            return
        with torch.no_grad():
            if written:
                buffer.copy_(self.copy)
            else:  # unchanged values keep the digits that the copy lacks
                same = self.copy == buffer.to(self.copy.dtype)
                buffer.copy_(torch.where(same, buffer, self.copy.to(buffer.dtype)))
        self.note(buffer)
        if torch.promote_types(buffer.dtype, self.copy.dtype) != buffer.dtype:
            self.of_version = None  # the buffer was rounded, so the copy may differ from it


@dataclass(eq=False, slots=True)
class _Place:
    """One buffer attribute of a module, where a cast copy is registered instead of the buffer."""

    buffer: torch.Tensor
    cast: _Cast
    units: int = 0  # that have registered it: a module without parameters may be in several


_casts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # buffer -> dtype -> _Cast
_places: weakref.WeakKeyDictionary[nn.Module, dict[str, _Place]] = weakref.WeakKeyDictionary()


class BufferCasts:
    """While a group's unsharded parameters are registered, registers copies in ``dtype`` of the
    floating-point buffers of ``modules``."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._dtype = dtype
        self._registered: list[tuple[weakref.ref[nn.Module], str, _Place]] = []

    @property
    def dtypes(self) -> dict[int, torch.dtype]:
        modules = (reference() for reference in self._modules)
        return {id(module): self._dtype for module in modules if module is not None}

    def register(self, group: ParamGroup) -> None:
        """Registers the copies, unless the group computes in its own dtype."""
        for ref in () if group.own_dtype else self._modules:
            module = ref()
            if module is None or not module._buffers:
                continue
            places = _places.setdefault(module, {})
            for name, buffer in list(module._buffers.items()):
                place = places.get(name)
                if place is None or buffer is not place.cast.copy:
                    if buffer is None or not buffer.is_floating_point():
                        continue
                    if buffer.dtype == self._dtype:
                        continue
                    by_dtype = _casts.setdefault(buffer, {})
                    cast = by_dtype.get(self._dtype)
                    if cast is None or not cast.is_of(buffer):
                        cast = by_dtype[self._dtype] = _Cast(buffer, self._dtype)
                    place = places[name] = _Place(buffer, cast)
                    module._buffers[name] = cast.copy
                place.units += 1
                self._registered.append((ref, name, place))

    def unregister(self) -> None:
        """Registers the buffers again, with what was written to the copies."""
        registered, self._registered = self._registered, []
        for ref, name, place in registered:
            place.units -= 1
            module = ref()
            if module is None or place.units or _places[module].get(name) is not place:
                continue
            del _places[module][name]
            current = module._buffers.get(name)  # None if deleted meanwhile
            if current is place.cast.copy:
                unnoticed = module.training and name in WRITTEN_WITHOUT_VERSION
                place.cast.write_back(place.buffer, unnoticed=unnoticed)
                module._buffers[name] = place.buffer
            elif current is not None and current.is_floating_point():  # assigned meanwhile
                module._buffers[name] = current.to(place.buffer.dtype)


def _version(buffer: torch.Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version
