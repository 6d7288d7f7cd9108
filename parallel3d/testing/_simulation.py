"""How simulated ranks run an operation: torch's ``LocalTensorMode``, stricter and several times quicker.

torch flattens every argument list, saves and restores the generators' states for each rank, gives
views the storage of their base (which asks Python for sizes three times) and keeps sizes in Python.
Nothing of that changes what an ordinary operation computes, so those go a short way here; random
numbers, collectives and whatever else is special go torch's.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallel3d._compat import OpOverload, untraced
from parallel3d._compat_simulated import (
    LocalTensor,
    LocalTensorMode,
    make_simulated,
    simulation_paused,
    update_sizes,
    value_on_rank,
)
from parallel3d._recorder import collective_signature
from parallel3d.errors import StateError

__all__ = ["SimulationMode"]

_SIZES = (torch.ops.aten.sym_size.default, torch.ops.aten.size.default)


class SimulationMode(LocalTensorMode):
    """torch's mode, quick, and with an error where it would compute nothing."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._order = tuple(sorted(self.ranks))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's way of skipping wraps each call; untraced, below, does not

    @untraced
    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if LocalTensor not in types:
            if simulation_paused(self):
                return func(*args, **kwargs)
            _check_not_plain(func, types)
        if DTensor in types:
            return NotImplemented  # DTensor's own turn, which comes back with local tensors
        if any(kind is not LocalTensor for kind in types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if types and func in _SIZES:
            return tuple(args[0]._size)
        if types and func is torch.ops.aten.dim.default:
            return len(args[0]._size)
        # Plain tensors stay plain; but a mesh's coordinates, which it computes, are each rank's own.
        if (
            not types
            and func.namespace != "device_mesh"
            and _hold_tensors((args, *kwargs.values()))
        ):
            return func(*args, **kwargs)
        if _is_ordinary(func):
            return self._on_each_rank(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if _changes_sizes(func):
            update_sizes(args[0], func, args, kwargs)
        return result

    def rank_map(self, cb: Any) -> Any:
        with self.disable():
            return make_simulated({rank: cb(rank) for rank in self._order}, self.ranks)

    def _on_each_rank(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func`` rank by rank."""
        results = {}
        for rank in self._order:
            on_rank = [value_on_rank(a, rank) for a in args]
            named = {name: value_on_rank(a, rank) for name, a in kwargs.items()}
            results[rank] = func(*on_rank, **named)
        if func._schema.name[-1] == "_" and func._schema.returns:
            return args[0]  # in place
        first = results[self._order[0]]
        if isinstance(first, list) and any(len(r) != len(first) for r in results.values()):
            return super().__torch_dispatch__(func, (LocalTensor,), args, kwargs)  # pads the list
        return self._join(results)

    def _join(self, results: dict[int, Any]) -> Any:
        """One value from those of all ranks: tensors, lists of tensors, or None."""
        first = results[self._order[0]]
        if isinstance(first, torch.Tensor):
            return make_simulated(results, self.ranks)
        if first is None:
            return None
        columns = [
            self._join({rank: values[i] for rank, values in results.items()})
            for i in range(len(first))
        ]
        return type(first)(columns)


@functools.cache
def _is_ordinary(func: Any) -> bool:
    """Whether ``func`` on all ranks is just ``func`` on each: tensors in, tensors out."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    schema = func._schema
    special = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(func.tags)
    if special or schema.name in _SPECIAL or any(a.is_out for a in schema.arguments):
        return False
    if schema.name[-1] == "_" and schema.returns and not schema.arguments[0].is_write:
        return False
    return all(str(value.type) in _TENSORS for value in schema.returns)


# hash_tensor has torch's own case for empty tensors.
_SPECIAL = frozenset({"aten::hash_tensor"})
_TENSORS = frozenset({"Tensor", "Optional[Tensor]", "List[Tensor]"})


@functools.cache
def _changes_sizes(func: Any) -> bool:
    return isinstance(func, OpOverload) and torch.Tag.inplace_view in func.tags


def _hold_tensors(values: Sequence[Any]) -> bool:
    """Whether a tensor is among ``values``, or in a list among them."""
    return any(
        _hold_tensors(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, torch.Tensor)
        for value in values
    )


def _check_not_plain(func: Any, types: Sequence[Any]) -> None:
    """A collective whose tensors are all plain would go to the fake group: a silent no-op.

    Which is right for a barrier and for a broadcast of what is the same on all ranks.
    """
    signature = None if types else collective_signature(func)
    if signature is not None and signature.op not in ("barrier", "broadcast"):
        raise StateError(
            f"{signature.op} on a plain tensor: simulated ranks communicate only tensors made "
            "inside local_world by a factory call, by an operation on such a tensor, or by "
            "LocalWorld.map (under paused() nothing is checked)"
        )
