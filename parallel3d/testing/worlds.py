"""Worlds of many ranks in one process.

In ``fake_world`` this process is one rank of a world whose collectives do nothing: shapes, placements and the
list of collectives are real, values are not. ``local_world`` simulates all ranks, with real values. Both
destroy their process group on exit, also when the body raises.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import untraced
from parallel3d._torch.dtensor import OpOverload, clear_dtensor_caches, get_local_tensor
from parallel3d._torch.fake import init_fake_group
from parallel3d._torch.simulated import (
    LocalTensor,
    LocalTensorMode,
    inner_tensors,
    join_ranks,
    make_simulated,
    simulation_paused,
    update_sizes,
    value_on_rank,
)
from parallel3d._torch.v2_11 import fake_outputs_written, uneven_matmuls
from parallel3d._util.recorder import active_recorders, collective_signature
from parallel3d._util.trees import tensors_in
from parallel3d.errors import MeshError, StateError

_SIZES = (torch.ops.aten.sym_size.default, torch.ops.aten.size.default)


class SimulationMode(LocalTensorMode):
    """torch's ``LocalTensorMode``, several times faster, and with an error for collectives on plain tensors.

    For every operation torch flattens all argument lists, saves and restores the state of the generators for
    each rank, gives views the storage of their base (which asks Python for sizes three times) and keeps sizes
    in Python. None of that changes the result of an ordinary operation, so these operations skip it; random
    numbers, collectives and other special operations are run by torch's mode.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._order = tuple(sorted(self.ranks))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's way of skipping wraps each call; ``untraced`` does not

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
            return NotImplemented  # DTensor dispatches first, then calls this with local tensors
        if any(kind is not LocalTensor for kind in types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if types and func in _SIZES:
            return tuple(args[0]._size)
        if types and func is torch.ops.aten.dim.default:
            return len(args[0]._size)
        # Plain tensors stay plain, except a mesh's coordinates, which differ by rank.
        values = (*args, *kwargs.values())
        if not types and func.namespace != "device_mesh" and list(tensors_in(values)):
            return func(*args, **kwargs)
        if _is_ordinary(func):
            return self._on_each_rank(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(func, OpOverload) and torch.Tag.inplace_view in func.tags:
            update_sizes(args[0], func, args, kwargs)
        return result

    def rank_map(self, cb: Any) -> Any:
        with self.disable():
            return make_simulated({rank: cb(rank) for rank in self._order}, self.ranks)

    def _on_each_rank(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = {}
        copied: list[RuntimeError] = []
        for rank in self._order:
            on_rank = [value_on_rank(a, rank) for a in args]
            named = {name: value_on_rank(a, rank) for name, a in kwargs.items()}
            try:
                results[rank] = func(*on_rank, **named)
            except RuntimeError as error:
                if func is not torch.ops.aten.view.default:
                    raise
                # ``reshape`` has looked at another rank's strides to see whether it needs a copy.
                copied.append(error)
                results[rank] = on_rank[0].reshape(on_rank[1])
        if len(copied) == len(self._order):
            raise copied[0]  # it was ``view`` itself
        if func._schema.name[-1] == "_" and func._schema.returns:
            return args[0]  # in place
        first = results[self._order[0]]
        if isinstance(first, list) and any(len(r) != len(first) for r in results.values()):
            return super().__torch_dispatch__(func, (LocalTensor,), args, kwargs)  # pads the list
        return join_ranks(results, self.ranks)


@functools.cache
def _is_ordinary(func: Any) -> bool:
    """Returns whether ``func`` can be called rank by rank: from tensors to tensors, no other effect."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    schema = func._schema
    special = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(func.tags)
    if special or schema.name in _SPECIAL or any(a.is_out for a in schema.arguments):
        return False
    if schema.name[-1] == "_" and schema.returns and not schema.arguments[0].is_write:
        return False
    return all(str(value.type) in _TENSORS for value in schema.returns)


_SPECIAL = frozenset({"aten::hash_tensor"})  # torch's mode has a case for empty tensors
_TENSORS = frozenset({"Tensor", "Optional[Tensor]", "List[Tensor]"})


def _check_not_plain(func: Any, types: Sequence[Any]) -> None:
    """Raises StateError for a collective on plain tensors only, which would silently do nothing.

    A barrier, and a broadcast of a tensor that is equal on all ranks, need to do nothing.
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
    """What ``fake_world`` yields: this process's ``rank`` and the ``size`` of the world."""

    rank: int
    size: int


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[FakeWorld]:
    """Makes this process rank ``rank`` of ``world_size``, on torch's fake process group.

    Collectives return at once without communicating, so a world of thousands of ranks costs nothing. Use it
    for shapes, placements and counts, not for values.

    Args:
        rank: this process's global rank, ``0 <= rank < world_size``.
        world_size: number of ranks, at least 1.

    Raises:
        MeshError: ``rank`` or ``world_size`` is out of range.
        StateError: a default process group is already initialised.
    """
    check_rank(rank, world_size)
    check_no_group("fake_world")
    with _fake_group(rank, world_size), fake_outputs_written():
        yield FakeWorld(rank, world_size)


class LocalWorld:
    """The simulated ranks that ``local_world`` yields.

    Attributes:
        size: number of simulated ranks.
    """

    def __init__(self, size: int, mode: LocalTensorMode) -> None:
        self.size = size
        self._mode = mode

    def map(self, fn: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Returns a tensor that is ``fn(rank)`` on each rank: per-rank inputs or parameters.

        Sizes may differ by rank; dtype, device and number of dims may not. ``fn`` runs with the simulation
        paused, so the tensors it makes are plain. The result is a leaf that does not require a gradient.

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
        """Returns each rank's ``tensor``, or local tensor of a DTensor, in the order of the ranks.

        A plain tensor, the same on every rank, is repeated. The tensors are not copies: writing to one
        changes that rank's tensor.
        """
        if isinstance(tensor, DTensor):
            tensor = get_local_tensor(tensor)
        inner = list(inner_tensors(tensor))
        return inner if isinstance(tensor, LocalTensor) else inner * self.size

    def paused(self) -> AbstractContextManager[None]:
        """Context manager that suspends the simulation, so that a plain model is built and runs fast."""
        return self._mode.disable()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Context manager that switches the simulation on again within ``paused()``."""
        self._mode.enable_()
        try:
            yield
        finally:
            self._mode.disable_()


@contextmanager
def local_world(n: int) -> Iterator[LocalWorld]:
    """Simulates ``n`` ranks with real values in this process.

    Inside, tensors made by factory calls (``torch.zeros``, ``torch.empty``) hold one tensor per rank,
    ``dist`` collectives exchange real values, and a mesh's ``get_local_rank`` is symbolic; tensors made
    outside stay plain. Build the plain model outside, or under ``paused()``.

    Args:
        n: number of ranks, at least 1.

    Raises:
        MeshError: ``n`` is not a positive integer.
        StateError: a default process group is already initialised; in the body, a collective is called on a
            plain tensor, which would silently do nothing.
    """
    check_count("n", n)
    check_no_group("local_world")
    if active_recorders:
        raise StateError(
            f"local_world({n}) was entered inside record_collectives(), which would then see no "
            "collective: enter record_collectives() inside local_world()"
        )
    with _fake_group(0, n), uneven_matmuls(), SimulationMode(n) as mode:
        yield LocalWorld(n, mode)


@contextmanager
def _fake_group(rank: int, world_size: int) -> Iterator[None]:
    hook = sys.excepthook  # torch's groups wrap it, each adding "[rank0]: "
    init_fake_group(rank, world_size)
    try:
        yield
    finally:
        destroy_group()
        sys.excepthook = hook


def destroy_group() -> None:
    """Destroys the default process group and clears torch's caches of its meshes."""
    if dist.is_initialized():  # the body may have destroyed it
        dist.destroy_process_group()
    clear_dtensor_caches()


def check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise MeshError(f"{name}={value!r}: must be a positive integer")


def check_rank(rank: Any, world_size: Any) -> None:
    check_count("world_size", world_size)
    if type(rank) is not int or not 0 <= rank < world_size:
        raise MeshError(
            f"rank={rank!r}: must be an integer from 0 to {world_size - 1} in a world of {world_size}"
        )


def check_no_group(what: str) -> None:
    """Raises StateError if this process already has a default process group."""
    if dist.is_initialized():
        raise StateError(
            f"{what}: this process is already rank {dist.get_rank()} of a default process group "
            f"of {dist.get_world_size()} ({dist.get_backend()}); destroy it first with "
            "torch.distributed.destroy_process_group()"
        )
