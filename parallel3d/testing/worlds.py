"""Worlds of many ranks in one process.

``fake_world`` plays one rank of a world whose collectives do nothing: shapes, placements and the
list of collectives are real, numbers are not. ``local_world`` plays all ranks at once, with real
numbers. Both destroy their process group on exit, also when the body raises.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import untraced
from parallel3d._torch.dtensor import OpOverload, clear_dtensor_caches, get_local_tensor
from parallel3d._torch.fake import fake_outputs_written, init_fake_group
from parallel3d._torch.simulated import (
    LocalTensor,
    LocalTensorMode,
    inner_tensors,
    make_simulated,
    simulation_paused,
    uneven_matmuls,
    update_sizes,
    value_on_rank,
)
from parallel3d._util.recorder import active_recorders, collective_signature
from parallel3d.errors import MeshError, StateError

# How simulated ranks run an operation: torch's ``LocalTensorMode``, stricter and several times
# quicker.
#
# torch flattens every argument list, saves and restores the generators' states for each rank,
# gives views the storage of their base (which asks Python for sizes three times) and keeps sizes
# in Python. Nothing of that changes what an ordinary operation computes, so those go a short way
# here; random numbers, collectives and whatever else is special go torch's.

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


@dataclass(frozen=True)
class FakeWorld:
    """What ``fake_world`` yields: this process's ``rank`` and the world's ``size``."""

    rank: int
    size: int


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[FakeWorld]:
    """This process becomes rank ``rank`` of ``world_size`` on torch's fake process group.

    Collectives return at once and leave their outputs as they were, so a world of thousands of
    ranks costs nothing: use it for shapes, placements and counts, not for numbers.

    Args:
        rank: this process's global rank, ``0 <= rank < world_size``.
        world_size: number of ranks, at least 1.

    Raises:
        MeshError: ``rank`` or ``world_size`` out of range.
        StateError: a default process group is already initialised.
    """
    check_rank(rank, world_size)
    check_no_group("fake_world")
    init_fake_group(rank, world_size)
    try:
        with fake_outputs_written():
            yield FakeWorld(rank, world_size)
    finally:
        destroy_group()


class LocalWorld:
    """Simulated ranks, as ``local_world`` yields them.

    Attributes:
        size: number of simulated ranks.
    """

    def __init__(self, size: int, mode: LocalTensorMode) -> None:
        self.size = size
        self._mode = mode

    def map(self, fn: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """A tensor that is ``fn(rank)`` on each rank: per-rank inputs or parameters.

        Sizes may differ by rank; dtype, device and number of dims may not. ``fn`` runs with the
        simulation paused, so the tensors it makes are plain. The result is a leaf without
        gradient; call ``requires_grad_()`` on it if it needs one.

        Raises:
            StateError: ``fn`` returned something other than a plain tensor.
        """

        def plain(rank: int) -> torch.Tensor:
            tensor = fn(rank)
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, LocalTensor | DTensor):
                raise StateError(
                    f"map: fn({rank}) returned a {type(tensor).__name__}; "
                    "it must return a plain torch.Tensor"
                )
            return tensor.detach()

        return self._mode.rank_map(plain)

    def per_rank(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What each rank holds of ``tensor``, by rank; of a DTensor its local tensors.

        A plain tensor is the same on every rank and is repeated. Not copies: writing to one
        changes that rank's tensor.
        """
        if isinstance(tensor, DTensor):
            tensor = get_local_tensor(tensor)
        inner = list(inner_tensors(tensor))
        return inner if isinstance(tensor, LocalTensor) else inner * self.size

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the simulation, so that a plain model is built and runs quickly."""
        with self._mode.disable():
            yield

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Within ``paused()``: the simulation on again for a while."""
        self._mode.enable_()
        try:
            yield
        finally:
            self._mode.disable_()


@contextmanager
def local_world(n: int) -> Iterator[LocalWorld]:
    """``n`` simulated ranks with real numbers, all in this process.

    Inside, tensors made by factory calls (``torch.zeros``, ``torch.empty``) hold one tensor per
    rank, ``dist`` collectives exchange real values, and a mesh's ``get_local_rank`` is symbolic;
    tensors made outside stay plain. Build the plain model outside, or under ``paused()``.

    Args:
        n: number of ranks, at least 1.

    Raises:
        MeshError: ``n`` is not a positive integer.
        StateError: a default process group is already initialised; in the body, a collective on
            a plain tensor, which would silently do nothing.
    """
    _check_size("n", n)
    check_no_group("local_world")
    if active_recorders:
        raise StateError(
            f"local_world({n}) was entered inside record_collectives(), which would then see no "
            "collective: enter record_collectives() inside local_world()"
        )
    init_fake_group(0, n)
    try:
        with uneven_matmuls(), SimulationMode(n) as mode:
            yield LocalWorld(n, mode)
    finally:
        destroy_group()


def destroy_group() -> None:
    """Ends the default process group, and what torch remembers of its meshes."""
    # The body may have destroyed it already, which is no reason to hide the body's own error.
    if dist.is_initialized():
        dist.destroy_process_group()
    clear_dtensor_caches()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_size(name: str, value: object) -> None:
    if not _is_int(value) or value < 1:  # type: ignore[operator]
        raise MeshError(f"{name}={value!r}: a world has a positive integer number of ranks")


def check_rank(rank: object, world_size: object) -> None:
    """Raises MeshError unless ``rank`` is one of a world of ``world_size``."""
    _check_size("world_size", world_size)
    if not _is_int(rank) or not 0 <= rank < world_size:  # type: ignore[operator]
        raise MeshError(
            f"rank={rank!r}: must be an integer from 0 to {world_size - 1} "  # type: ignore[operator]
            f"in a world of {world_size}"
        )


def check_no_group(what: str) -> None:
    """Raises StateError if this process has a default process group."""
    if dist.is_initialized():
        raise StateError(
            f"{what}: this process is already rank {dist.get_rank()} of a default process group "
            f"of {dist.get_world_size()} ({dist.get_backend()}); destroy it first with "
            "torch.distributed.destroy_process_group()"
        )
