"""FSDPModule: the methods a module gains from ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from parallel3d.errors import Parallel3dError, StateError
from parallel3d.fsdp.state import Unit, unit_of

__all__ = ["FSDPModule", "UnshardHandle"]


class UnshardHandle:
    """An ``unshard(async_op=True)`` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Waits until the unsharded parameters are in the module. Further calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.group.unshard(unit.ready_context().comm)
            unit.group.show()


class FSDPModule:
    """Mixed into the class of every module that ``fully_shard`` was applied to."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gathers this unit's parameters and puts them into the module. Not recursive.

        Args:
            async_op: return a handle at once; ``wait()`` on it before the parameters are used.
        """
        unit = _unit(self)
        unit.group.kept = True
        unit.group.issue_unshard(unit.ready_context().comm)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Puts this unit's sharded Parameters back and frees the unsharded ones. Not recursive."""
        unit = _unit(self)
        unit.group.hide()
        unit.group.reshard(unit.ready_context().comm)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients at all.

        With False a rank's own sum waits in ``.grad`` (a DTensor with ``Partial()`` placements) for the next
        backward with True; ``zero_grad()`` clears it.
        """
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        for unit in _units(self, recurse):
            unit.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces over the replicate axis (HSDP).

        With False gradients are reduce-scattered over shard, and wait in ``.grad`` with ``Partial()`` on
        replicate for the next backward with True.
        """
        _check_bool("requires_all_reduce", requires_all_reduce)
        for unit in _units(self, recurse):
            unit.all_reduce = requires_all_reduce

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this unit's parameters; False where it doesn't read them."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        _unit(self).unshard_in_backward = unshard_in_backward

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, also after a backward that an exception ended."""
        _unit(self).come_to_rest()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.state_dict``: the sharded parameters, under the plain model's names."""
        _unit(self).come_to_rest()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.load_state_dict``; with ``assign=True`` too the Parameters stay the same objects."""
        _unit(self).come_to_rest()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refused: a copy would share process groups and hooks with this one.

        Raises:
            StateError: always.
        """
        raise StateError(
            f"{type(self).__name__} can't be deep-copied; copy the plain model before parallelize, or "
            "build another one and load this one's state_dict()"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """``to``, ``double``, ``to_empty`` and the like: the new values move into the buckets."""
        unit = _unit(self)
        unit.group.hide()
        unit.group.reshard(unit.ready_context().comm)
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        unit.group.adopt()
        return result


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise Parallel3dError(f"{name} is {value!r}; it must be True or False")


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit


def _units(module: Any, recurse: bool) -> Iterator[Unit]:
    modules: Iterator[nn.Module] = module.modules() if recurse else iter([module])
    seen: set[int] = set()
    for each in modules:
        unit = unit_of(each)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit
