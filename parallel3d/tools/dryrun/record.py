"""record: runs a program as one rank of any world, on fake tensors, and returns what that rank did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from parallel3d._torch.dtensor import axis_groups
from parallel3d._torch.fake import VALUE_ERRORS
from parallel3d._util import dry_run
from parallel3d._util.users_code import raised_at
from parallel3d.errors import DryRunError, StateError
from parallel3d.testing.worlds import check_no_group, check_rank
from parallel3d.tools.dryrun.captures import CaptureChecker
from parallel3d.tools.dryrun.memory import (
    Held,
    local_of,
    memory_over_time,
    name_kinds,
    note_gradients,
    reserved_for,
)
from parallel3d.tools.dryrun.modes import DryMode, dtype_name
from parallel3d.tools.dryrun.place import Place
from parallel3d.tools.dryrun.result import DryRun, ParameterPlacement, StepCounts
from parallel3d.tools.dryrun.unknown import Undecided, why_not
from parallel3d.tools.dryrun.warnings import not_simulated
from parallel3d.tools.dryrun.world import ReadMode, as_on_gpu, as_rank, moves_played


class _Enough(BaseException):
    """Raised to end the program after the requested number of optimizer steps."""


def record(
    fn: Callable[[], Any],
    world_size: int,
    rank: int = 0,
    *,
    steps: int | None = None,
    gpus_per_node: int = 8,
    backend: str = "nccl",
    check_streams: bool = False,
    check_capture: bool = False,
) -> DryRun:
    """Calls ``fn`` as rank ``rank`` of ``world_size`` ranks, in this process, without their hardware.

    ``fn`` is the program: it makes its mesh, its model and its data itself. Within it floating-point tensors
    have no memory and no values, collectives return at once, and everything is on the CPU. Integers are real
    until they are combined with such tensors; data from a DataLoader is real. ``tensor.item()`` returns NaN
    (``dryrun.Unknown``), which can be printed and used in arithmetic, but not in a condition: see
    ``dryrun.assume``. Checkpoints are neither written nor read. ``torch.compile`` compiles nothing.

    Args:
        steps: number of optimizer steps after which ``fn`` is ended; by default it runs to its own end.
        gpus_per_node: ranks of a node, for ``LOCAL_RANK`` and for links between nodes.
        backend: ``nccl``: the engine does what it does on GPUs, with its streams; ``gloo``: what it does on
            CPUs.
        check_streams: whether to look for memory that two streams use with no wait between them; see
            ``DryRun.races``. Backward is assumed to run on the stream on which ``backward()`` is called.
        check_capture: whether to look for what keeps a training step out of a CUDA graph; see
            ``DryRun.obstacles``. The first two steps warm up. ``fn`` is ended at a step that depends on a
            value. It implies ``check_streams``.

    Raises:
        DryRunError: ``fn`` branches on an unknown value or names a device; the message has the line.
        MeshError: ``rank`` or ``world_size`` is out of range.
        StateError: this process already has a process group, or is in a dry run.
    """
    check_rank(rank, world_size)
    if dry_run.active():
        raise StateError("record: this process is in a dry run already")
    if gpus_per_node < 1:
        raise DryRunError(f"gpus_per_node={gpus_per_node}: it must be 1 or more")
    if backend not in ("nccl", "gloo"):
        raise DryRunError(f"backend={backend!r}: it must be 'nccl' (GPUs) or 'gloo' (CPUs)")
    if (check_streams or check_capture) and backend != "nccl":
        name = "check_capture" if check_capture else "check_streams"
        raise DryRunError(f"{name} with backend={backend!r}: there are no streams; use 'nccl'")
    check_streams = check_streams or check_capture
    check_no_group("record")
    start = time.perf_counter()

    def after_step(done: int) -> None:
        note_gradients(place.roots, mode.ledger)
        if steps is not None and done >= steps:
            raise _Enough

    place = Place(after_step)
    mode = DryMode(place, check_streams, check_capture)
    captures = mode.captures
    reading = ReadMode(mode)
    accelerator = mode.streams if backend == "nccl" else None
    world = as_rank(rank, world_size, gpus_per_node, backend, mode)
    with world, dry_run.running(accelerator, place.unrecorded, captures):
        moves = nullcontext() if mode.races is None else moves_played(mode.races)
        norms = as_on_gpu(place) if backend == "nccl" else nullcontext()
        seeds = captures.seeds_played()
        with _errors_explained(captures), place.following(), reading, norms, moves, seeds, mode:
            fn()
        name_kinds(place.roots, place.optimizers, mode.ledger)
        mode.ledger.closed = True
        memory, peak, step_peak = memory_over_time(mode.ledger, mode.operations)
        groups: dict[str, dist.ProcessGroup] = {}
        axes: tuple[str, ...] = ()
        if named := [mesh for mesh in mode.meshes if mesh.mesh_dim_names]:
            mesh = max(named, key=lambda mesh: (mesh.ndim, mesh.size()))
            groups, axes = axis_groups(mesh), mesh.mesh_dim_names or ()
            for other in named:  # views of the same ranks
                groups = axis_groups(other) | groups
        return DryRun(
            rank=rank,
            world_size=world_size,
            mesh={axis: groups[axis].size() for axis in axes},
            axis_ranks={x: tuple(dist.get_process_group_ranks(g)) for x, g in groups.items()},
            gpus_per_node=gpus_per_node,
            steps=place.steps,
            collectives=tuple(mode.recorder.calls),
            operations=tuple(mode.operations),
            memory=memory,
            peak=peak,
            parameters=_parameters(place.roots),
            unknown=reading.found,
            step_peak=step_peak,
            warnings=tuple(not_simulated(place.roots)),
            seconds=time.perf_counter() - start,
            step_counts=_step_counts(mode, place.steps),
            races=None if mode.races is None else mode.races.races(),
            obstacles=captures.obstacles(),
            reserved=None if accelerator is None else reserved_for(mode.ledger.changes),
        )


def _step_counts(mode: DryMode, steps: int) -> tuple[StepCounts, ...]:
    allocations: Counter[int] = Counter()
    sizes: dict[Held, int] = {}
    for change in mode.ledger.changes:
        if change.size and not sizes.get(change.held) and change.operation < len(mode.operations):
            allocations[mode.operations[change.operation].step] += 1
        sizes[change.held] = change.size
    return tuple(
        StepCounts(mode.reads[step], mode.host_waits[step], allocations[step])
        for step in range(steps + 1)
    )


@contextmanager
def _errors_explained(captures: CaptureChecker) -> Iterator[None]:
    """Turns errors that a dry run causes into DryRunErrors with the reason. ``_Enough`` just ends the body;
    so does, in a step of the capture checker, a need for a value, which the checker then reports."""
    try:
        yield
    except _Enough:
        pass
    except Undecided as error:
        if not captures.breaks_off(error.what, error.where):
            raise
    except (*VALUE_ERRORS, TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = why_not(error)
        if reason is None:
            raise
        where = raised_at(error) or "?"
        by_shape = isinstance(error, VALUE_ERRORS)
        if not captures.breaks_off(reason, where, by_shape=by_shape):
            raise DryRunError(f"{where}: {reason}") from error


def _parameters(roots: list[nn.Module]) -> tuple[ParameterPlacement, ...]:
    """Returns the placements of the largest root module's parameters (of equal ones the last)."""
    if not roots:
        return ()
    model = max(reversed(roots), key=lambda root: sum(p.numel() for p in root.parameters()))
    found = []
    for name, param in model.named_parameters():
        local, placed = local_of(param), {}
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            axes = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
            placed = {axis: str(p) for axis, p in zip(axes, param.placements, strict=True)}
        shapes = tuple(param.shape), tuple(local.shape)
        size = local.numel() * local.element_size()
        found.append(
            ParameterPlacement(name, *shapes, dtype_name(param), placed, size, param.requires_grad)
        )
    return tuple(found)
