"""Worlds of many ranks in one process.

``fake_world`` plays one rank of a world whose collectives do nothing: shapes, placements and the
list of collectives are real, numbers are not. ``local_world`` plays all ranks at once, with real
numbers. Both destroy their process group on exit, also when the body raises.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from parallel3d._compat import (
    clear_dtensor_caches,
    fake_outputs_written,
    get_local_tensor,
    init_fake_group,
    inner_tensors,
)
from parallel3d._compat_simulated import LocalTensor, LocalTensorMode, uneven_matmuls
from parallel3d._recorder import active_recorders
from parallel3d.errors import MeshError, StateError
from parallel3d.testing._simulation import SimulationMode

__all__ = ["FakeWorld", "LocalWorld", "fake_world", "local_world"]


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
